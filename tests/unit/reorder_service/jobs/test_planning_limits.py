"""What planning a job may take of the service: memory, before it is taken, and time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.errors import SpecError
from headrace.reorder_service.jobs import planner
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
