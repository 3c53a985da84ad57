"""Threads and memory follow the share of the machine that a process has: its affinity, and the limits of its container."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.cli.run.memory import usable_memory
from headrace.cli.run.processors import usable_processors

ALL = len(os.sched_getaffinity(0))
DOCKER_V1 = (
    "9:name=systemd:/docker/1f\n3:cpu,cpuacct:/docker/1f\n0::/docker/1f\n"  # the host's path: what is mounted is 1f itself
)

THREADS = """
import sys
from headrace.cli import main
from headrace.cli.run import health

def run(args):
    import torch
    print(torch.get_num_threads(), main.os.environ["NUMBA_NUM_THREADS"], main.os.environ["OMP_WAIT_POLICY"])
    return 0

health.run = run
sys.exit(main.main(["health", "127.0.0.1:1"]))
"""


def machine(root: Path, group: str, files: Mapping[str, str]) -> Path:
    """What a process of that control group sees below /proc and /sys."""
    for name, text in {"proc/self/cgroup": group, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}),  # a container with a namespace of its own
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}),  # the one above has the limit
        (DOCKER_V1, {"cpu,cpuacct/cpu.cfs_quota_us": "100000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}),
        ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "20000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}),
    ],
)
def test_a_quota_of_at_most_one_processor_is_one(tmp_path: Path, group: str, files: Mapping[str, str]) -> None:
    assert usable_processors(machine(tmp_path, group, files)) == 1


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("", {}),
        ("0::/\n", {}),
        ("0::/\n", {"cpu.max": "max 100000\n"}),
        ("0::/\n", {"cpu.max": f"{100_000 * ALL - 50_000} 100000\n"}),  # a part of one counts whole
        ("0::/\n", {"cpu.max": f"{100_000 * (ALL + 5)} 100000\n"}),
        ("0::/../outside\n", {"cpu.max": "max 100000\n"}),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}),
    ],
)
def test_without_a_quota_that_counts_it_is_what_the_affinity_admits(tmp_path: Path, group: str, files: Mapping[str, str]) -> None:
    assert usable_processors(machine(tmp_path, group, files)) == ALL


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/\n", {"memory.max": f"{64 << 20}\n"}),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{64 << 20}\n", "memory.max": f"{128 << 20}\n"}),
        ("4:memory:/docker/1f\n0::/docker/1f\n", {"memory/memory.limit_in_bytes": f"{64 << 20}\n"}),
    ],
)
def test_the_least_limit_of_memory_counts(tmp_path: Path, group: str, files: Mapping[str, str]) -> None:
    assert usable_memory(machine(tmp_path, group, files)) == 64 << 20


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("", {}),
        ("0::/\n", {"memory.max": "max\n"}),
        ("0::/\n", {"memory.max": f"{1 << 62}\n"}),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}),  # how v1 says that there is none
    ],
)
def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path, group: str, files: Mapping[str, str]) -> None:
    assert usable_memory(machine(tmp_path, group, files)) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def told(pinned: str, **environment: str) -> str:
    """What torch and others get in a command on those processors."""
    free = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "NUMBA_", "LOCAL_"))}
    command = ["taskset", "--cpu-list", pinned, sys.executable, "-c", THREADS]
    return subprocess.run(command, check=True, text=True, capture_output=True, timeout=100, env=free | environment).stdout.strip()


@pytest.mark.slow
def test_a_commands_libraries_take_as_many_threads_and_none_waits_in_circles() -> None:
    some = sorted(os.sched_getaffinity(0))
    assert told(str(some[0])) == "1 1 PASSIVE"
    everything = ",".join(map(str, some))
    assert told(everything, LOCAL_WORLD_SIZE=str(len(some))) == "1 1 PASSIVE"
    assert told(everything, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="active") == f"1 {len(some)} active"
