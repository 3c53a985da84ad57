"""Child processes that do not outlive us."""

from __future__ import annotations

import os
import signal
import sys

# A launcher, and not `preexec_fn`: between fork and exec no Python may run in a process that has gRPC's threads.
_LAUNCHER = """
import ctypes, os, sys
number, parent = int(sys.argv[1]), int(sys.argv[2])
ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG, which outlives exec
if os.getppid() != parent: sys.exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def ending_with_us(command: list[str], number: signal.Signals) -> list[str]:
    """`command` for Popen such that it gets the signal `number` when the thread that starts it ends, however that ends.

    It keeps Popen's process id. Linux only; elsewhere it is the command itself.
    """
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(int(number)), str(os.getpid()), *command]
