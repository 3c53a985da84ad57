"""The list of goals that are missed, in the README of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.missed_goals import BEGIN, END, README, with_missed_goals


def test_the_readme_lists_the_goals_that_the_results_in_the_repository_miss() -> None:
    text = README.read_text(encoding="utf-8")
    assert with_missed_goals(text) == text, "run python -m benchmarks.missed_goals"


def test_rows_without_a_goal_and_rows_that_meet_theirs_are_left_out(tmp_path: Path) -> None:
    row = {"section": "Speed", "value": 2.0, "unit": "s", "goal": "<= 1"}
    rows = [{**row, "name": "slow", "ok": False}, {**row, "name": "quick", "ok": True}, {**row, "name": "other", "ok": None}]
    (tmp_path / "some.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    table = with_missed_goals(f"{BEGIN}\nold\n{END}", tmp_path)
    assert "| [some](results/some.json) | Speed: slow | 2 s | <= 1 |" in table
    assert not any(word in table for word in ("quick", "other", "old"))


def test_a_readme_without_the_marks_is_not_written() -> None:
    with pytest.raises(ValueError, match="substring not found"):
        with_missed_goals("no marks")
