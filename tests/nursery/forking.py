"""The other end of a nursery, which must have no thread: a fork has all of the process but its threads.

Each line on stdin is a JSON object: a "number", and what the function to run takes. It says {"number", "pid"} for each on
stdout, and later {"pid", "code"}: its exit code, or minus the signal that ended it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

POLL_S = 0.02
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def serve(run: Callable[..., int]) -> int:
    """Fork for each order a process that calls `run` with it, and ends with the code that it returns. 0 once stdin ends."""
    gc.freeze()
    said = b""
    while True:
        if select.select([0], [], [], POLL_S)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return 0
            *lines, said = (said + chunk).split(b"\n")
            for line in lines:
                order = json.loads(line)
                number = order.pop("number")
                pid = os.fork()
                if not pid:
                    _end(run(**order))
                _say(number=number, pid=pid)
        _bury()


def _end(code: int) -> NoReturn:
    """End a fork as an interpreter ends, but free nothing: the pages that it shares would be copied for that, in 0.6 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _bury() -> None:
    """Tell of all processes that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say(pid=pid, code=os.waitstatus_to_exitcode(status))


def _say(**message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def leave(log: Path, errors: Path | None = None) -> None:
    """In a fork: have a session of its own, nothing to read, and all output in `log`; end with the nursery.

    errors: for what it writes to stderr; None: `log` too.
    """
    die_with_parent()
    os.setsid()
    for standard, path in ((1, log), (2, errors or log)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def die_with_parent() -> None:
    """Get SIGKILL when the parent ends."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
