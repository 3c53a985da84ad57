"""Peers that say what a former release's said: a preprocessor, a rank and nodes, from the messages of a recorded history."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from headrace.outbox import Outbox
from headrace.v1 import fleet_pb2, fleet_pb2_grpc, sessions_pb2, sessions_pb2_grpc
from headrace.v1.fleet_pb2 import FleetReport, FleetReports
from tests.histories.history import Said, read_messages

PATIENCE_S = 60
BEAT_S = 0.2
Alter = Callable[[Message], None]
"""Changes a message before it is sent."""


def said_by(file: Path, method: str, *, by_client: bool) -> list[Said]:
    """Return the recorded messages of one direction of a method, such as Sessions/Open."""
    return [said for said in read_messages(file) if said.method.endswith(f".{method}") and said.by_client == by_client]


class RecordedPreprocessor:
    """Answers orders with what the recorded preprocessor answered to the same ones; only the leases differ."""

    def __init__(self, folder: Path, alter: Alter) -> None:
        file = folder / "preprocessor.jsonl"
        self._alter = alter
        self._listed: dict[str, list[Any]] = defaultdict(list)
        self._indexed: dict[tuple[str, str], Any] = {}
        self._probed: dict[tuple[str, int, int, int], Any] = {}
        self.told = [order for said in said_by(file, "Fleet/Work", by_client=False) for order in _orders(said.message)]
        """The orders that were recorded."""
        self.heard: list[Any] = []
        """The orders of today."""
        ordered = {body.lease: body for body in self.told if hasattr(body, "lease")}
        reports = [FleetReports.FromString(said.message) for said in said_by(file, "Fleet/Work", by_client=True)]
        for report in (report for message in reports for report in message.reports):
            kind = str(report.WhichOneof("report"))
            body = getattr(report, kind)
            if kind == "hello":
                self.hello = body
            elif kind == "shards_listed":
                self._listed[ordered[body.lease].job].append(body)
            elif kind == "shard_indexed":
                self._indexed[ordered[body.lease].job, ordered[body.lease].shard.url] = body
            elif kind == "samples_probed":
                order = ordered[body.lease]
                found = {item.sample_id: item for item in [*body.probes, *body.rejections]}
                self._probed |= {(order.job, ref.sample_id, ref.shard, ref.row): found[ref.sample_id] for ref in order.samples}

    async def serve(self, endpoint: str) -> None:
        """Be a member of the fleet until cancelled. Raises the error with which the stream ends."""
        outbox = Outbox[FleetReport]()
        self._send(outbox, FleetReport(hello=self.hello))

        async def said() -> AsyncIterator[FleetReports]:
            async for reports in outbox.batches():
                yield FleetReports(reports=reports)

        beating = asyncio.create_task(self._beat(outbox))
        try:
            async with grpc.aio.insecure_channel(endpoint) as channel:
                async for message in fleet_pb2_grpc.FleetStub(channel).Work(said()):
                    for order in message.orders:
                        kind = str(order.WhichOneof("order"))
                        self.heard.append(getattr(order, kind))
                        for answer in self._answers(kind, getattr(order, kind)):
                            self._send(outbox, answer)
        finally:
            beating.cancel()

    async def _beat(self, outbox: Outbox[FleetReport]) -> None:
        """Stay a member while others, as the planner that is compiled, keep this process from answering."""
        while True:
            self._send(outbox, FleetReport(heartbeat=fleet_pb2.Heartbeat()))
            await asyncio.sleep(BEAT_S)

    def _send(self, outbox: Outbox[FleetReport], report: FleetReport) -> None:
        sent = FleetReport()
        sent.CopyFrom(report)
        self._alter(sent)
        outbox.put(sent)

    def _answers(self, kind: str, order: Any) -> list[FleetReport]:
        match kind:
            case "list_shards":
                pages = [_with_lease(page, order.lease) for page in self._listed[order.job]]
                return [FleetReport(shards_listed=page) for page in pages]
            case "index_shard":
                return [FleetReport(shard_indexed=_with_lease(self._indexed[order.job, order.shard.url], order.lease))]
            case "probe_samples":
                found = [self._probed[order.job, ref.sample_id, ref.shard, ref.row] for ref in order.samples]
                probes = [item for item in found if not hasattr(item, "reason")]
                refused = [item for item in found if hasattr(item, "reason")]
                return [FleetReport(samples_probed=fleet_pb2.SamplesProbed(lease=order.lease, probes=probes, rejections=refused))]
            case "decode_part":
                return [FleetReport(part_decoded=fleet_pb2.PartDecoded(lease=order.lease))]
        return []


class RecordedRank:
    """Opens, follows plans and commits with the recorded requests; only the session's id differs."""

    def __init__(self, file: Path, alter: Alter) -> None:
        self._alter = alter
        self.submitted = said_by(file, "Jobs/Submit", by_client=True)[0].message
        self._open = said_by(file, "Sessions/Open", by_client=True)[-1].message
        self._commits = [
            sessions_pb2.CommitRequest.FromString(said.message) for said in said_by(file, "Sessions/Commit", by_client=True)
        ]
        told = said_by(file, "Sessions/Plans", by_client=False)
        self.plans = plans_in(said.message for said in told)

    async def train(self, endpoint: str) -> dict[int, Any]:
        """Commit every step; return the plans that were told."""
        told: dict[int, Any] = {}
        async with grpc.aio.insecure_channel(endpoint) as channel:
            stub = sessions_pb2_grpc.SessionsStub(channel)
            reply = sessions_pb2.OpenReply(waiting="not asked yet")
            while reply.waiting:
                reply = await stub.Open(self._altered(sessions_pb2.OpenRequest.FromString(self._open)), timeout=PATIENCE_S)
            events = stub.Plans(self._altered(sessions_pb2.PlansRequest(session=reply.session)), timeout=PATIENCE_S)
            left = iter(self._commits)
            request = next(left)
            async for message in events:
                told |= plans_in([message.SerializeToString()])
                while request is not None and request.step in told:
                    request.session = reply.session
                    assert (await stub.Commit(self._altered(request), timeout=PATIENCE_S)).committed
                    request = next(left, None)
            assert request is None
            await stub.Close(self._altered(sessions_pb2.CloseRequest(session=reply.session)), timeout=PATIENCE_S)
        return told

    def _altered(self, message: Any) -> Any:
        self._alter(message)
        return message


