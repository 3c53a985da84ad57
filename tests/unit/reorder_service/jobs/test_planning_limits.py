"""What planning a job may take of the service: memory, before it is taken, and time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.errors import SpecError
from headrace.reorder_service.jobs import planner
from headrace.reorder_service.jobs.corrections import Corrections
from headrace.reorder_service.jobs.job_execution import check_memory
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.state import StateStore
from headrace.spec import JobSpec, parse_spec
from tests.unit.reorder_service.job_world import Start, submit, until

GIB = 2**30


def job(**fields: Any) -> JobSpec:
    return parse_spec({"name": "job", "sources": [{"path": "/d"}], **fields})


def test_a_job_whose_planning_takes_more_memory_than_there_is_is_refused_in_a_sentence() -> None:
    ahead = job(global_batch=1 << 20, window=4)
    check_memory(ahead, 6 * GIB)
    with pytest.raises(SpecError, match=r"4194304 samples ahead.* takes about 4\.\d GiB, .* 0\.8 of 4\.0 GiB") as caught:
        check_memory(ahead, 4 * GIB)
    assert "\n" not in str(caught.value)
    slots = job(global_batch=1 << 16, topology={"replicas": 4096, "microbatches": 64})
    with pytest.raises(SpecError, match="slots"):
        check_memory(slots, GIB / 4)


async def test_it_is_not_in_the_store_then_but_one_that_was_taken_goes_on(store: StateStore) -> None:
    service = ReorderService(store, memory_bytes=1.0)
    with pytest.raises(SpecError, match="give the service more memory"):
        await service.submit(job().to_json())
    assert await store.jobs() == []
    await store.create_job("job", job().to_json())
    run = await service.submit(job().to_json())
    assert run.name == "job"
    await service.stop()


async def test_a_job_whose_planning_does_not_end_fails_and_others_go_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan, ended = PlannedStep.make_plan, threading.Event()

    def dawdle(step: PlannedStep, spec: JobSpec, *args: Any, **options: Any) -> Any:
        if spec.name == "slow":
            ended.wait(60)
        return make_plan(step, spec, *args, **options)

    monkeypatch.setattr(PlannedStep, "make_plan", dawdle)
    service = await start()
    try:
        good = await submit(service, name="good")
        await until(lambda: len(good.cursor.planned) == 2)  # all of its window
        monkeypatch.setattr(planner, "MOST_PLANNING_S", 0.2)
        slow = await submit(service, name="slow", join=False)
        await slow.cursor.first_planned()
        assert slow.cursor.state == "FAILED"
        assert "of job 'slow' takes more than 0.2 s: lower global_batch" in slow.cursor.message
        assert good.cursor.state == "RUNNING"
    finally:
        ended.set()


BUSY_S = 0.6  # twice what planning may take below


async def take_the_thread(_service: ReorderService) -> None:
    await asyncio.to_thread(time.sleep, BUSY_S)


async def take_the_turn(service: ReorderService) -> None:
    async with service.store.fatal_jobs.guard_planning("other"):
        await asyncio.sleep(BUSY_S)


@pytest.mark.parametrize("take", [take_the_thread, take_the_turn])
async def test_what_a_step_waits_for_before_it_is_planned_is_no_planning(
    start: Start, monkeypatch: pytest.MonkeyPatch, take: Callable[[ReorderService], Coroutine[Any, Any, None]]
) -> None:
    """Other jobs have the only thread, or a careful leader plans a step of theirs."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    service = await start()
    good = await submit(service, name="good")
    await until(lambda: len(good.cursor.planned) == 2)
    service.store.fatal_jobs._turn = asyncio.Lock()  # as after two ends in a row
    of_step, taken = Corrections.of_step, list[asyncio.Task[None]]()

    async def after_others(corrections: Corrections, *args: Any) -> Any:
        correction = await of_step(corrections, *args)
        taken.append(asyncio.create_task(take(service)))
        await asyncio.sleep(0)
        return correction

    monkeypatch.setattr(Corrections, "of_step", after_others)
    monkeypatch.setattr(planner, "MOST_PLANNING_S", BUSY_S / 2)
    waiting = await submit(service, name="waiting", join=False)
    await waiting.cursor.first_planned()
    assert waiting.cursor.state == "RUNNING", waiting.cursor.message
    assert taken[0].done()
