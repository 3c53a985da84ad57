"""What a preprocessor may say of itself and its work: what breaks the rules ends its stream with a sentence, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.outbox import Outbox
from headrace.reorder_service.api import fleet as fleet_api
from headrace.reorder_service.api import shard_lists
from headrace.reorder_service.api.fleet import FleetServicer
from headrace.reorder_service.api.shard_lists import ShardLists
from headrace.reorder_service.fleet import reports as rules
from headrace.reorder_service.fleet.trials import MOST_DEATHS
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.state import StateStore
from headrace.rpc import Server
from headrace.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc
from headrace.v1.fleet_pb2 import FleetReport, FleetReports
from tests.unit.reorder_service.job_world import Preprocessor, end, submit

PATIENCE_S = 30
INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the network and all tasks go on until `condition` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def hello(**fields: Any) -> FleetReport:
    return FleetReport(hello=fleet_pb2.Hello(**{"preprocessor": "p", "endpoint": "p:1", "slots": 2, "instance": "one"} | fields))


class Stream:
    """A preprocessor's stream to a real server."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.aio.insecure_channel(endpoint)
        self._outbox = Outbox[FleetReport]()
        self._orders = fleet_pb2_grpc.FleetStub(self._channel).Work(self._said())

    async def _said(self) -> AsyncIterator[FleetReports]:
        async for reports in self._outbox.batches():
            yield FleetReports(reports=reports)

    def say(self, *reports: FleetReport) -> Stream:
        for report in reports:
            self._outbox.put(report)
        return self

    async def ordered(self, kind: str) -> Any:
        """The next order of that kind."""
        async with asyncio.timeout(PATIENCE_S):
            async for message in self._orders:
                for order in message.orders:
                    if order.WhichOneof("order") == kind:
                        return getattr(order, kind)
        raise AssertionError(f"the stream ended without {kind}")

    async def end(self) -> tuple[Any, str]:
        """How the stream ends: status and sentence."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                async for _ in self._orders:
                    pass
        except grpc.aio.AioRpcError as err:
            return err.code(), str(err.details())
        finally:
            await self.close()
        return grpc.StatusCode.OK, ""

    async def close(self) -> None:
        self._outbox.end()
        self._orders.cancel()
        await self._channel.close()


class World:
    """A leading service that listens."""

    def __init__(self, service: ReorderService, endpoint: str, lists: ShardLists) -> None:
        self.service = service
        self.lists = lists
        self.endpoint = endpoint

    def stream(self, *reports: FleetReport) -> Stream:
        return Stream(self.endpoint).say(*reports)

    async def members(self, *names: str) -> None:
        """Until exactly these are there."""
        await eventually(lambda: self.service.fleet.members.keys() == set(names))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    service = ReorderService(await StateStore.open(f"embedded:{tmp_path / 'store'}"))
    await service.store.database.lead("test")
    await service.start()
    leadership = Leadership()
    leadership.active_service, leadership.lease_ends_s = service, time.monotonic() + 3600
    servicer = FleetServicer(leadership)
    added = {"headrace.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(servicer, s)}
    server = Server("127.0.0.1:0", added)
    await server.start()
    yield World(service, server.endpoint, servicer._lists)
    await server.stop(0)
    await end(service)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"slots": 0}, "1 to 16384 slots, got 0"),
        ({"slots": -3}, "1 to 16384 slots, got -3"),
        ({"slots": 2**31 - 1}, "slots, got 2147483647"),
        ({"other_slots": -1}, "other_slots, got -1"),
        ({"other_slots": 16385}, "other_slots, got 16385"),
        ({"clock_s": -1.0}, "a clock of 0 to"),
        ({"clock_s": float("nan")}, "a clock of 0 to"),
        ({"preprocessor": ""}, "must have a name"),
        ({"preprocessor": "p\n12:00:00 forged"}, "printable"),
        ({"preprocessor": "p" * 100_000}, "of 100000"),
        ({"endpoint": "nowhere"}, "is not HOST:PORT"),
        ({"endpoint": "h\x1b[2J:1"}, "printable"),
    ],
)
async def test_a_hello_that_cannot_be_is_refused(world: World, fields: dict[str, Any], sentence: str) -> None:
    code, details = await world.stream(hello(**fields)).end()
    assert (code, sentence in details) == (INVALID, True), details
    assert not world.service.fleet.members


async def test_only_the_process_that_has_a_name_may_take_it_again(world: World) -> None:
    first = world.stream(hello())
    await first.ordered("welcome")
    await world.members("p")
    member = world.service.fleet.members["p"]
    code, details = await world.stream(hello(instance="two", endpoint="evil:1")).end()
    assert (code, "'p' is that of a preprocessor that is here" in details) == (PRECONDITION, True), details
    assert world.service.fleet.members["p"] is member

    second = world.stream(hello(endpoint="p:2"))  # its own stream died, which nobody here has noticed yet
    await eventually(lambda: world.service.fleet.members["p"].endpoint == "p:2")
    await first.close()
    await asyncio.sleep(0.05)
    assert world.service.fleet.members["p"].endpoint == "p:2", "the end of the former stream is not its departure"
    await second.close()
    await world.members()
    third = world.stream(hello(instance="two"))
    await world.members("p")
    await third.close()


@pytest.mark.parametrize(
    ("report", "status", "sentence"),
    [
        (FleetReport(), INVALID, "begins with its one hello, got nothing"),
        (FleetReport(heartbeat=fleet_pb2.Heartbeat()), INVALID, "begins with its one hello, got heartbeat"),
    ],
)
async def test_a_stream_begins_with_a_hello(world: World, report: FleetReport, status: Any, sentence: str) -> None:
    code, details = await world.stream(report).end()
    assert (code, sentence in details) == (status, True), details


@pytest.mark.parametrize(
    ("report", "status", "sentence"),
    [
        (hello(), INVALID, "begins with its one hello, got hello"),
        (FleetReport(heartbeat=fleet_pb2.Heartbeat(store_budget_bytes=2**62)), INVALID, "store_budget_bytes must be 0 to 2^50"),
        (FleetReport(heartbeat=fleet_pb2.Heartbeat(samples_decoded=-1)), INVALID, "samples_decoded must be 0"),
        (
            FleetReport(heartbeat=fleet_pb2.Heartbeat(occupancy=common_pb2.Occupancy(stored=-1))),
            INVALID,
            "stored must be 0",
        ),
        (
            FleetReport(shards_listed=fleet_pb2.ShardsListed(lease="of-nobody", more=True)),
            PRECONDITION,
            "nobody asked preprocessor 'p' for the shards of lease 'of-nobody'",
        ),
    ],
)
async def test_a_report_that_cannot_be_ends_the_stream(world: World, report: FleetReport, status: Any, sentence: str) -> None:
    code, details = await world.stream(hello(), report).end()
    assert (code, sentence in details) == (status, True), details
    assert not world.service.fleet.members


@pytest.mark.parametrize("num_rows", [-5, 2**31, 2**36])
async def test_rows_that_cannot_be_never_reach_the_manifest(world: World, num_rows: int) -> None:
    """And a preprocessor that counts right takes the work over."""
    run = await submit(world.service, join=False)
    rogue = world.stream(hello(preprocessor="rogue"))
    order = await rogue.ordered("list_shards")
    shards = [common_pb2.Shard(url="/d/a.tar", name="d/a")]
    page = fleet_pb2.ShardsListed(lease=order.lease, shards=shards, vocabulary=common_pb2.Vocabulary(size=9))
    rogue.say(FleetReport(shards_listed=page))
    order = await rogue.ordered("index_shard")
    code, details = await rogue.say(
        FleetReport(shard_indexed=fleet_pb2.ShardIndexed(lease=order.lease, num_samples=num_rows))
    ).end()
    assert (code, f"rows, got {num_rows}" in details) == (INVALID, True), details
    Preprocessor(service=world.service, name="honest").join()
    async with asyncio.timeout(PATIENCE_S):
        await run.wait_ready()
    _, counted = await world.service.store.load_manifest(run.name)
    assert counted.tolist() == [24]


@pytest.mark.parametrize(("source", "number", "sentence"), [(7, 0, "shard 0 of source 7"), (0, 5, "shard 5 of source 0")])
async def test_a_list_that_cannot_be_never_reaches_the_store(world: World, source: int, number: int, sentence: str) -> None:
    """The job fails with a sentence, and goes on from a right list when it is submitted again."""
    run = await submit(world.service, join=False)
    rogue = world.stream(hello(preprocessor="rogue"))
    order = await rogue.ordered("list_shards")
    shards = [common_pb2.Shard(url="/d/a.tar", name="d/a", source=source, number=number)]
    page = fleet_pb2.ShardsListed(lease=order.lease, shards=shards, vocabulary=common_pb2.Vocabulary(size=9))
    rogue.say(FleetReport(shards_listed=page))
    await eventually(lambda: run.cursor.state == "FAILED")
    assert sentence in run.cursor.message
    assert (await world.service.store.load_job(run.name)).vocabulary is None
    await rogue.close()
    await world.members()
    Preprocessor(service=world.service, name="honest").join()
    await run.resubmit()
    async with asyncio.timeout(PATIENCE_S):
        await run.wait_ready()
    assert run.cursor.state == "RUNNING"


@pytest.mark.parametrize("long", ["url", "name"])
async def test_a_shard_with_a_path_that_no_system_takes_is_refused(world: World, long: str) -> None:
    await submit(world.service, join=False)
    rogue = world.stream(hello(preprocessor="rogue"))
    order = await rogue.ordered("list_shards")
    page = fleet_pb2.ShardsListed(lease=order.lease, shards=[common_pb2.Shard(**{long: "x" * 1_000_000})], more=True)
    code, details = await rogue.say(FleetReport(shards_listed=page)).end()
    assert (code, "up to 8192 characters, got 1000000" in details) == (INVALID, True), details


async def test_a_list_without_an_end_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MOST_LISTED_BYTES", 1_000_000)
    await submit(world.service, join=False)
    rogue = world.stream(hello(preprocessor="rogue"))
    order = await rogue.ordered("list_shards")
    page = fleet_pb2.ShardsListed(lease=order.lease, shards=[common_pb2.Shard(url="x" * 8000)] * 25, more=True)
    code, details = await rogue.say(*[FleetReport(shards_listed=page)] * 6).end()
    assert (code, "up to 1000000 bytes, got 125 of 1000" in details) == (INVALID, True), details


async def test_lists_that_are_too_large_together_are_refused_and_one_that_was_given_up_makes_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_lists, "MOST_HELD_BYTES", 1_000_000)
    page = fleet_pb2.ShardsListed(shards=[common_pb2.Shard(url="x" * 8000)] * 75, more=True)

    async def sends_a_page(rogue: Stream) -> None:
        page.lease = (await rogue.ordered("list_shards")).lease
        rogue.say(FleetReport(shards_listed=page))

    jobs = [await submit(world.service, name=name, join=False) for name in ("a", "b")]
    first = world.stream(hello(preprocessor="first", slots=1))
    await sends_a_page(first)
    await eventually(lambda: world.lists.num_bytes > 500_000)
    second = world.stream(hello(preprocessor="second", slots=1))
    await sends_a_page(second)
    code, details = await second.end()
    assert (code, "of shards that all preprocessors are sending have more than 1000000 bytes" in details) == (
        grpc.StatusCode.UNAVAILABLE,
        True,
    ), details
    await world.members("first")
    await first.close()
    await world.members()
    assert world.lists.num_bytes == 0
    Preprocessor(service=world.service, name="honest").join()
    async with asyncio.timeout(PATIENCE_S):
        for run in jobs:
            await run.wait_ready()


async def test_a_stream_that_says_no_hello_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have sent the most of a large message, which is held until its end has come."""
    monkeypatch.setattr(fleet_api, "HELLO_S", 0.1)
    assert await world.stream().end() == (grpc.StatusCode.OK, "")


