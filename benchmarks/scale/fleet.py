"""`python -m benchmarks.scale.fleet ENDPOINTS COUNT`: light preprocessors, which speak the real protocol and decode nothing.

Each has a connection and a stream of its own. They list shards that do not exist, and report sizes from a table for what
they are to probe. At SIGTERM: one JSON object on standard output, step -> when the last of its samples was reported.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from time import monotonic

import grpc

from benchmarks.scale.workload import ROWS, SHARDS, SLOTS, own_channel
from headrace.herd import retry_pause_s
from headrace.outbox import Outbox
from headrace.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc

RECONNECT_S = 0.1

_SIZES = [
    (int(random.Random(n).lognormvariate(6.0, 0.8)) + 16, int(random.Random(~n).lognormvariate(6.5, 1.0)) // 4 * 4)
    for n in range(4096)
]
"""(tokens, patches) of each sample, by its row; longer shards repeat the table."""


class LightPreprocessor:
    """One light preprocessor, with a stream of its own."""

    def __init__(self, number: int, turns: asyncio.Lock, probed: Callable[[int], None]) -> None:
        """`turns`: shared by all, which obey a message after the other. `probed`: called with the step of each sample whose size
        is reported."""
        self._name = f"light-{number:03d}"
        self._instance = uuid.uuid4().hex
        self._turns = turns
        self._probed = probed
        self._reports = Outbox[fleet_pb2.FleetReport]()
        self._heartbeat_s, self._num_preprocessors = 1.0, 1
        self._beaten_s = math.inf  # when the latest heartbeat was reported
        self._global_batch = 0  # of the one job

    async def run(self, endpoints: str) -> None:
        """Do what the reorder service asks for, until cancelled."""
        for endpoint in itertools.cycle(endpoints.split(",")):
            with suppress(grpc.RpcError):
                async with own_channel(endpoint) as channel:
                    await self._stream(fleet_pb2_grpc.FleetStub(channel))
            await asyncio.sleep(retry_pause_s(RECONNECT_S, self._num_preprocessors, random.random()))

    async def _stream(self, stub: fleet_pb2_grpc.FleetStub) -> None:
        """Do what the reorder service asks for, until it ends the stream."""
        self._reports, self._beaten_s = Outbox[fleet_pb2.FleetReport](), math.inf
        self._report(
            hello=fleet_pb2.Hello(
                preprocessor=self._name, endpoint=f"{self._name}:1", slots=SLOTS, instance=self._instance, takes_lots=True
            )
        )
        heartbeat = asyncio.create_task(self._beat())
        try:
            async for message in stub.Work(self._drain()):
                async with self._turns:
                    for order in message.orders:
                        self._obey(order)
                    await asyncio.sleep(0)  # or the heartbeats of all would wait for the orders of all
        finally:
            heartbeat.cancel()
            self._reports.end()

    async def _drain(self) -> AsyncIterator[fleet_pb2.FleetReports]:
        async for reports in self._reports.batches():
            if monotonic() > self._beaten_s + self._heartbeat_s / 2:  # as headrace.preprocessor.reporting does
                reports.append(self._heartbeat())
            yield fleet_pb2.FleetReports(reports=reports)

    def _obey(self, order: fleet_pb2.FleetOrder) -> None:
        kind = order.WhichOneof("order")
        if kind in ("decode_part", "decode_parts"):
            self._report(part_decoded=fleet_pb2.PartDecoded(lease=getattr(order, kind).lease))
        elif kind == "probe_samples":
            self._report(samples_probed=self._probe(order.probe_samples))
        elif kind == "index_shard":
            self._report(shard_indexed=fleet_pb2.ShardIndexed(lease=order.index_shard.lease, num_samples=ROWS))
        elif kind == "list_shards":
            self._report(shards_listed=_listed(order.list_shards.lease))
        elif kind == "welcome":
            self._heartbeat_s, self._num_preprocessors = order.welcome.heartbeat_s, order.welcome.num_preprocessors
        elif kind == "job_opened":
            self._global_batch = json.loads(order.job_opened.spec_json)["global_batch"]

    def _report(self, **report: object) -> None:
        self._reports.put(fleet_pb2.FleetReport(**report))  # type: ignore[arg-type]

    def _probe(self, order: fleet_pb2.ProbeSamples) -> fleet_pb2.SamplesProbed:
        probes = []
        for ref in order.samples:
            tokens, patches = _SIZES[ref.row % len(_SIZES)]
            name = f"light/shard-{ref.shard:05d}/{ref.row:06d}"
            probes.append(
                common_pb2.Probe(
                    sample_id=ref.sample_id,
                    name=name,
                    num_tokens=tokens + patches // 4,
                    num_targets=tokens // 2,
                    image_patches=[patches] if patches else [],
                )
            )
            self._probed(ref.sample_id // self._global_batch)
        return fleet_pb2.SamplesProbed(lease=order.lease, probes=probes)

    async def _beat(self) -> None:
        await asyncio.sleep(random.random())  # not all at once
        self._reports.put(self._heartbeat())
        while True:
            if (left_s := self._beaten_s + self._heartbeat_s - monotonic()) > 0:
                await asyncio.sleep(left_s)
            else:
                self._reports.put(self._heartbeat())

    def _heartbeat(self) -> fleet_pb2.FleetReport:
        self._beaten_s = monotonic()
        return fleet_pb2.FleetReport(heartbeat=fleet_pb2.Heartbeat(store_budget_bytes=1 << 30))


def _listed(lease: str) -> fleet_pb2.ShardsListed:
    shards = [
        common_pb2.Shard(source=0, number=n, url=f"memory://shard-{n:05d}", name=f"light/shard-{n:05d}") for n in range(SHARDS)
    ]
    vocabulary = common_pb2.Vocabulary(size=32_000, image_token=1, audio_token=2)
    return fleet_pb2.ShardsListed(lease=lease, shards=shards, vocabulary=vocabulary)


async def _run(endpoints: str, count: int) -> dict[int, float]:
    last: dict[int, float] = {}

    def probed(step: int) -> None:
        last[step] = monotonic()

    turns = asyncio.Lock()
    tasks = [asyncio.create_task(LightPreprocessor(number, turns, probed).run(endpoints)) for number in range(count)]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return last


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(sys.argv[1], int(sys.argv[2])))), flush=True)
