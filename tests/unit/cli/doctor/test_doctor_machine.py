"""What a machine gives: each limit that is too low, or folder that cannot be written, is named with the remedy."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

import pytest

from headrace.cli.doctor import machine
from headrace.cli.doctor.diagnosis import Diagnosis, State

GIB = 1 << 30
NOBODY_WRITES = Path("/proc")  # not even root


def only(found: Iterable[Diagnosis]) -> Diagnosis:
    (one,) = found
    return one


def test_shared_memory_with_room_is_well(tmp_path: Path) -> None:
    assert only(machine.shared_memory(tmp_path, budget_mib=0)).state is State.OK
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_that_cannot_be_written_is_a_fault() -> None:
    one = only(machine.shared_memory(NOBODY_WRITES))
    assert one.state is State.FAULT
    assert one.found.startswith("cannot be written (")
    assert "--shm-size" in one.remedy


def test_shared_memory_that_is_not_there_costs_speed_only(tmp_path: Path) -> None:
    one = only(machine.shared_memory(tmp_path / "none"))
    assert (one.state, one.remedy) == (State.WARNING, f"mount a tmpfs at {tmp_path / 'none'}")


def test_shared_memory_of_a_container_is_too_small() -> None:
    blocks = 64 << 20 >> 12
    status = os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, 0, 255))
    one = machine.room("/dev/shm", status, 512)
    assert one.state is State.WARNING
    assert one.found == "64 of 64 MiB are free, fewer than the 512 that a preprocessor takes by default"
    assert one.remedy == "give it more (in a container --shm-size 1g), or start preprocessors with --budget-mib 32"


def test_a_low_limit_on_open_files_is_found() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        one = only(machine.open_files())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert one.state is not State.OK
    assert one.found.startswith("256 at a time")
    assert "1024" in one.remedy


@pytest.mark.parametrize(
    ("limits", "state"),
    [
        ((1024, 4096), State.OK),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), State.OK),
        ((256, 4096), State.WARNING),
        ((256, 256), State.FAULT),
    ],
)
def test_a_limit_that_processes_raise_themselves_is_no_fault(limits: tuple[int, int], state: State) -> None:
    assert only(machine.open_files(limits)).state is state


@pytest.mark.parametrize(
    ("environment", "state", "found"),
    [
        ({}, State.OK, "4 may be used"),
        ({"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "4"}, State.OK, "1 thread for"),
        ({"OMP_NUM_THREADS": "64"}, State.WARNING, "OMP_NUM_THREADS=64 asks for more threads"),
        ({"OMP_NUM_THREADS": "many"}, State.WARNING, "'many' is no number of threads"),
    ],
)
def test_more_threads_than_processors_are_found(environment: dict[str, str], state: State, found: str) -> None:
    one = only(machine.processors(4, environment))
    assert one.state is state
    assert found in one.found
    assert one.remedy == ("" if state is State.OK else "unset OMP_NUM_THREADS")


def test_little_memory_is_found() -> None:
    assert only(machine.memory(8 * GIB)).found == "8.0 GiB may be used"
    one = only(machine.memory(GIB))
    assert one.state is State.WARNING
    assert "--budget-mib 128" in one.remedy


def test_machine_code_needs_a_folder(tmp_path: Path) -> None:
    one = only(machine.kernel_cache(NOBODY_WRITES, {"HOME": str(NOBODY_WRITES)}))
    assert (one.state, one.remedy) == (State.WARNING, "name a folder that can be written to in NUMBA_CACHE_DIR")
    named = {"HOME": str(NOBODY_WRITES), "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    assert "the first start compiles it" in only(machine.kernel_cache(NOBODY_WRITES, named)).found
    (tmp_path / "planning").mkdir()
    (tmp_path / "planning" / "kernel.nbi").touch()
    assert only(machine.kernel_cache(tmp_path, {})).found == f"its machine code is in {tmp_path}"


def test_a_clock_that_nobody_keeps_is_found() -> None:
    assert only(machine.clock(0.0, 0)).state is State.FAULT
    kept, alone, unknown = (only(machine.clock(1_800_000_000.0, state)) for state in (0, 5, -1))
    assert (kept.state, kept.found) == (State.OK, "2027-01-15 08:00:00 UTC, kept by a time service")
    assert (alone.state, unknown.state) == (State.WARNING, State.OK)
    assert "chrony" in alone.remedy


def test_this_machine_can_be_examined() -> None:
    """Whatever it has."""
    for examine in (machine.shared_memory, machine.open_files, machine.processors, machine.memory, machine.clock):
        assert only(examine()).found
    assert only(machine.kernel_cache()).check == "planner"
