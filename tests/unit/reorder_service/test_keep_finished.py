"""Which finished jobs are dropped: those that ended long ago, and the oldest of too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from headrace.cli.run.reorder import KEEP_FINISHED
from headrace.errors import UserError
from headrace.reorder_service.keep_finished import DAY_S, KeepFinished
from headrace.reorder_service.store.finished_jobs import JobNote

NOW_S = 100 * DAY_S


def job(name: str, *, days_ago: float | None = None, state: str = "DONE") -> JobNote:
    ended_s = None if days_ago is None else NOW_S - days_ago * DAY_S
    return JobNote(job=name, state=state, message="", committed_steps=0, ended_s=ended_s, summary=None)


def dropped(text: str, *notes: JobNote) -> list[str]:
    return [note.job for note in KeepFinished.parse(text).dropped(notes, NOW_S)]


def test_a_job_is_dropped_some_days_after_its_end() -> None:
    notes = job("new", days_ago=6.9), job("old", days_ago=7.1), job("failed", days_ago=9, state="FAILED")
    assert dropped("7,5000", *notes) == ["failed", "old"]
    assert dropped("0.5,5000", *notes) == ["failed", "old", "new"]


def test_of_too_many_those_that_ended_first_are_dropped() -> None:
    notes = [job(f"{days_ago} days", days_ago=days_ago) for days_ago in (3, 1, 2, 5, 4)]
    assert dropped("7,2", *notes) == ["5 days", "4 days", "3 days"]
    assert dropped("7,0", *notes) == ["5 days", "4 days", "3 days", "2 days", "1 days"]


def test_what_runs_and_what_has_not_been_noted_to_be_over_is_kept() -> None:
    assert dropped("0,0", job("running", days_ago=9, state="RUNNING"), job("just over")) == []


@given(some.lists(some.floats(0, 1e4)))
def test_ever_drops_nothing(days_ago: list[float]) -> None:
    assert dropped("ever", *(job(str(place), days_ago=days) for place, days in enumerate(days_ago))) == []


@given(some.lists(some.integers(0, 20)), some.integers(0, 9))
def test_what_is_kept_are_the_latest_and_as_many_as_may_be(days_ago: list[int], most: int) -> None:
    notes = [job(str(place), days_ago=days) for place, days in enumerate(days_ago)]
    gone = {note.job for note in KeepFinished(days=10, jobs=most).dropped(notes, NOW_S)}
    kept = [days for place, days in enumerate(days_ago) if str(place) not in gone]
    assert sorted(kept) == sorted(days for days in days_ago if days <= 10)[:most]


@pytest.mark.parametrize("text", ["", "7", "7,", ",5", "-1,5", "7,-5", "nan,5", "7,5.5", "7,5,9", "a week", "never"])
def test_anything_else_is_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match="neither DAYS,JOBS") as caught:
        KeepFinished.parse(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_keeps_a_week_and_some_thousands() -> None:
    assert KeepFinished.parse(KEEP_FINISHED) == KeepFinished(days=7, jobs=5000)
