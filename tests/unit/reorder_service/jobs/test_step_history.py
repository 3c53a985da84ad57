"""The figures of the latest steps, as a job that runs leaves them behind."""

from __future__ import annotations

import math

import pytest

from headrace.reorder_service.jobs.planned_step import PlannedStep, RankCommit
from headrace.reorder_service.jobs.step_balance import Balance
from headrace.reorder_service.jobs.step_history import KEPT_STEPS, StepHistory
from headrace.reorder_service.store.progress import StepRecord
from tests.unit.reorder_service.job_world import Start, consume, submit


def record(step_s: float = 2.0) -> StepRecord:
    return StepRecord(samples=("a", "b"), substitutes=("c",), loss=1.0, step_s=step_s, data_wait_s=0.5)


def step(index: int, step_s: float = 2.0) -> PlannedStep:
    planned = PlannedStep(index=index, refs=[])
    planned.commits[0] = RankCommit(rejected=(), loss=1.0, step_s=step_s, data_wait_s=0.5)
    return planned


async def test_a_job_leaves_the_figures_of_its_steps_behind_and_takes_back_what_it_undoes(start: Start) -> None:
    run = await submit(await start())
    await consume(run, run.open_session(0, 1), stop=4)
    steps = run.cursor.history.latest(3)
    assert [(one.step, one.samples, one.measured_s, one.data_wait_s) for one in steps] == [(n, 4, 1.0, 0.0) for n in (1, 2, 3)]
    assert all(math.isnan(one.forecast_s) for one in steps)  # nothing was measured that a forecast could be made from
    assert all(one.balance is not None and one.balance.after >= 1.0 for one in steps)
    await run.rewind(2)
    assert [one.step for one in run.cursor.history.latest(9)] == [0, 1]
    await consume(run, run.open_session(0, 1))
    assert [one.step for one in run.cursor.history.latest(9)] == [0, 1, 2, 3, 4, 5]


def test_it_keeps_as_many_as_it_says_and_no_gap() -> None:
    history = StepHistory()
    for index in range(KEPT_STEPS + 5):
        history.add(step(index), record())
    assert [one.step for one in history.latest(KEPT_STEPS + 9)] == list(range(5, KEPT_STEPS + 5))
    history.add(step(KEPT_STEPS + 9), record())
    assert [one.step for one in history.latest(9)] == [KEPT_STEPS + 9]


def test_the_balance_is_that_of_the_latest_plan_of_a_step() -> None:
    history = StepHistory()
    for after in (3.0, 1.25):
        history.note_plan(0, Balance(before=3.0, after=after))
    history.add(step(0), record())
    history.add(step(1), record())
    assert [one.balance and one.balance.after for one in history.latest(2)] == [1.25, None]


@pytest.mark.parametrize("step_s", [0.0, 2.0])
def test_what_no_rank_has_measured_is_not_known(step_s: float) -> None:
    history = StepHistory()
    history.add(step(0, step_s), record(step_s))
    [one] = history.latest(1)
    assert math.isnan(one.data_wait_s) == math.isnan(one.measured_s) == (step_s == 0.0)
    assert one.samples == 3
