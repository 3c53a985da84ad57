"""Benchmarks wait for commands no longer than they may, and no longer than until the first of them fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.forecast.live_job import await_end
from headrace.processes import Process, ProcessGroup


def service(folder: Path) -> Process:
    """A reorder service, which does not end by itself."""
    options = ["--listen", "127.0.0.1:0", "--store", f"embedded:{folder / 'store'}"]
    return Process("service", ["reorder", *options], folder / "service.log")


def test_a_failure_is_told_while_others_go_on(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        group.add(service(tmp_path))
        group.add(Process("trainer", ["train"], tmp_path / "trainer.log"))
        with pytest.raises(RuntimeError, match=r"trainer ended with 2: headrace train: one of the arguments "):
            await_end(group.processes, 600.0)
        assert group.processes[0].exit_code() is None


def test_what_does_not_end_in_time_is_told(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        group.add(service(tmp_path))
        with pytest.raises(RuntimeError, match=r"service has not ended after 0 s; its last words: "):
            await_end(group.processes, 0.0)


def test_all_that_ends_well_is_awaited(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        for number in range(2):
            group.add(Process(f"version {number}", ["--version"], tmp_path / f"{number}.log"))
        await_end(group.processes, 600.0)
        assert [process.exit_code() for process in group.processes] == [0, 0]
        assert all(process.last_lines(1)[0].startswith("headrace ") for process in group.processes)
