"""The ranks of a host over one stream: each hears what is its own, shared bytes come once, and commits are answered."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator

import grpc
import pytest

from headrace.reorder_service.jobs.job import JobRun
from headrace.v1 import sessions_pb2, sessions_pb2_grpc
from tests.unit.reorder_service.api.test_telling import REPLICAS, STEPS, planned, served
from tests.unit.reorder_service.job_world import Start

pytestmark = pytest.mark.timeout(60)


class Host:
    """What the relay of a host says and hears."""

    def __init__(self, stub: sessions_pb2_grpc.SessionsStub) -> None:
        self.stub = stub
        self._requests = asyncio.Queue[sessions_pb2.RelayRequest | None]()
        self.replies: list[sessions_pb2.RelayReply] = []
        self._heard = asyncio.Condition()
        self.reading = asyncio.create_task(self._read())

    async def open(self, run: JobRun, **request: object) -> str:
        return str((await self.stub.Open(sessions_pb2.OpenRequest(job=run.name, **request))).session)  # type: ignore[arg-type]

    def say(self, **request: object) -> None:
        self._requests.put_nowait(sessions_pb2.RelayRequest(**request))  # type: ignore[arg-type]

    async def _say(self) -> AsyncIterator[sessions_pb2.RelayRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _read(self) -> None:
        async for reply in self.stub.Relay(self._say()):
            async with self._heard:
                self.replies.append(reply)
                self._heard.notify_all()

    def told(self, session: str) -> list[sessions_pb2.PlanEvent]:
        """All events of a session, in order."""
        return [
            event
            for reply in self.replies
            for told in reply.events
            if session in told.sessions
            for event in sessions_pb2.PlanEvents.FromString(
                zlib.decompress(told.events) if told.compressed else told.events
            ).events
        ]

    def plans(self, session: str) -> list[int]:
        return [event.plan.step for event in self.told(session) if event.HasField("plan")]

    def answers(self, session: str) -> list[tuple[int, bool, str]]:
        """(step, committed, error) of each."""
        return [
            (answer.step, answer.reply.committed, answer.error)
            for reply in self.replies
            for answer in reply.commits
            if session in answer.sessions
        ]

    async def until(self, condition: object) -> None:
        async with self._heard:
            await self._heard.wait_for(condition)  # type: ignore[arg-type]

    async def end(self) -> None:
        self._requests.put_nowait(None)
        await self.reading


async def test_ranks_of_different_replicas_each_hear_their_own_and_both_commit_over_the_stream(start: Start) -> None:
    service = await start()
    run = await planned(service)
    async with served(service) as stub:
        host = Host(stub)
        first, second = [await host.open(run, rank=rank, num_ranks=REPLICAS) for rank in range(REPLICAS)]
        host.say(listen=[first, second])
        await host.until(lambda: host.plans(first) == host.plans(second) == [0, 1])
        replicas = [{m.replica for e in host.told(s) if e.HasField("plan") for m in e.plan.microbatches} for s in (first, second)]
        assert replicas == [{0}, {1}]
        host.say(commits=[sessions_pb2.CommitRequest(session=first, step=0, wait=True)])
        await asyncio.sleep(0.05)
        assert host.answers(first) == []  # it waits for the other rank
        host.say(commits=[sessions_pb2.CommitRequest(session=second, step=0, wait=True)])
        await host.until(lambda: host.answers(first) and host.answers(second))
        assert host.answers(first) == host.answers(second) == [(0, True, "")]
        assert run.cursor.committed == 1
        await host.end()


async def test_what_ranks_of_one_lane_hear_is_sent_once(start: Start) -> None:
    service = await start()
    run = await planned(service)
    async with served(service) as stub:
        host = Host(stub)
        sessions = [await host.open(run, rank=rank, num_ranks=3, replicas=[0, 1]) for rank in range(3)]
        host.say(listen=sessions)
        await host.until(lambda: all(host.plans(session) == [0, 1] for session in sessions))
        host.say(commits=[sessions_pb2.CommitRequest(session=session, step=0, wait=True) for session in sessions])
        await host.until(lambda: host.plans(sessions[0]) == [0, 1, 2])
        (third,) = [list(told.sessions) for reply in host.replies for told in reply.events if 2 in _steps(told)]
        assert sorted(third) == sorted(sessions)
        await host.end()


def _steps(told: sessions_pb2.RelayedEvents) -> set[int]:
    events = zlib.decompress(told.events) if told.compressed else told.events
    return {event.plan.step for event in sessions_pb2.PlanEvents.FromString(events).events if event.HasField("plan")}


async def test_a_session_that_is_not_there_ends_alone(start: Start) -> None:
    service = await start()
    run = await planned(service)
    async with served(service) as stub:
        host = Host(stub)
        first = await host.open(run, rank=0, num_ranks=REPLICAS)
        host.say(listen=["nobody", first], commits=[sessions_pb2.CommitRequest(session="nobody", step=0)])
        await host.until(lambda: host.plans(first) == [0, 1])
        (end,) = [end for reply in host.replies for end in reply.ends]
        assert (end.session, end.status) == ("nobody", grpc.StatusCode.NOT_FOUND.value[0])
        assert host.answers("nobody") == [(0, False, end.error)]
        await host.end()


async def test_a_step_that_was_never_planned_is_refused_and_another_rank_is_answered_meanwhile(start: Start) -> None:
    service = await start()
    run = await planned(service)
    async with served(service) as stub:
        host = Host(stub)
        only = await host.open(run, rank=0, num_ranks=1)
        host.say(listen=[only], commits=[sessions_pb2.CommitRequest(session=only, step=step, wait=True) for step in (99, 0)])
        await host.until(lambda: len(host.answers(only)) == 2)
        refused, done = sorted(host.answers(only), reverse=True)
        assert done == (0, True, "")
        assert refused[:2] == (99, False)
        assert "step 99" in refused[2]
        await host.end()


async def test_the_stream_ends_when_its_service_leads_no_more_since_sessions_of_the_next_leader_are_unknown_to_it(
    start: Start,
) -> None:
    service = await start()
    run = await planned(service)
    async with served(service) as stub:
        listening, silent = Host(stub), Host(stub)
        silent.say()
        session = await listening.open(run, rank=0, num_ranks=REPLICAS)
        listening.say(listen=[session])
        await listening.until(lambda: listening.plans(session) == [0, 1])
        await service.stop()
        silent.say(commits=[sessions_pb2.CommitRequest(session="of the next leader", step=0)])
        for host in (listening, silent):
            with pytest.raises(grpc.aio.AioRpcError, match="has stopped leading") as refused:
                await host.reading
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_sessions_are_opened_over_the_stream_and_each_is_answered_by_its_call(start: Start) -> None:
    service = await start()
    run = await planned(service)

    def ask(call: int, **request: object) -> sessions_pb2.RelayedOpenRequest:
        return sessions_pb2.RelayedOpenRequest(call=call, request=sessions_pb2.OpenRequest(**request))  # type: ignore[arg-type]

    def opened() -> dict[int, sessions_pb2.RelayedOpenReply]:
        return {answer.call: answer for reply in host.replies for answer in reply.opened}

    async with served(service) as stub:
        host = Host(stub)
        host.say(
            listen=[""], opens=[ask(7, job=run.name, rank=0, num_ranks=2), ask(8, job="other"), ask(9, job=run.name, rank=5)]
        )
        await host.until(lambda: len(opened()) == 3)
        assert opened()[7].reply.session == run.sessions.by_rank[0].id
        assert opened()[8].status == grpc.StatusCode.NOT_FOUND.value[0]
        assert "no job 'other'" in opened()[8].error
        assert opened()[9].status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        host.say(listen=[opened()[7].reply.session])
        await host.until(lambda: host.plans(opened()[7].reply.session) == [0, 1])
        (understood,) = [reply.opens for reply in host.replies if any(not end.session for end in reply.ends)]
        assert understood, "who asks with the empty session is not told that sessions can be opened over the stream"
        await host.end()


async def test_ranks_of_a_stream_that_breaks_are_connected_no_more(start: Start) -> None:
    service = await start()
    run = await planned(service)
    async with served(service) as stub:
        host = Host(stub)
        only = await host.open(run, rank=0, num_ranks=1)
        host.say(listen=[only])
        await host.until(lambda: host.plans(only) == list(range(STEPS)))
        assert run.sessions.by_rank[0].streaming
        host.reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await host.reading
        while run.sessions.by_rank[0].streaming:  # noqa: ASYNC110 - the service's own view
            await asyncio.sleep(0.01)
