"""What a job keeps in memory of the steps that are committed."""

from __future__ import annotations

import gc

import pytest

from headrace.reorder_service.fleet.member import Work
from headrace.reorder_service.jobs import cursor
from headrace.reorder_service.jobs.planned_step import PlannedStep
from tests.unit.reorder_service.job_world import Start, consume, submit


async def test_the_latest_steps_are_kept_as_far_as_they_have_few_samples(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "RECENT_SAMPLES", 11)
    run = await submit(await start())
    await consume(run, run.open_session(0, 1), stop=4)
    assert [step.index for step in run.cursor.recent] == [2, 3], "of four samples each"


async def test_the_latest_step_is_kept_however_many_samples_it_has(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "RECENT_SAMPLES", 1)
    run = await submit(await start())
    await consume(run, run.open_session(0, 1), stop=4)
    assert [step.index for step in run.cursor.recent] == [3]


async def test_committed_steps_and_their_orders_are_let_go_without_a_garbage_collection(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full collections are rare, since they are long pauses, and a large step has tens of thousands of orders."""
    monkeypatch.setattr(cursor, "RECENT_SAMPLES", 5)
    gc.collect()
    of_others = [
        one for one in gc.get_objects() if type(one) in (PlannedStep, Work)
    ]  # isinstance would import what torch deprecates
    gc.disable()
    try:
        run = await submit(await start())
        await consume(run, run.open_session(0, 1), stop=5)
        alive = [one for one in gc.get_objects() if not any(one is former for former in of_others)]
        steps = {one.index for one in alive if type(one) is PlannedStep}
        ordered = {one.priority[0] for one in alive if type(one) is Work and (one.keep or one.cut)}
        assert min(steps | ordered) >= 3, "the latest are at hand, for the correction of the next one's costs"
    finally:
        gc.enable()
