"""The stream of a preprocessor ends when it is dismissed, whatever comes at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.outbox import Outbox
from headrace.reorder_service.api.fleet import _join, _read
from headrace.reorder_service.api.shard_lists import ShardLists
from headrace.reorder_service.fleet.fleet import Fleet, Work
from headrace.reorder_service.fleet.member import HEARTBEAT_S, HEARTBEATS_PER_S
from headrace.reorder_service.loop_turns import LoopTurns
from headrace.v1 import common_pb2, fleet_pb2


@pytest.mark.parametrize("turns", range(6))
async def test_a_dismissal_beside_a_report_is_not_missed(turns: int) -> None:
    """So many turns of the loop lie between them."""
    service: Any = SimpleNamespace(fleet=Fleet(), turns=LoopTurns())
    outbox = Outbox[fleet_pb2.FleetOrder]()
    beat: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def reports() -> AsyncIterator[fleet_pb2.FleetReports]:
        hello = fleet_pb2.Hello(preprocessor="p", endpoint="p:1", slots=1)
        yield fleet_pb2.FleetReports(reports=[fleet_pb2.FleetReport(hello=hello)])
        await beat
        yield fleet_pb2.FleetReports(reports=[fleet_pb2.FleetReport(heartbeat=fleet_pb2.Heartbeat())])
        await asyncio.Event().wait()

    reader = asyncio.create_task(_read(service, reports(), outbox, ShardLists()))
    while not service.fleet.members:  # noqa: ASYNC110 - turns of the loop are what this is about
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    beat.set_result(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    reader.cancel()
    async with asyncio.timeout(2.0):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.shield(reader)
    assert not service.fleet.members


async def test_a_list_of_shards_in_pages_counts_when_its_last_page_has_come() -> None:
    done: asyncio.Future[fleet_pb2.ShardsListed] = asyncio.get_running_loop().create_future()
    service: Any = SimpleNamespace(fleet=Fleet(), turns=LoopTurns())
    leases: list[str] = []
    early: list[bool] = []

    async def reports() -> AsyncIterator[fleet_pb2.FleetReports]:
        hello = fleet_pb2.Hello(preprocessor="p", endpoint="p:1", slots=1)
        yield fleet_pb2.FleetReports(reports=[fleet_pb2.FleetReport(hello=hello)])
        service.fleet.members["p"].jobs.add("job")
        work = Work(
            job="job",
            priority=(0,),
            order=leases.append,
            on_done=lambda result, _member: done.set_result(result),
            on_failed=done.set_exception,
        )
        service.fleet.submit(work)
        for number in range(3):
            shards = [common_pb2.Shard(number=number, name=f"s/{number}")]
            page = fleet_pb2.ShardsListed(lease=leases[0], shards=shards, more=number < 2)
            if not page.more:
                page.vocabulary.size = 9
            early.append(done.done())
            yield fleet_pb2.FleetReports(reports=[fleet_pb2.FleetReport(shards_listed=page)])

    await _read(service, reports(), Outbox[fleet_pb2.FleetOrder](), ShardLists())
    listed = await done
    assert early == [False] * 3
    assert ([shard.number for shard in listed.shards], listed.vocabulary.size) == ([0, 1, 2], 9)


class HeldTurns(LoopTurns):
    """Turns that come only while the event loop is `free`."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self.free.set()

    async def turn(self, number: int) -> None:
        await self.free.wait()
        await super().turn(number)


async def test_a_member_whose_message_waits_for_its_turn_is_not_silent() -> None:
    now_s = [0.0]
    turns = HeldTurns()
    service: Any = SimpleNamespace(fleet=Fleet(lambda: now_s[0]), turns=turns)

    async def reports() -> AsyncIterator[fleet_pb2.FleetReports]:
        hello = fleet_pb2.Hello(preprocessor="p", endpoint="p:1", slots=1)
        yield fleet_pb2.FleetReports(reports=[fleet_pb2.FleetReport(hello=hello)])
        await service.busy.wait()
        yield fleet_pb2.FleetReports(reports=[fleet_pb2.FleetReport(heartbeat=fleet_pb2.Heartbeat())])
        await asyncio.Event().wait()

    service.busy = asyncio.Event()
    reader = asyncio.create_task(_read(service, reports(), Outbox[fleet_pb2.FleetOrder](), ShardLists()))
    await asyncio.sleep(0.01)
    turns.free.clear()  # others have much to do
    service.busy.set()
    await asyncio.sleep(0.01)
    now_s[0] += 100 * HEARTBEAT_S
    service.fleet.look()
    assert list(service.fleet.members) == ["p"]
    turns.free.set()
    await asyncio.sleep(0.01)
    now_s[0] += 100 * HEARTBEAT_S  # it has had its turn, and says nothing more
    service.fleet.look()
    assert not service.fleet.members
    reader.cancel()


async def test_members_are_welcomed_again_where_the_fleet_has_grown_so_that_they_should_be_heard_less_often() -> None:
    service: Any = SimpleNamespace(fleet=Fleet(), turns=LoopTurns(), running_jobs=lambda: ["job"])
    outboxes = [Outbox[fleet_pb2.FleetOrder]() for _ in range(2 * HEARTBEATS_PER_S)]
    for number, outbox in enumerate(outboxes):
        _join(service, fleet_pb2.Hello(preprocessor=f"p{number}", endpoint="p:1", slots=1), outbox, HEARTBEAT_S)
    for outbox in outboxes:
        outbox.end()
    told = [[order.welcome async for batch in outbox.batches() for order in batch] for outbox in (outboxes[0], outboxes[-1])]
    assert told == [[fleet_pb2.Welcome(heartbeat_s=2.0, jobs=["job"], num_preprocessors=2 * HEARTBEATS_PER_S)]] * 2
    assert min(member.heartbeat_s for member in service.fleet.members.values()) > 1.0
