"""Plans and places as they go over the wire: what many ranks hear is written once, and each gets what is its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace import message_codec
from headrace.reorder_service.api.sessions import SessionsServicer, add_to_server
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.service import ReorderService
from headrace.v1 import sessions_pb2, sessions_pb2_grpc
from tests.unit.reorder_service.job_world import Start, submit, until

pytestmark = pytest.mark.timeout(60)

REPLICAS, STEPS = 2, 2


@asynccontextmanager
async def served(service: ReorderService) -> AsyncIterator[sessions_pb2_grpc.SessionsStub]:
    leadership = Leadership()
    leadership.active_service, leadership.leader, leadership.lease_ends_s = service, "here", math.inf
    server = grpc.aio.server()
    add_to_server(SessionsServicer(leadership), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield sessions_pb2_grpc.SessionsStub(channel)
    finally:
        await server.stop(None)


async def planned(service: ReorderService) -> JobRun:
    """A job with its window planned, and all parts placed."""
    run = await submit(service, replicas=REPLICAS, global_batch=8, part_samples=2, window=STEPS)
    await until(
        lambda: (
            len(run.cursor.steps) == STEPS
            and all(s.parts and all(p.lease for p in s.parts.values()) for s in run.cursor.steps.values())
        )
    )
    return run


async def heard(
    stub: sessions_pb2_grpc.SessionsStub, run: JobRun, **request: object
) -> tuple[list[sessions_pb2.RankPlan], set[str]]:
    """The plans of all steps, and the tickets whose places are known, once all those of the plans are."""
    session = (await stub.Open(sessions_pb2.OpenRequest(job=run.name, **request))).session  # type: ignore[arg-type]
    plans: list[sessions_pb2.RankPlan] = []
    placed: set[str] = set()
    stream = stub.Plans(sessions_pb2.PlansRequest(session=session))
    async for message in stream:
        plans += [event.plan for event in message.events if event.HasField("plan")]
        placed |= {event.location.ticket for event in message.events if event.HasField("location")}
        tickets = {ticket for plan in plans for microbatch in plan.microbatches for ticket in microbatch.tickets}
        if len(plans) == STEPS and tickets <= placed:
            break
    stream.cancel()
    return plans, placed


async def test_each_rank_hears_the_whole_plan_and_the_parts_of_its_own_replicas(start: Start) -> None:
    service = await start()
    run = await planned(service)
    named = [(0, 1), (0,), (1,), (1,)]
    async with served(service) as stub:
        answers = await asyncio.gather(
            *(heard(stub, run, rank=rank, num_ranks=4, replicas=replicas) for rank, replicas in enumerate(named))
        )
    for replicas, (plans, placed) in zip(named, answers, strict=True):
        for number, plan in enumerate(plans):
            step = run.cursor.steps[number]
            assert step.plan is not None
            assert message_codec.plan_value(plan.whole).replicas == tuple(map(tuple, step.plan.replicas))
            own = [part for part in step.parts.values() if part.replica in replicas]
            assert {ticket for microbatch in plan.microbatches for ticket in microbatch.tickets} == {part.ticket for part in own}
            assert {part.ticket for part in own} <= placed
        assert placed == {p.ticket for step in run.cursor.steps.values() for p in step.parts.values() if p.replica in replicas}
    assert [len(step.messages) for step in run.cursor.steps.values()] == [3] * STEPS, "once for each lane"


async def test_what_all_nodes_hear_is_written_once(start: Start) -> None:
    service = await start()
    run = await planned(service)
    run.open_session(5, 0, together=True)  # stays, and what they were told with it
    async with served(service) as stub:
        answers = await asyncio.gather(*(heard(stub, run, rank=rank, together=True) for rank in range(5)))
    assert all(answer == answers[0] for answer in answers)
    assert [len(step.messages) for step in run.cursor.steps.values()] == [1] * STEPS


async def test_ranks_without_named_replicas_hear_no_whole_plan(start: Start) -> None:
    service = await start()
    run = await planned(service)
    async with served(service) as stub:
        (first, _), (second, _) = await asyncio.gather(*(heard(stub, run, rank=rank, num_ranks=2) for rank in range(2)))
    assert not any(plan.HasField("whole") for plan in [*first, *second])
    assert {microbatch.replica for plan in first for microbatch in plan.microbatches} == {0}
    assert {microbatch.replica for plan in second for microbatch in plan.microbatches} == {1}
