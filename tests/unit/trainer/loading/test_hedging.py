"""When another preprocessor is asked: the deadline, and who is not waited for again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.trainer.loading.hedging import Hedging

seconds = st.floats(0.001, 1000.0)


def due_s(hedging: Hedging, endpoint: str) -> float:
    """Of a part that is asked for and waited for since second 100."""
    return hedging.due_s(endpoint, awaited_s=100.0, asked_s=100.0)


@pytest.mark.parametrize(("awaited_s", "asked_s"), [(100.0, 20.0), (20.0, 100.0)])
def test_a_part_is_due_a_deadline_after_it_was_asked_for_and_the_wait_for_it_began(awaited_s, asked_s):
    """Not sooner, however long ago it was fetched ahead, or however long it had no place."""
    assert Hedging(5.0).due_s("slow", awaited_s=awaited_s, asked_s=asked_s) == 105.0


def test_what_usually_takes_long_is_waited_for_longer():
    hedging = Hedging(5.0)
    for took_s in (1.0, 3.0, 30.0):
        hedging.record_answer("busy", took_s)
    assert hedging.deadline_s == 12.0, "four times the median"
    for _ in range(32):
        hedging.record_answer("busy", 0.1)
    assert hedging.deadline_s == 5.0, "only deliveries of late count"


def test_who_let_a_deadline_pass_is_not_waited_for_until_it_answers():
    hedging = Hedging(5.0)
    hedging.mark_stalled("hung")
    assert due_s(hedging, "hung") == 100.0
    assert due_s(hedging, "other") == 105.0
    hedging.record_answer("other", 0.1)
    assert due_s(hedging, "hung") == 100.0
    hedging.record_answer("hung")
    assert due_s(hedging, "hung") == 105.0


@given(took=st.lists(seconds, max_size=40), hedge_s=seconds, awaited_s=seconds, asked_s=seconds)
def test_nobody_who_has_passed_no_deadline_is_waited_for_less_than_the_user_said(took, hedge_s, awaited_s, asked_s):
    hedging = Hedging(hedge_s)
    for took_s in took:
        hedging.record_answer("there", took_s)
    assert hedging.deadline_s >= hedge_s
    assert hedging.due_s("there", awaited_s=awaited_s, asked_s=asked_s) >= awaited_s + hedge_s


@pytest.mark.parametrize("hedge_s", [0.0, -1.0, math.nan])
def test_a_deadline_that_is_none_is_refused(hedge_s):
    with pytest.raises(UserError, match="must be above 0"):
        Hedging(hedge_s)
