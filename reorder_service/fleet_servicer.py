"""The streams of the preprocessors: each is a membership, from its Hello to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from headrace.outbox import Outbox
from headrace.rpc import answers_stream
from headrace.v1 import fleet_pb2, fleet_pb2_grpc
from reorder_service import messages
from reorder_service.leadership import Post
from reorder_service.member import Member
from reorder_service.service import ReorderService

HEARTBEAT_S = 1.0

Listed = dict[str, fleet_pb2.ShardsListed]
"""Lease -> the pages that have come of its list of shards, as one."""


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """One stream a preprocessor."""

    def __init__(self, post: Post) -> None:
        self._post = post

    @answers_stream
    async def Work(
        self, messages: AsyncIterator[fleet_pb2.FleetReports], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[fleet_pb2.FleetOrders]:
        service = self._post.service
        outbox = Outbox[fleet_pb2.FleetOrder]()
        welcome = fleet_pb2.Welcome(heartbeat_s=HEARTBEAT_S, jobs=service.running_jobs())
        outbox.put(fleet_pb2.FleetOrder(welcome=welcome))
        reader = asyncio.create_task(_read(service, aiter(messages), outbox))
        try:
            async for orders in outbox.batches():
                yield fleet_pb2.FleetOrders(orders=orders)
            if reader.done():
                await reader  # raises what broke it, if anything did
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def _read(
    service: ReorderService,
    messages: AsyncIterator[fleet_pb2.FleetReports],
    outbox: Outbox[fleet_pb2.FleetOrder],
) -> None:
    """Hear a preprocessor out. The end of its stream is its departure, unless the fleet dismisses it before."""
    member: Member | None = None
    listed: Listed = {}
    why = "connection closed"
    try:
        async for message in messages:
            if member is not None:
                service.fleet.hear(member)
            for report in message.reports:
                if report.WhichOneof("report") == "goodbye":
                    why = "departed"
                    return
                if report.WhichOneof("report") == "hello":
                    member = _join(service, report.hello, outbox)
                elif member is not None:
                    _hear(service, member, report, listed)
    finally:
        if member is not None:
            service.fleet.leave(member, why)
        outbox.end()


def _join(service: ReorderService, hello: fleet_pb2.Hello, outbox: Outbox[fleet_pb2.FleetOrder]) -> Member:
    def introduce(job: str) -> fleet_pb2.FleetOrder:
        run = service.find(job)
        return messages.job_opened(job, run.spec.to_json(), run.key)

    member = Member(
        name=hello.preprocessor,
        endpoint=hello.endpoint,
        slots=hello.slots,
        send=outbox.put,
        introduce=introduce,
        dismiss=outbox.end,
    )
    service.fleet.join(member)
    return member


def _hear(service: ReorderService, member: Member, report: fleet_pb2.FleetReport, listed: Listed) -> None:
    kind = report.WhichOneof("report")
    if kind == "heartbeat":
        beat = report.heartbeat
        member.samples_decoded, member.bytes_decoded = beat.samples_decoded, beat.bytes_decoded
        member.store_bytes, member.store_budget_bytes = beat.store_bytes, beat.store_budget_bytes
        member.occupancy = beat.occupancy
    elif kind == "order_failed":
        service.fleet.fail(member, report.order_failed.lease, report.order_failed.error)
    elif kind == "shards_listed":
        page = report.shards_listed
        listed.setdefault(page.lease, fleet_pb2.ShardsListed()).MergeFrom(page)
        if not page.more:
            service.fleet.finish(member, page.lease, listed.pop(page.lease))
    elif kind is not None:
        result = getattr(report, kind)
        service.fleet.finish(member, result.lease, result)
