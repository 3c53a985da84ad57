"""A script's preprocessor: it answers its orders by itself, or when the script says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from headrace.message_codec import rejection_message
from headrace.quarantine import Reason, Rejected, rejection_of_killer
from headrace.ticket import part_of
from headrace.v1 import fleet_pb2
from headrace.v1.common_pb2 import Probe, Rejection, SampleRef, Vocabulary
from tests.golden.world import Call, RefusedError, World

KINDS = {"list_shards": "list", "index_shard": "index", "probe_samples": "probe", "decode_part": "decode"}
HEARTBEAT_S = 1.0
STORE_BYTES = 64 << 20
MANY = 16  # rows that are not listed one by one


@dataclass(kw_only=True, eq=False)
class Preprocessor:
    """One preprocessor, with the stream that makes it a member of the fleet."""

    world: World
    name: str
    slots: int = 4
    instance: str = ""
    answers: frozenset[str] = frozenset(KINDS.values())
    """The kinds of orders that it answers by itself."""
    speed: float = 0.0
    """Samples that it answers a second, one order after the other; 0: all at once."""
    restarts_s: float = 0.0
    """Seconds after which it is back where a sample has killed it; 0: never."""
    orders: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Lease -> (kind, order) of what it has not answered."""
    samples_decoded: int = 0
    hangs: bool = False
    """Whether it neither hears nor says anything, though its stream is there."""
    _reports: asyncio.Queue[fleet_pb2.FleetReport | None] = field(default_factory=asyncio.Queue)
    _free_s: float = 0.0

    def connect(self) -> None:
        """Open the stream, with a hello."""
        self._reports, self.orders = asyncio.Queue(), {}
        hello = fleet_pb2.Hello(
            preprocessor=self.name, endpoint=f"{self.name}:7071", slots=self.slots, instance=self.instance or self.name
        )
        self._say(hello=hello)
        self._stream = asyncio.create_task(self._work())
        self._beating = asyncio.create_task(self._beat())

    def end(self) -> None:
        """End the stream without a goodbye, as a process that dies does."""
        self._reports.put_nowait(None)
        self._beating.cancel()

    def goodbye(self) -> None:
        """Announce that it leaves, and end the stream."""
        self._say(goodbye=fleet_pb2.Goodbye())
        self.end()

    @property
    def is_connected(self) -> bool:
        """Whether its stream has not ended."""
        return not self._stream.done()

    def answer(self, lease: str) -> None:
        """Report what an order asks for."""
        kind, body = self.orders.pop(lease)
        self._say(**_report(self.world, kind, body))
        if kind == "decode" and not body.trial:
            self.samples_decoded += len(body.samples)

    def _answer_by_itself(self, lease: str) -> None:
        if lease in self.orders and self.orders[lease][0] in self.answers and not self.hangs:
            self.answer(lease)

    def fail(self, lease: str, error: str, damaged: Collection[int] = ()) -> None:
        """Report that it cannot carry out an order. `damaged`: the rows that it cannot decode, if that is why."""
        _, body = self.orders.pop(lease)
        rejections = [
            Rejection(sample_id=sample.sample_id, name=_name(body, sample), reason=Reason.UNSUPPORTED_MEDIA, detail="no codec")
            for sample in (body.samples if damaged else ())
            if sample.row in damaged
        ]
        self._say(order_failed=fleet_pb2.OrderFailed(lease=lease, error=error, damaged=rejections))

    async def _work(self) -> None:
        try:
            async for orders in self.world.fleet.Work(self._messages(), Call()):
                for order in orders.orders if not self.hangs else ():
                    kind = str(order.WhichOneof("order"))
                    if kind in KINDS:
                        self._take(KINDS[kind], getattr(order, kind))
        except RefusedError as err:
            self.world.say(f"{self.name}: {err}")
        self._beating.cancel()

    async def _messages(self) -> AsyncIterator[fleet_pb2.FleetReports]:
        reports = self._reports  # a later stream has another queue
        while (report := await reports.get()) is not None:
            yield fleet_pb2.FleetReports(reports=[report])

    async def _beat(self) -> None:
        while True:
            if not self.hangs:
                beat = fleet_pb2.Heartbeat(samples_decoded=self.samples_decoded, store_budget_bytes=STORE_BYTES)
                beat.occupancy.SetInParent()
                self._say(heartbeat=beat)
            await asyncio.sleep(HEARTBEAT_S)

    def _say(self, **report: Any) -> None:
        self._reports.put_nowait(fleet_pb2.FleetReport(**report))

    def _take(self, kind: str, body: Any) -> None:
        self.orders[body.lease] = kind, body
        samples = body.samples if kind in ("probe", "decode") else ()
        if any(sample.row in self.world.data.deadly and sample.sample_id not in body.killed for sample in samples):
            self.world.say(f"{self.name} dies of: {said(kind, body)}")
            self.end()
            if self.restarts_s:
                self.world.loop.call_later(self.restarts_s, self.connect)
        elif kind in self.answers:
            now_s = self.world.loop.now_s
            self._free_s = max(now_s, self._free_s) + (max(1, len(samples)) / self.speed if self.speed else 0.0)
            self.world.loop.call_at(self._free_s, self._answer_by_itself, body.lease)


