"""What a job keeps in memory of the steps that are committed."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator

import pytest

from headrace.reorder_service.fleet.member import Work
from headrace.reorder_service.jobs import cursor
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.topology_spec import TopologySpec
from tests.unit.reorder_service.job_world import Start, consume, submit, until


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


@pytest.fixture
def alive() -> Iterator[Callable[[], list[PlannedStep | Work]]]:
    """Lists the steps and the works of this test that are in memory. Garbage is not collected meanwhile.

    Full collections are rare, since they are long pauses, and a large step has tens of thousands of orders.
    """

    def kept() -> list[PlannedStep | Work]:  # isinstance would import what torch deprecates
        return [one for one in gc.get_objects() if type(one) in (PlannedStep, Work)]

    gc.collect()
    of_others = kept()
    gc.disable()
    yield lambda: [one for one in kept() if not any(one is former for former in of_others)]
    gc.enable()


async def test_committed_steps_and_their_orders_are_let_go_without_a_garbage_collection(
    start: Start, monkeypatch: pytest.MonkeyPatch, alive: Callable[[], list[PlannedStep | Work]]
) -> None:
    monkeypatch.setattr(cursor, "RECENT_SAMPLES", 5)
    run = await submit(await start())
    await consume(run, run.open_session(0, 1), stop=5)
    steps = {one.index for one in alive() if type(one) is PlannedStep}
    ordered = {one.priority[0] for one in alive() if type(one) is Work and (one.keep or one.cut)}
    assert min(steps | ordered) >= 3, "the latest are at hand, for the correction of the next one's costs"


async def reset(run: JobRun) -> None:
    await run.rewind(1)


async def plan_anew(run: JobRun) -> None:
    await run.set_topology(TopologySpec(replicas=1, microbatches=1))


async def cancel(run: JobRun) -> None:
    await run.cancel()


async def submit_again(run: JobRun) -> None:
    run._order_failed("the disk is full")
    run._changed.set()
    await until(lambda: run.cursor.state == "FAILED")
    await run.resubmit()


@pytest.mark.parametrize("change", [reset, plan_anew, cancel, submit_again])
async def test_steps_that_are_dropped_and_their_orders_are_let_go_without_a_garbage_collection(
    start: Start, alive: Callable[[], list[PlannedStep | Work]], change: Callable[[JobRun], Awaitable[None]]
) -> None:
    run = await submit(await start())
    await consume(run, run.open_session(0, 1), stop=2)
    await until(lambda: len(run.cursor.planned) == 2 and all(part.lease for part in run.cursor.steps[3].parts.values()))
    await run.pause(True)  # so that no steps take their place

    def uncommitted() -> int:
        return sum(one.keep if type(one) is Work else one not in run.cursor.recent for one in alive())

    assert uncommitted() == 2 + 4, "two steps of two parts"
    await change(run)
    for session in run.sessions.by_rank.values():
        session.take_batches()  # as its stream does
    assert uncommitted() == 0
