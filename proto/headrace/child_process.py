"""Child processes that do not outlive their parent, and how one has ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable

LAST_LINES = 20

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


def how_ended(exit_code: int) -> str:
    """Return in words how a process has ended, of the exit code that Popen knows: below 0 it is that of a signal."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:  # most real-time signals have no name
        return f"was ended by signal {-exit_code}"


def last_words(lines: Iterable[str]) -> str:
    """Return the last line of a process's log and, below it, up to LAST_LINES before it: for a log that goes with its folder."""
    said = [line for line in lines if line.strip()][-1 - LAST_LINES :] or ["no word of it"]
    return "\n  ".join([said[-1], *said[:-1]])
