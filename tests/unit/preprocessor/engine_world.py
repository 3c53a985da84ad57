"""A reorder service's end that says what a test wants and notes what it hears, and an engine at work for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa

from headrace.manifest import ShardInfo
from headrace.message_codec import ref_message, shard_message
from headrace.preprocessor.engine import Engine, read_ahead_parts
from headrace.preprocessor.payload.payload_store import PayloadStore
from headrace.preprocessor.payload.staging import ReadAhead
from headrace.preprocessor.payload.writer import PayloadWriter
from headrace.preprocessor.sources.blob import BlobCache
from headrace.sample import SampleRef
from headrace.spec import parse_spec
from headrace.v1 import fleet_pb2, fleet_pb2_grpc
from headrace.v1.common_pb2 import Rejection
from headrace.v1.fleet_pb2 import FleetOrder, FleetOrders, FleetReport, FleetReports

PATIENCE_S = 30
MIB = 1 << 20
SPEC = parse_spec({"name": "job", "sources": [{"path": "/data", "name": "s"}]})


class Orders(fleet_pb2_grpc.FleetServicer):
    """The reorder service's end: one stream at a time."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[FleetOrder] = asyncio.Queue()
        self.reports: asyncio.Queue[FleetReport] = asyncio.Queue()
        self.sizes: list[int] = []
        """Bytes of each message of reports."""

    async def Work(  # noqa: N802
        self, messages: AsyncIterator[FleetReports], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[FleetOrders]:
        reading = asyncio.create_task(self._read(messages))
        try:
            yield FleetOrders(orders=[FleetOrder(welcome=fleet_pb2.Welcome(heartbeat_s=60, jobs=["job"]))])
            while True:
                yield FleetOrders(orders=[await self.orders.get()])
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, messages: AsyncIterator[FleetReports]) -> None:
        async for message in messages:
            self.sizes.append(message.ByteSize())
            for report in message.reports:
                if report.WhichOneof("report") not in ("heartbeat", "goodbye"):
                    self.reports.put_nowait(report)

    async def heard(self, kind: str) -> Any:
        """The next report, which must be of that kind."""
        report = await asyncio.wait_for(self.reports.get(), PATIENCE_S)
        assert report.WhichOneof("report") == kind, report
        return getattr(report, kind)

    def open_job(self, *urls: str) -> None:
        self.shards = [shard_message(n, ShardInfo(source=0, url=url, name=f"s/{Path(url).name}")) for n, url in enumerate(urls)]
        self.orders.put_nowait(FleetOrder(job_opened=fleet_pb2.JobOpened(job="job", spec_json=SPEC.to_json())))

    def index(self, shard: int) -> None:
        order = fleet_pb2.IndexShard(lease="index", job="job", shard=self.shards[shard])
        self.orders.put_nowait(FleetOrder(index_shard=order))

    def decode_lot(self, lease: str, **parts: Sequence[tuple[int, int]]) -> None:
        """Strict parts under one lease, each of samples given as (shard, row)."""
        asked = [self._part(name, rows) for name, rows in parts.items()]
        for part in asked:
            part.strict = True
        order = fleet_pb2.DecodeParts(lease=lease, parts=asked, shards=self.shards)
        self.orders.put_nowait(FleetOrder(decode_parts=order))

    def decode(
        self, name: str, *rows: tuple[int, int], priority: int = 0, strict: bool = False, left_out: Sequence[Rejection] = ()
    ) -> None:
        """A part of samples given as (shard, row)."""
        order = self._part(name, rows)
        order.lease, order.priority, order.strict = f"lease-{name}", priority, strict
        order.left_out.extend(left_out)
        order.shards.extend(self.shards[shard] for shard in sorted({shard for shard, _ in rows}))
        self.orders.put_nowait(FleetOrder(decode_part=order))

    def _part(self, name: str, rows: Sequence[tuple[int, int]]) -> fleet_pb2.DecodePart:
        refs = [ref_message(SampleRef(sample_id=n, shard=shard, row=row)) for n, (shard, row) in enumerate(rows)]
        return fleet_pb2.DecodePart(job="job", ticket=name, samples=refs)


class Worker:
    """An engine at work, and its store."""

    def __init__(self, orders: Orders, reorder: str, cache: BlobCache, *, threads: int, budget_bytes: int = 64 * MIB) -> None:
        self.orders = orders
        self.read_ahead = ReadAhead(budget_bytes // 8, read_ahead_parts(threads))
        self.store = PayloadStore(budget_bytes, None, self.read_ahead)
        self.engine = Engine(
            name="worker",
            endpoint="127.0.0.1:1",
            reorder=reorder,
            threads=threads,
            store=self.store,
            writer=PayloadWriter(),
            cache=cache,
            media_bytes=MIB,
        )

    async def samples(self, ticket: str) -> list[int]:
        """Fetch a part, which may be ordered this moment; its sample ids."""
        async with asyncio.timeout(PATIENCE_S):
            while (entry := self.store.get(ticket)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        async with self.store.held(entry) as found:
            assert found is not None
            with pa.ipc.open_stream(found.data) as reader:
                ids: list[int] = reader.read_next_batch().column("sample_id").to_pylist()
        self.store.mark_fetched(entry)
        return ids
