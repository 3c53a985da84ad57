"""Steps that are planned again for other pipelines of the job's nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.errors import SupersededError
from headrace.reorder_service.api.sessions import plan_events
from headrace.reorder_service.jobs.formation import Formation
from headrace.reorder_service.jobs.sessions import EventBatch
from headrace.reorder_service.planning.unequal_pipelines import PipelineShape
from headrace.v1 import sessions_pb2
from tests.unit.reorder_service.job_world import Start, commit, submit, told_step, told_steps, until
from tests.unit.reorder_service.jobs.machine_world import form, job, planned


def formation(generation: int, first_step: int, microbatches: Sequence[int]) -> Formation:
    pipelines = tuple(PipelineShape(stages={"encoder": (1.0,), "llm": (0.5, 0.5)}, microbatches=k) for k in microbatches)
    return Formation(generation=generation, first_step=first_step, pipelines=pipelines)


async def submitted(start: Start, **fields: Any):
    return await submit(await start(), topology={"replicas": 2, "microbatches": 2}, global_batch=8, **fields)


def lengths(step: Any) -> list[int]:
    return [len(replica) for replica in step.plan.replicas]


async def test_uncommitted_steps_are_planned_again_from_the_first_one_that_the_pipelines_begin(start: Start) -> None:
    run = await submitted(start)
    session = run.open_session(0, 1, together=True)
    told = await told_steps(session, {0, 1})
    first, second = told[0], told[1]
    before, parts = first.plan, dict(second.parts)
    await run.follow([formation(3, 1, (3, 1))])
    assert first.plan is before
    assert (lengths(second), second.plan.sample_ids()) == ([3, 1], sorted(second.probes))
    assert second.parts == parts, "what is decoded already stays as it is"
    again = await told_step(session, 1)
    assert again is second


async def test_steps_that_are_planned_later_follow_the_pipelines_but_have_the_parts_that_any_leader_cuts(start: Start) -> None:
    run = await submitted(start)
    session = run.open_session(0, 1, together=True)
    await run.follow([formation(1, 0, (2, 1, 1))])
    await run.commit(session, 0, commit())
    await until(lambda: 2 in run.cursor.steps and run.cursor.steps[2].formation is not None)
    step = run.cursor.steps[2]
    assert lengths(step) == [2, 1, 1]
    assert {part.replica for part in step.parts.values()} == {0, 1}, "those of the topology"


async def test_a_plan_says_for_which_pipelines_it_is_and_how_long_each_microbatch_takes(start: Start) -> None:
    run = await submitted(start)
    session = run.open_session(0, 1, together=True)
    step = await told_step(session, 0)
    await run.follow([formation(4, 0, (3, 1))])
    message = sessions_pb2.PlanEvents.FromString(plan_events(EventBatch([step]), session)).events[0].plan
    assert (message.formation, list(message.whole.lengths), len(message.seconds)) == (4, [3, 1], 4)
    assert sum(message.seconds) == pytest.approx(sum(float(costs.sum()) for costs in step.costs.values()))


async def test_the_same_pipelines_again_change_nothing(start: Start) -> None:
    run = await submitted(start)
    await told_steps(run.open_session(0, 1, together=True), {0, 1})
    await run.follow([formation(1, 0, (3, 1))])
    plans = [step.plan for step in run.cursor.planned]
    await run.follow([formation(1, 0, (3, 1))])
    assert all(step.plan is plan for step, plan in zip(run.cursor.planned, plans, strict=True))


async def test_of_two_changes_at_once_the_newest_holds_for_all_steps(start: Start) -> None:
    run = await submitted(start)
    await told_steps(run.open_session(0, 1, together=True), {0, 1})
    older, newer = [formation(1, 0, (3, 1))], [formation(2, 0, (1, 3))]
    await asyncio.gather(run.follow(older), run.follow(newer))
    assert [lengths(step) for step in run.cursor.planned] == [[1, 3], [1, 3]]


async def test_a_later_service_plans_the_steps_for_the_same_pipelines(start: Start) -> None:
    run = await submitted(start)
    await told_step(run.open_session(0, 1, together=True), 1)
    await run.follow([formation(1, 0, (3, 1))])
    plan = run.cursor.steps[1].plan
    again = await submitted(start, name="again")
    again.formations = [formation(1, 0, (3, 1))]
    await until(lambda: 1 in again.cursor.steps and again.cursor.steps[1].plan is not None)
    step = again.cursor.steps[1]
    await again.follow(again.formations)
    assert tuple(step.plan.replicas) == tuple(plan.replicas)


async def test_ranks_that_come_after_nodes_are_planned_for_as_the_topology_says(start: Start) -> None:
    run = await submitted(start)
    nodes = run.open_session(0, 1, together=True)
    await run.follow([formation(1, 0, (2, 1, 1))])
    await run.leave_formations()
    with pytest.raises(SupersededError, match="connect again"):
        await run.commit(nodes, 0, commit())
    step = await told_step(run.open_session(0, 2), 1)
    assert lengths(step) == [2, 2]


def test_the_memory_limit_holds_on_the_fullest_stage_of_each_pipeline_of_nodes() -> None:
    def pipelines(*shares: float) -> list[PipelineShape]:
        return [PipelineShape(stages={"vision": (1.0,), "llm": shares}, microbatches=k) for k in (4, 4)]

    step, limit_gib = planned(job()), 22
    form(job(memory_gib=limit_gib), step, pipelines(0.5, 0.5))
    with pytest.raises(ValueError, match=r"keep within 22 GiB: .* stage 1 \('llm'\) of replica [01] exceeds that by"):
        form(job(memory_gib=limit_gib), step, pipelines(0.95, 0.05))
