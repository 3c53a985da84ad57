"""How much memory this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.cli.run.control_group import limits


def usable_memory(root: Path = Path("/")) -> int:
    """Return how many bytes of memory this process may use: those of the machine, or the least limit of its control groups.

    These are the process's own group and all above it (cgroup v1 and v2). `root`: where /proc and /sys are.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = limits("memory", "memory.max", ("memory.limit_in_bytes",), root)
    return min([physical, *(int(word) for words in groups for word in words if word.isdecimal() and int(word))])
