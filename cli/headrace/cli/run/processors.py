"""How many processors this process may use, and libraries that keep to it."""

from __future__ import annotations

import math
import os
from pathlib import Path

from headrace.cli.run.control_group import limits


def usable_processors(root: Path = Path("/")) -> int:
    """At least 1: those that the affinity admits, or as many as a container's quota of time comes to, rounded up.

    A quota is that of the process's control group or of one above it (cgroup v1 and v2), whichever is least. `root`: where
    /proc and /sys are.
    """
    admitted = len(os.sched_getaffinity(0))
    return max(1, min([admitted, *(math.ceil(quota) for quota in _quotas(root))]))


def share_processors() -> None:
    """Set, in the environment, what numerical libraries read when they are loaded; what is set already stays.

    Their threads are as many as this process may use, and those of torchrun's ranks on one host share them. Threads that have
    nothing to do sleep: as torch's OpenMP comes, they turn in circles for milliseconds and take the processor from whom they
    wait for, which makes a step forty times as long where others work beside it.
    """
    threads = str(max(1, usable_processors() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):  # the first is that of torch, MKL, OpenBLAS and Arrow
        os.environ.setdefault(name, threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # the same for builds of torch with LLVM's or Intel's OpenMP


def _quotas(root: Path) -> list[float]:
    """Processors that each group above this process may use, of those that have a limit."""
    groups = limits("cpu", "cpu.max", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), root)
    return [quota for quota in (_quota(*words) for words in groups) if quota > 0]


def _quota(quota_us: str = "", period_us: str = "") -> float:
    """0 where there is no limit: a quota of `max` or -1, or none at all."""
    try:
        return max(0.0, int(quota_us) / int(period_us))
    except (ValueError, ZeroDivisionError):
        return 0.0
