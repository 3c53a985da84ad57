"""The engine, over a real connection to a reorder service that says what the test wants and notes what it hears."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from headrace.observability import metrics
from headrace.preprocessor.engine import read_ahead_parts
from headrace.preprocessor.payload.part import PartStage
from headrace.preprocessor.sources.blob import Blob, BlobCache, LocalBlob
from headrace.preprocessor.sources.cache import ShardCache
from headrace.rpc import Server
from headrace.spec import parse_spec
from headrace.v1 import fleet_pb2, fleet_pb2_grpc
from headrace.v1.common_pb2 import Rejection
from headrace.v1.fleet_pb2 import FleetOrder
from tests.unit.preprocessor.engine_world import PATIENCE_S, SPEC, Orders, Worker

Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """start(cache, threads=1): an engine that has said hello."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(cache: BlobCache | None = None, *, threads: int = 1, **options: Any) -> Worker:
            orders = Orders()
            server = Server("127.0.0.1:0", {"headrace.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(orders, s)})
            await server.start()
            stack.push_async_callback(server.stop, 0)
            worker = Worker(orders, server.endpoint, cache or ShardCache(tmp_path / "cache"), threads=threads, **options)
            running = asyncio.create_task(worker.engine.run())
            stack.push_async_callback(asyncio.gather, running, return_exceptions=True)
            stack.callback(running.cancel)
            assert (await orders.heard("hello")).slots == 2 * threads + 2
            return worker

        yield start


class Gated:
    """Remote shards that come when they are let: each waits for its gate."""

    def __init__(self, **files: Path) -> None:
        self._files = files
        self.gates = {name: threading.Event() for name in files}
        self.asked = {name: threading.Event() for name in files}

    def open(self, url: str) -> Blob:
        name = url.rpartition("/")[2].removesuffix(".tar")
        self.asked[name].set()
        assert self.gates[name].wait(PATIENCE_S)
        return LocalBlob(self._files[name].open("rb"), url)

    def open_in_parts(self, url: str, *, grouped: bool) -> Blob:
        return self.open(url)


@pytest.fixture
def tar(write_tar: Callable[..., Path], jpeg: bytes) -> Path:
    """Six pictures with captions; the last one is cut short behind its header."""
    members: dict[str, Any] = {}
    for n in range(6):
        members |= {f"{n}.json": {"caption": f"picture {n}"}, f"{n}.jpg": jpeg if n < 5 else jpeg[:-200]}
    return write_tar(members)


@pytest.fixture
def content(tar: Path) -> bytes:
    return tar.read_bytes()


@pytest.fixture
def gated(tar: Path) -> Iterator[Gated]:
    gated = Gated(slow=tar, other=tar)
    yield gated
    for gate in gated.gates.values():
        gate.set()


def counted(name: str, **labels: str) -> float:
    return metrics.PREPROCESSOR.get_sample_value(f"headrace_preprocessor_{name}", labels) or 0.0


async def test_parts_are_decoded_and_reported_and_what_is_damaged_is_counted(start: Start, tar: Path) -> None:
    names = ("samples_decoded_total", "decoded_bytes_total", "orders_failed_total")
    before = [counted(name) for name in names]
    damaged = counted("samples_rejected_total", reason="corrupt_media")
    timed = [counted("stage_seconds_count", stage=stage) for stage in ("read", "decode")]
    worker = await start()
    worker.orders.open_job(str(tar))
    worker.orders.decode("a", (0, 0), (0, 3), (0, 5))
    assert (await worker.orders.heard("part_decoded")).lease == "lease-a"
    assert await worker.samples("a") == [0, 1]
    after = [counted(name) for name in names]
    assert [new - old for old, new in zip(before, after, strict=True)] == [2, worker.store.held_bytes, 0]
    assert counted("samples_rejected_total", reason="corrupt_media") == damaged + 1
    assert [counted("stage_seconds_count", stage=stage) for stage in ("read", "decode")] == [n + 1 for n in timed]
    assert worker.read_ahead.held_bytes == 0


async def test_parts_under_one_lease_are_reported_once_when_all_are_decoded(start: Start, tar: Path) -> None:
    worker = await start()
    worker.orders.open_job(str(tar))
    worker.orders.decode_lot("lot", a=[(0, 0)], b=[(0, 1), (0, 2)])
    worker.orders.decode("after", (0, 5), priority=1)
    assert {(await worker.orders.heard("part_decoded")).lease for _ in range(2)} == {"lot", "lease-after"}
    assert [await worker.samples(name) for name in ("a", "b")] == [[0], [0, 1]]


async def test_parts_under_one_lease_fail_together_and_what_is_decoded_of_them_is_not_decoded_again(
    start: Start, tar: Path
) -> None:
    worker = await start()
    worker.orders.open_job(str(tar))
    worker.orders.decode_lot("lot", good=[(0, 0)], damaged=[(0, 5)], worse=[(0, 1), (0, 5)])
    failed = await worker.orders.heard("order_failed")
    assert (failed.lease, [item.reason for item in failed.damaged]) == ("lot", ["corrupt_media"])
    await worker.samples("good")
    decoded = counted("samples_decoded_total")
    worker.orders.decode("good", (0, 0), strict=True)
    assert (await worker.orders.heard("part_decoded")).lease == "lease-good"
    assert counted("samples_decoded_total") == decoded


async def test_a_shard_that_is_slow_to_come_holds_up_no_decoding(start: Start, gated: Gated, tar: Path) -> None:
    """One decoding thread; the part that is needed first waits for its shard, and the others are decoded meanwhile."""
    worker = await start(gated)
    worker.orders.open_job("memory://s/slow.tar", str(tar))
    worker.orders.decode("slow", (0, 0), priority=0)
    for n in range(4):
        worker.orders.decode(f"part-{n}", (1, n), priority=1 + n)
    leases = [(await worker.orders.heard("part_decoded")).lease for _ in range(4)]
    assert sorted(leases) == [f"lease-part-{n}" for n in range(4)]
    assert worker.store.stage_parts[PartStage.READ] == 1
    gated.gates["slow"].set()
    assert (await worker.orders.heard("part_decoded")).lease == "lease-slow"


async def test_a_slow_shard_that_is_probed_holds_up_no_part(start: Start, gated: Gated, tar: Path) -> None:
    worker = await start(gated)
    worker.orders.open_job("memory://s/slow.tar", str(tar))
    worker.orders.index(0)
    await asyncio.to_thread(gated.asked["slow"].wait, PATIENCE_S)
    worker.orders.decode("part", (1, 0))
    await worker.orders.heard("part_decoded")
    gated.gates["slow"].set()
    assert (await worker.orders.heard("shard_indexed")).num_samples == 6


async def test_as_many_parts_are_read_ahead_as_there_is_place_for(start: Start, gated: Gated, tar: Path) -> None:
    worker = await start(gated)
    worker.orders.open_job("memory://s/slow.tar")
    for n in range(5):
        worker.orders.decode(f"part-{n}", (0, n), priority=n)
    await asyncio.to_thread(gated.asked["slow"].wait, PATIENCE_S)
    worker.orders.orders.put_nowait(FleetOrder(list_shards=fleet_pb2.ListShards(lease="x", job="none")))  # all is taken then
    await worker.orders.heard("order_failed")
    assert worker.store.stage_parts == {PartStage.READ: 3, PartStage.WAITING: 2}
    gated.gates["slow"].set()
    leases = [(await worker.orders.heard("part_decoded")).lease for _ in range(5)]
    assert sorted(leases) == [f"lease-part-{n}" for n in range(5)]


async def test_a_shard_that_vanishes_before_it_is_decoded_is_named_and_another_preprocessor_has_it(
    start: Start, content: bytes, tmp_path: Path
) -> None:
    url = "memory://vanishing/shard.tar"
    remote = fsspec.filesystem("memory")
    remote.pipe_file("/vanishing/shard.tar", content)
    one, two = await start(ShardCache(tmp_path / "one")), await start(ShardCache(tmp_path / "two"))
    for worker in (one, two):
        worker.orders.open_job(url)
    one.orders.index(0)
    assert (await one.orders.heard("shard_indexed")).num_samples == 6
    remote.rm_file("/vanishing/shard.tar")

    failed = counted("orders_failed_total")
    two.orders.decode("part", (0, 1))
    failure = await two.orders.heard("order_failed")
    assert failure.lease == "lease-part"
    assert failure.error.startswith(f"cannot read the shard {url}: ")
    assert failure.error.endswith("; check that it exists and that this process may read it")
    assert counted("orders_failed_total") == failed + 1
    assert two.store.get("part") is None

    one.orders.decode("part", (0, 1))
    await one.orders.heard("part_decoded")
    assert await one.samples("part") == [0]

    remote.pipe_file("/vanishing/shard.tar", content)
    two.orders.decode("part", (0, 1))
    await two.orders.heard("part_decoded")


async def test_a_part_is_given_up_when_its_job_is_closed_while_it_is_read(start: Start, gated: Gated, tar: Path) -> None:
    worker = await start(gated)
    worker.orders.open_job("memory://s/slow.tar")
    worker.orders.decode("part", (0, 0))
    await asyncio.to_thread(gated.asked["slow"].wait, PATIENCE_S)
    worker.orders.orders.put_nowait(FleetOrder(job_closed=fleet_pb2.JobClosed(job="job")))
    worker.orders.open_job("memory://s/other.tar")
    gated.gates["other"].set()
    worker.orders.decode("next", (0, 0))
    assert (await worker.orders.heard("part_decoded")).lease == "lease-next"
    gated.gates["slow"].set()
    worker.orders.decode("last", (0, 1))
    assert (await worker.orders.heard("part_decoded")).lease == "lease-last"
    assert worker.store.get("part") is None


async def test_shards_are_known_while_parts_of_them_are_held(start: Start, tar: Path) -> None:
    worker = await start()
    worker.orders.open_job(*[str(tar)] * 12)
    for n in range(12):
        worker.orders.decode(f"part-{n}", (n, 0), priority=n)
    for _ in range(12):
        await worker.orders.heard("part_decoded")
    job = worker.engine._jobs["job"]
    assert len(job.shards) == 12
    worker.orders.orders.put_nowait(FleetOrder(step_committed=fleet_pb2.StepCommitted(job="job", step=0)))
    worker.orders.decode("next", (3, 1))
    await worker.orders.heard("part_decoded")
    assert len(job.shards) <= 1 + 1 + read_ahead_parts(1)  # the new part's, and what each loop had last


async def test_shards_are_listed_in_pages_with_the_vocabulary_on_the_last(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.preprocessor.engine.PAGE_SHARDS", 2)
    for n in range(5):
        (tmp_path / f"{n}.jsonl").write_text("{}\n")
    worker = await start()
    spec = parse_spec({"name": "job", "sources": [{"path": str(tmp_path), "name": "s"}]})
    worker.orders.orders.put_nowait(FleetOrder(job_opened=fleet_pb2.JobOpened(job="job", spec_json=spec.to_json())))
    worker.orders.orders.put_nowait(FleetOrder(list_shards=fleet_pb2.ListShards(lease="list", job="job")))
    pages = [await worker.orders.heard("shards_listed") for _ in range(3)]
    assert [[shard.number for shard in page.shards] for page in pages] == [[0, 1], [2, 3], [4]]
    assert [(page.more, page.HasField("vocabulary")) for page in pages] == [(True, False), (True, False), (False, True)]


async def test_a_long_list_of_shards_is_sent_in_messages_of_bounded_size(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its pages wait to be sent at the same moment."""
    monkeypatch.setattr("headrace.preprocessor.engine.PAGE_SHARDS", 2)
    monkeypatch.setattr("headrace.outbox.MAX_BATCH_BYTES", 4_000)
    for n in range(100):
        (tmp_path / f"{n:0100}.jsonl").write_text("{}\n")
    worker = await start()
    spec = parse_spec({"name": "job", "sources": [{"path": str(tmp_path), "name": "s"}]})
    worker.orders.orders.put_nowait(FleetOrder(job_opened=fleet_pb2.JobOpened(job="job", spec_json=spec.to_json())))
    worker.orders.orders.put_nowait(FleetOrder(list_shards=fleet_pb2.ListShards(lease="list", job="job")))
    pages = [await worker.orders.heard("shards_listed") for _ in range(50)]
    assert sum(page.ByteSize() for page in pages) > 20_000
    assert 2_000 < max(worker.orders.sizes) < 4_500, "a full message, and what protobuf adds to each report"


async def test_a_job_that_cannot_be_opened_is_refused_by_its_orders_and_others_go_on(start: Start, tar: Path) -> None:
    """A spec of another release, say: the process, and what other jobs have there, must live through it."""
    worker = await start()
    worker.orders.open_job(str(tar))
    strange = json.dumps(json.loads(SPEC.to_json()) | {"name": "strange", "image": {"field_of_tomorrow": 1}})
    opened = fleet_pb2.JobOpened(job="strange", spec_json=strange)
    worker.orders.orders.put_nowait(FleetOrder(job_opened=opened))
    shards = worker.orders.shards
    for order in (
        FleetOrder(list_shards=fleet_pb2.ListShards(lease="list", job="strange")),
        FleetOrder(index_shard=fleet_pb2.IndexShard(lease="index", job="strange", shard=shards[0])),
        FleetOrder(decode_part=fleet_pb2.DecodePart(lease="decode", job="strange", ticket="strange", shards=shards)),
    ):
        worker.orders.orders.put_nowait(order)
        failed = await worker.orders.heard("order_failed")
        assert failed.error == "a preprocessor cannot open the job: image.field_of_tomorrow: there is no such field, got 1"
    worker.orders.index(0)
    assert (await worker.orders.heard("shard_indexed")).num_samples == 6


async def test_a_part_is_kept_as_its_order_has_it_or_not_at_all(start: Start, tar: Path) -> None:
    """Row 5 cannot be decoded. That is said, and what is left out then is told in the next order."""
    worker = await start()
    worker.orders.open_job(str(tar))
    rows = [(0, 4), (0, 5)]
    worker.orders.decode("part", *rows, strict=True)
    failed = await worker.orders.heard("order_failed")
    (damaged,) = failed.damaged
    assert (failed.lease, damaged.sample_id, damaged.name, damaged.reason) == ("lease-part", 1, "s/shard.tar/5", "corrupt_media")
    assert "cannot decode sample s/shard.tar/5 (corrupt_media: " in failed.error
    assert worker.store.get("part") is None
    worker.orders.decode("part", *rows, strict=True, left_out=[damaged])
    await worker.orders.heard("part_decoded")
    assert await worker.samples("part") == [0]


async def test_what_is_left_out_is_not_touched_also_where_it_could_be_decoded(start: Start, tar: Path) -> None:
    worker = await start()
    worker.orders.open_job(str(tar))
    worker.orders.decode("part", (0, 0), (0, 1), strict=True)
    await worker.orders.heard("part_decoded")
    assert await worker.samples("part") == [0, 1]
    told = Rejection(sample_id=0, name="s/shard.tar/0", reason="unsupported_media", detail="no codec elsewhere", row=0)
    worker.orders.decode("part", (0, 0), (0, 1), strict=True, left_out=[told])
    await worker.orders.heard("part_decoded")
    assert await worker.samples("part") == [1]
    payload = worker.store.get("part").payload
    assert [(item.sample_id, item.detail) for item in payload.rejected] == [(0, "no codec elsewhere")]


async def test_a_full_store_stops_reading_and_a_fetch_goes_on(start: Start, tar: Path) -> None:
    """A budget smaller than two parts: what a trainer asks for is decoded, evicted for the next, and decoded again."""
    counters = ("parts_evicted_total", "parts_decoded_again_total")
    before = [counted(name) for name in counters]
    worker = await start(budget_bytes=60_000)
    worker.orders.open_job(str(tar))
    for n in range(5):
        worker.orders.decode(f"part-{n}", (0, n), priority=n)
    await worker.orders.heard("part_decoded")
    for n in (4, 2, 0, 4):
        assert await worker.samples(f"part-{n}") == [0]
    assert worker.store.held_bytes <= 60_000
    assert all(counted(name) > old for name, old in zip(counters, before, strict=True))


async def test_a_job_of_another_release_is_left_alone_and_others_go_on(start: Start, tar: Path) -> None:
    """It has a field that this release does not know; the stream stays, and its orders are reported as failed."""
    worker = await start()
    newer = json.dumps(json.loads(SPEC.to_peer_json()) | {"name": "newer", "audio": {"note": "a field of the next release"}})
    worker.orders.orders.put_nowait(FleetOrder(job_opened=fleet_pb2.JobOpened(job="newer", spec_json=newer)))
    worker.orders.orders.put_nowait(FleetOrder(list_shards=fleet_pb2.ListShards(lease="list", job="newer")))
    failed = await worker.orders.heard("order_failed")
    assert failed.lease == "list"
    assert "a preprocessor cannot open the job: audio.note: there is no such field" in failed.error
    worker.orders.open_job(str(tar))
    worker.orders.decode("a", (0, 0))
    assert (await worker.orders.heard("part_decoded")).lease == "lease-a"
    worker.orders.open_job(str(tar))  # told again after a reconnection, by another release: the same job, and its parts stay
    assert await worker.samples("a") == [0]
