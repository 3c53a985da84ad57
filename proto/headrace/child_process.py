"""Child processes that do not outlive their parent."""

from __future__ import annotations

import os
import signal
import sys

# A launcher rather than `preexec_fn`: no Python may run between fork and exec in a process that has gRPC's threads.
_LAUNCHER = """
import ctypes, os, sys
number, parent = int(sys.argv[1]), int(sys.argv[2])
ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG, which outlives exec
if os.getppid() != parent: sys.exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def with_parent_death_signal(command: list[str], number: signal.Signals) -> list[str]:
    """Return a command for Popen that runs `command` and gets the signal `number` when the thread that starts it ends, however
    that happens. The process keeps the id that Popen knows. Linux only; elsewhere `command` is returned unchanged.
    """
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(int(number)), str(os.getpid()), *command]
