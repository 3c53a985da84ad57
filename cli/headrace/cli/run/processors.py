"""Find how many processors this process may use, and keep libraries to them."""

from __future__ import annotations

import math
import os
from pathlib import Path

from headrace.cli.run.control_group import limits
from headrace.errors import UserError
from headrace.launcher_variables import local_num_ranks


def usable_processors(root: Path = Path("/")) -> int:
    """Return how many processors this process may use, at least 1: the least of its CPU affinity and a container's CPU quota.

    The quota is rounded up. It is the least of the process's control group and those above it (cgroup v1 and v2). `root`: where
    /proc and /sys are.
    """
    admitted = len(os.sched_getaffinity(0))
    return max(1, min([admitted, *(math.ceil(quota) for quota in _quotas(root))]))


def share_processors() -> None:
    """Limit the threads of numerical libraries by environment variables that they read when loaded; those that are set stay.

    A process gets as many threads as it may use processors; torchrun's ranks on one host share them. Idle threads sleep: by
    default, those of torch's OpenMP spin for milliseconds and take the processor from the threads they wait for, which makes a
    step forty times as long where others work beside it.
    """
    try:
        count = local_num_ranks()
    except UserError:  # `headrace train` says it; all other commands have no use for it
        count = 1
    for name, threads in _threads(count).items():
        os.environ.setdefault(name, threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # the same for builds of torch with LLVM's or Intel's OpenMP


def shares(count: int) -> dict[str, str]:
    """Return the variables that have each of `count` children share this process's threads, unless a user has limited these."""
    whole = _threads(1)
    return {name: threads for name, threads in _threads(count).items() if os.environ.get(name) == whole[name]}


def _threads(count: int) -> dict[str, str]:
    """Return the variables that libraries read, for each of `count` processes."""
    names = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")  # the first is that of torch, MKL, OpenBLAS and Arrow
    return dict.fromkeys(names, str(max(1, usable_processors() // count)))


def _quotas(root: Path) -> list[float]:
    """Return the processors allowed by the process's group and each group above it, for those that have a limit."""
    groups = limits("cpu", "cpu.max", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), root)
    return [quota for quota in (_quota(*words) for words in groups) if quota > 0]


def _quota(quota_us: str = "", period_us: str = "") -> float:
    """Return the processors that a quota allows; 0 if there is no limit: a quota of `max` or -1, or none at all."""
    try:
        return max(0.0, int(quota_us) / int(period_us))
    except (ValueError, ZeroDivisionError):
        return 0.0