def plans_in(messages: Any) -> dict[int, Any]:
    """Return the plans of PlanEvents in bytes, by step, without what differs from run to run: tickets and their order."""
    plans = {}
    for message in messages:
        for event in sessions_pb2.PlanEvents.FromString(message).events:
            if event.HasField("plan"):
                for microbatch in event.plan.microbatches:
                    microbatch.tickets[:] = [ticket.split("/", 2)[2].rpartition("/")[0] for ticket in microbatch.tickets]
                plans[event.plan.step] = event.plan
    return plans


def asked_of(orders: list[Any], job: str) -> tuple[set[Any], set[Any], dict[str, Any]]:
    """Return which shards of a job are indexed, which samples probed, and which samples of which part decoded.

    When, in how many orders and under which leases depends on how fast others are.
    """
    indexed, probed, decoded = set(), set(), {}
    for order in (order for order in orders if job in (getattr(order, "job", ""), *(part.job for part in parts_of(order)))):
        match type(order).__name__:
            case "IndexShard":
                indexed.add((order.shard.number, order.shard.source, order.shard.url, order.shard.name))
            case "ProbeSamples":
                probed |= {(ref.sample_id, ref.shard, ref.row) for ref in order.samples}
        for part in parts_of(order):
            if not part.trial:
                name = part.ticket.split("/", 2)[2].rpartition(".")[0]
                decoded[name] = part.step, [(ref.sample_id, ref.shard, ref.row) for ref in part.samples]
    return indexed, probed, decoded


def parts_of(order: Any) -> list[Any]:
    """Return the parts that an order has decoded, of one or of several."""
    return list(order.parts) if hasattr(order, "parts") else [order] if hasattr(order, "ticket") else []


def _orders(message: bytes) -> list[Any]:
    return [getattr(order, str(order.WhichOneof("order"))) for order in fleet_pb2.FleetOrders.FromString(message).orders]


def _with_lease(report: Any, lease: str) -> Any:
    sent = type(report)()
    sent.CopyFrom(report)
    sent.lease = lease
    return sent


async def served(task: asyncio.Task[Any], preprocessor: asyncio.Task[None]) -> Any:
    """Return a task's result; raises at once what ends the preprocessor."""
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait({task, preprocessor}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            preprocessor.result()
            raise AssertionError("the preprocessor's stream has ended")
        return task.result()
