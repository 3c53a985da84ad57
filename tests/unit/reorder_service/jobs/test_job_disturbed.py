"""A job whose preprocessors leave, fail or know it already."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.plan import StepPlan
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.jobs.sessions import Session
from tests.unit.reorder_service.job_world import Preprocessor, Start, consume, submit, told_step, until


async def test_a_data_set_that_cannot_be_read_fails_the_job_with_its_sentence(start: Start) -> None:
    service = await start()
    run = await submit(service, join=False)
    silent = Preprocessor(service=service, answers=False)
    member = silent.join()
    await until(lambda: bool(member.leases))
    service.fleet.fail(member, next(iter(member.leases)), "no data set at /d")
    await run.wait_ready()
    assert (run.cursor.state, run.cursor.message) == ("FAILED", "no data set at /d")


async def test_work_of_a_preprocessor_that_leaves_is_done_by_another(start: Start) -> None:
    service = await start()
    run = await submit(service, join=False)
    member = Preprocessor(service=service, name="mortal", answers=False).join()
    Preprocessor(service=service, name="lives").join()
    await until(lambda: bool(member.leases))
    service.fleet.leave(member, "test")
    assert await consume(run, await ready(run)) == list(range(6))


async def ready(run: JobRun) -> Session:
    await run.wait_ready()
    return run.open_session(0, 1)


async def test_a_part_that_a_trainer_cannot_fetch_gets_another_place(start: Start) -> None:
    service = await start()
    run = await submit(service)
    step = await told_step(run.open_session(0, 1), 0)
    part = next(iter(step.parts.values()))
    await until(lambda: bool(part.lease))
    Preprocessor(service=service, name="q").join()
    lease = part.lease
    run.report_lost(part.ticket, "some older lease")
    assert part.lease == lease
    run.report_lost(part.ticket, lease)
    assert part.lease != lease
    assert part.endpoint == "q:1"


async def test_who_takes_over_probes_nothing_again(start: Start) -> None:
    run = await submit(await start())
    before = await told_step(run.open_session(0, 1), 1)
    service = await start()
    run = service.find("job")
    asked: list[str] = []
    preprocessor = Preprocessor(service=service)
    hear = preprocessor._hear
    preprocessor._hear = lambda order: (asked.append(order.WhichOneof("order")), hear(order))[-1]  # type: ignore[method-assign]
    preprocessor.join()
    assert (await told_step(run.open_session(0, 1), 1)).probes == before.probes
    await until(lambda: "decode_part" in asked)
    assert "probe_samples" not in asked


async def test_a_job_that_failed_goes_on_when_it_is_submitted_again(start: Start) -> None:
    service = await start()
    run = await submit(service, join=False)
    member = Preprocessor(service=service, answers=False).join()
    await until(lambda: bool(member.leases))
    service.fleet.fail(member, next(iter(member.leases)), "no data set at /d")
    await until(lambda: run.cursor.state == "FAILED")
    service.fleet.leave(member, "mended")
    assert await submit(service) is run
    assert await consume(run, run.open_session(0, 1)) == [0, 1, 2, 3, 4, 5]
    assert run.cursor.state == "DONE"


async def test_a_step_that_was_handed_out_in_part_when_the_job_stopped_is_handed_out_to_its_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the store did not answer to another step meanwhile, or refused a reset."""
    monkeypatch.setattr("headrace.reorder_service.jobs.planner.PLACED_AT_A_TIME", 2)

    def handed_out() -> list[bool]:
        return [part.work is not None for step in run.cursor.planned for part in step.parts.values()]

    run = await submit(await start(), replicas=12, global_batch=12)
    await until(lambda: any(handed_out()) and not all(handed_out()))
    await run.stop()
    assert not all(handed_out())
    run.start()
    await until(lambda: len(handed_out()) == 24 and all(handed_out()))


async def test_nobody_is_told_of_a_step_before_the_store_has_what_it_was_planned_from(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next leader would probe the step again, and could plan it differently."""
    service, has_room, made = await start(), asyncio.Event(), list[int]()
    save, make = service.store.save_probes, PlannedStep.make_plan

    async def save_late(*probed: Any) -> None:
        await has_room.wait()
        await save(*probed)

    def make_and_note(step: PlannedStep, *args: Any, **options: Any) -> StepPlan:
        plan = make(step, *args, **options)
        made.append(step.index)
        return plan

    monkeypatch.setattr(service.store, "save_probes", save_late)
    monkeypatch.setattr(PlannedStep, "make_plan", make_and_note)
    run = await submit(service, global_batch=4, window=1)
    await until(lambda: made == [0])
    await asyncio.sleep(0.2)  # far longer than it takes to be cut into parts
    assert not run.cursor.planned
    session = run.open_session(0, 1)
    assert not session.take_batches()
    has_room.set()
    assert len((await told_step(session, 0)).sample_ids) == 4