def said(kind: str, body: Any) -> str:
    """Return an order in words, without its lease."""
    match kind:
        case "list":
            return f"list the shards of {body.job}"
        case "index":
            return f"index {body.shard.name} of {body.job}"
        case "probe":
            return f"probe {_rows(body)} of {body.job}"
        case _:
            without = f" without {' '.join(item.name for item in body.left_out)}" if body.left_out else ""
            return f"{'try' if body.trial else 'decode'} {part_name(body.ticket)} of {body.job}: {_rows(body)}{without}"


def part_name(ticket: str) -> str:
    """Return STEP/REPLICA/MICROBATCH/NUMBER of a part, which begin to differ behind the job, its id and its generation."""
    return part_of(ticket).split("/", 3)[3]


def _rows(body: Any) -> str:
    names = {shard.number: shard.name for shard in body.shards}
    of_shards = groupby(sorted((sample.shard, sample.row) for sample in body.samples), lambda place: place[0])
    return " ".join(f"{names[shard]}[{_ranges([row for _, row in places])}]" for shard, places in of_shards)


def _ranges(rows: Sequence[int]) -> str:
    """Return rows as in 0-3,7, or the number of them where there are many."""
    if len(rows) > MANY:
        return f"{len(rows)} rows"
    runs = [[row for _, row in run] for _, run in groupby(enumerate(rows), lambda it: it[1] - it[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _report(world: World, kind: str, body: Any) -> dict[str, Any]:
    """Return the report that answers an order."""
    service = world.leadership.service
    match kind:
        case "list":
            shards = world.data.listed(source.name for source in service.find(body.job).spec.sources)
            return {"shards_listed": fleet_pb2.ShardsListed(lease=body.lease, shards=shards, vocabulary=Vocabulary(size=9))}
        case "index":
            return {"shard_indexed": fleet_pb2.ShardIndexed(lease=body.lease, num_samples=world.data.rows)}
        case "probe":
            return {"samples_probed": _probed(world, body)}
        case _:
            return {"part_decoded": fleet_pb2.PartDecoded(lease=body.lease)}


def _name(order: Any, sample: SampleRef) -> str:
    shards = {shard.number: shard.name for shard in order.shards}
    return f"{shards[sample.shard]}/{sample.row}"


def _probed(world: World, body: Any) -> fleet_pb2.SamplesProbed:
    report = fleet_pb2.SamplesProbed(lease=body.lease)
    for sample in body.samples:
        name = _name(body, sample)
        place = {"sample_id": sample.sample_id, "row": sample.row}
        if sample.sample_id in body.killed:
            rejected = rejection_of_killer(name, body.killed[sample.sample_id], **place)
            report.rejections.append(rejection_message(rejected))
        elif sample.row in world.data.bad:
            rejected = Rejected(name=name, reason=Reason.CORRUPT_MEDIA, detail="truncated", **place)
            report.rejections.append(rejection_message(rejected))
        else:
            report.probes.append(Probe(sample_id=sample.sample_id, name=name, num_tokens=4 + sample.row % 4, num_targets=2))
    return report
