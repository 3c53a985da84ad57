"""The streams of the preprocessors: each is a membership, from its Hello to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from headrace.rpc import answers_stream
from headrace.v1 import fleet_pb2, fleet_pb2_grpc
from reorder_service import messages
from reorder_service.fleet import Member
from reorder_service.leadership import Post
from reorder_service.service import ReorderService

HEARTBEAT_S = 0.5
SILENCE_S = 3.0  # a preprocessor that says nothing for so long is gone: six heartbeats, so that a busy machine is not mistaken


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """One stream a preprocessor."""

    def __init__(self, post: Post) -> None:
        self._post = post

    @answers_stream
    async def Work(
        self, reports: AsyncIterator[fleet_pb2.FleetReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[fleet_pb2.FleetOrder]:
        service = self._post.service
        outbox: asyncio.Queue[fleet_pb2.FleetOrder | None] = asyncio.Queue()
        welcome = fleet_pb2.Welcome(heartbeat_s=HEARTBEAT_S, jobs=service.running_jobs())
        outbox.put_nowait(fleet_pb2.FleetOrder(welcome=welcome))
        reader = asyncio.create_task(_read(service, aiter(reports), outbox))
        try:
            while (order := await outbox.get()) is not None:
                yield order
            if reader.done():
                await reader  # raises what broke it, if anything did
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def _read(
    service: ReorderService,
    reports: AsyncIterator[fleet_pb2.FleetReport],
    outbox: asyncio.Queue[fleet_pb2.FleetOrder | None],
) -> None:
    """Hear a preprocessor out. The end of its stream, or silence, is its departure."""
    member: Member | None = None
    why = "connection closed"
    try:
        while True:
            async with asyncio.timeout(SILENCE_S):  # before Python 3.12 wait_for may swallow the end of the stream
                report = await anext(reports)
            if report.WhichOneof("report") == "goodbye":
                why = "departed"
                return
            if report.WhichOneof("report") == "hello":
                member = _join(service, report.hello, outbox)
            elif member is not None:
                _hear(service, member, report)
    except TimeoutError:
        why = f"silent for {SILENCE_S:g} s"
    except StopAsyncIteration:
        pass
    finally:
        if member is not None:
            service.fleet.leave(member, why)
        outbox.put_nowait(None)


def _join(service: ReorderService, hello: fleet_pb2.Hello, outbox: asyncio.Queue[fleet_pb2.FleetOrder | None]) -> Member:
    def introduce(job: str) -> fleet_pb2.FleetOrder:
        run = service.find(job)
        return messages.job_opened(job, run.spec.to_json(), run.manifest.shards, run.key)

    member = Member(
        name=hello.preprocessor,
        endpoint=hello.endpoint,
        slots=hello.slots,
        send=outbox.put_nowait,
        introduce=introduce,
        dismiss=lambda: outbox.put_nowait(None),
    )
    service.fleet.join(member)
    return member


def _hear(service: ReorderService, member: Member, report: fleet_pb2.FleetReport) -> None:
    kind = report.WhichOneof("report")
    if kind == "heartbeat":
        beat = report.heartbeat
        member.samples_decoded, member.bytes_decoded = beat.samples_decoded, beat.bytes_decoded
        member.store_bytes, member.store_budget_bytes = beat.store_bytes, beat.store_budget_bytes
        member.occupancy = beat.occupancy
    elif kind == "order_failed":
        service.fleet.fail(member, report.order_failed.lease, report.order_failed.error)
    elif kind is not None:
        result = getattr(report, kind)
        service.fleet.finish(member, result.lease, result)