async def test_the_sentence_of_an_order_that_failed_stays_short(world: World) -> None:
    run = await submit(world.service, join=False)
    rogue = world.stream(hello(preprocessor="rogue"))
    order = await rogue.ordered("list_shards")
    rogue.say(FleetReport(order_failed=fleet_pb2.OrderFailed(lease=order.lease, error="no such folder " + "x" * 1_000_000)))
    await eventually(lambda: run.cursor.state == "FAILED")
    assert run.cursor.message.startswith("no such folder ")
    assert len(run.cursor.message) < 10_000
    await rogue.close()


async def test_an_answer_to_another_order_is_refused_and_the_job_goes_on(world: World) -> None:
    run = await submit(world.service, join=False)
    rogue = world.stream(hello(preprocessor="rogue"))
    order = await rogue.ordered("list_shards")
    code, details = await rogue.say(FleetReport(part_decoded=fleet_pb2.PartDecoded(lease=order.lease))).end()
    assert (code, "is to be answered with shards_listed, got part_decoded" in details) == (PRECONDITION, True), details
    Preprocessor(service=world.service).join()
    async with asyncio.timeout(PATIENCE_S):
        await run.wait_ready()
    assert run.cursor.state == "RUNNING"


async def test_a_trial_ends_with_the_answer_to_its_order_only(world: World) -> None:
    """Preprocessors died of an index: it is tried by an order of its own, which no other kind of report may pass as good."""
    await submit(world.service, join=False)
    first = world.stream(hello(preprocessor="first"))
    order = await first.ordered("list_shards")
    shards = [common_pb2.Shard(url="/d/a.tar", name="d/a")]
    page = fleet_pb2.ShardsListed(lease=order.lease, shards=shards, vocabulary=common_pb2.Vocabulary(size=9))
    first.say(FleetReport(shards_listed=page))
    for n in range(MOST_DEATHS):
        dying = first if n == 0 else world.stream(hello(preprocessor=f"dying{n}"))
        await dying.ordered("index_shard")
        await dying.close()
        await world.members()
    rogue = world.stream(hello(preprocessor="rogue"))
    order = await rogue.ordered("index_shard")
    code, details = await rogue.say(FleetReport(part_decoded=fleet_pb2.PartDecoded(lease=order.lease))).end()
    assert (code, "is to be answered with shard_indexed, got part_decoded" in details) == (PRECONDITION, True), details


async def test_the_watch_over_preprocessors_lives_through_an_error(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """As it would come from a fault of ours: the clock of one member's pace says no number."""
    stream = world.stream(hello())
    await world.members("p")
    member = world.service.fleet.members["p"]
    pace, member.paces = member.paces, {}
    with caplog.at_level(logging.ERROR):
        await eventually(lambda: "looking after the preprocessors failed" in caplog.text)
    assert "preprocessors=p" in caplog.text
    member.paces = pace
    member.heard_s -= 60
    await world.members()  # it is silent, and that is still seen
    await stream.close()


async def test_a_service_that_ends_takes_nobody_for_dead(world: World, caplog: pytest.LogCaptureFixture) -> None:
    stream = world.stream(hello())
    await world.members("p")
    with caplog.at_level(logging.INFO):
        await world.service.stop()
        assert await stream.end() == (grpc.StatusCode.OK, "")
    left = [record.getMessage() for record in caplog.records if record.getMessage().startswith("left ")]
    assert left == ['left preprocessor=p why="this service ends"']
    assert not world.service.fleet._died
