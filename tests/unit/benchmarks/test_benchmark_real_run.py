"""The real run of the orchestrate benchmark is given up in time, and its failure is a row, so that other sections are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.orchestrate import real_run


def test_no_command_is_started_once_the_time_is_over(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^not done within 0 s$"):
        real_run.RealRun(tmp_path, replace(real_run.QUICK, longest_s=0.0)).rows()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_a_row_that_misses_its_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_run, "QUICK", replace(real_run.QUICK, longest_s=0.0))
    [section] = real_run.sections(quick=True)
    [row] = section.rows
    assert section.title == "a placement of the tiny model on 2 cores: steps 12 to 19, measured"
    assert (row.name, row.ok, row.detail) == ("could not be measured", False, "failed: not done within 0 s")
