"""gRPC servicer for preprocessors: each has one stream, and is a member of the fleet from its Hello to the stream's end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from headrace.errors import HeadraceError, UserError
from headrace.message_codec import rejection_value
from headrace.observability.logs import pairs
from headrace.outbox import Outbox
from headrace.refusals import MOST_RELEASE, RELEASE
from headrace.reorder_service.api.shard_lists import ShardLists
from headrace.reorder_service.fleet.member import HEARTBEAT_S, Member, heartbeat_s
from headrace.reorder_service.fleet.reports import check_hello, check_report
from headrace.reorder_service.jobs import fleet_messages
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.service import FOR_PREPROCESSORS, ReorderService
from headrace.rpc import stream_method
from headrace.v1 import fleet_pb2, fleet_pb2_grpc

log = logging.getLogger(__name__)

HELLO_S = 10.0  # in which a stream must have said hello: until then nobody looks whether it is silent
LOST = "connection closed"

MOST_ERROR = 4096  # characters kept of the error of a failed order: it may end up in the job's record


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """Serves one bidirectional stream per preprocessor: it sends orders and takes reports."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._lists = ShardLists()

    @stream_method
    async def Work(
        self, messages: AsyncIterator[fleet_pb2.FleetReports], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[fleet_pb2.FleetOrders]:
        service = self._leadership.service
        outbox = Outbox[fleet_pb2.FleetOrder]()
        pause_s = heartbeat_s(len(service.fleet.members))
        release = str(dict(context.invocation_metadata() or ()).get(RELEASE, ""))[:MOST_RELEASE]
        outbox.put(_welcome(service, pause_s))
        reader = asyncio.create_task(_read(service, aiter(messages), outbox, self._lists, pause_s, release))
        try:
            async for orders in outbox.batches():
                yield fleet_pb2.FleetOrders(orders=orders)
            if reader.done():
                await reader  # raises its error, if it had one
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def _read(
    service: ReorderService,
    messages: AsyncIterator[fleet_pb2.FleetReports],
    outbox: Outbox[fleet_pb2.FleetOrder],
    lists: ShardLists,
    pause_s: float = HEARTBEAT_S,
    release: str = "",
) -> None:
    """Handle the reports of one preprocessor until its stream ends. It leaves the fleet then, unless it was dismissed before.

    `pause_s`: from one heartbeat to the next, as it was told. `release`: that it says it is of.
    """
    member: Member | None = None
    why = LOST
    hello_due = asyncio.get_running_loop().call_later(HELLO_S, outbox.end)
    try:
        async for message in messages:
            if member is not None:
                member.heard_s = math.inf  # what it says next cannot be read before this has had its turn
            await service.turns.turn(FOR_PREPROCESSORS)
            if member is not None:
                service.fleet.hear(member)
            for report in message.reports:
                kind = report.WhichOneof("report")
                if kind == "goodbye":
                    why = "departed"
                    return
                if (member is None) != (kind == "hello"):
                    raise UserError(f"the stream of a preprocessor begins with its one hello, got {kind or 'nothing'}")
                if member is None:
                    member = _join(service, report.hello, outbox, pause_s, release)
                    hello_due.cancel()
                elif kind is not None:
                    _hear(service, member, kind, getattr(report, kind), lists)
    except HeadraceError as err:
        why = "refused"
        log.warning("refused %s", pairs(preprocessor=member.name if member is not None else None, error=err))
        raise
    finally:
        hello_due.cancel()
        if member is not None:
            service.fleet.leave(member, why, died=why == LOST)
            lists.drop(lambda of, _lease: of is member)
        outbox.end()


def _welcome(service: ReorderService, pause_s: float) -> fleet_pb2.FleetOrder:
    jobs, members = service.running_jobs(), service.fleet.members
    return fleet_pb2.FleetOrder(welcome=fleet_pb2.Welcome(heartbeat_s=pause_s, jobs=jobs, num_preprocessors=len(members)))


def _lengthen_pauses(service: ReorderService) -> None:
    """Welcome those members again that should pause twice as long between heartbeats as they were told, or longer."""
    pause_s = heartbeat_s(len(service.fleet.members))
    for member in service.fleet.members.values():
        if 2 * member.heartbeat_s <= pause_s:
            member.heartbeat_s = pause_s
            member.send(_welcome(service, pause_s))


def _join(
    service: ReorderService, hello: fleet_pb2.Hello, outbox: Outbox[fleet_pb2.FleetOrder], pause_s: float, release: str = ""
) -> Member:
    check_hello(hello)

    def introduce(job: str) -> fleet_pb2.FleetOrder:
        run = service.find(job)
        return fleet_messages.job_opened(job, run.spec.to_peer_json(), run.key)

    member = Member(
        name=hello.preprocessor,
        endpoint=hello.endpoint,
        slots=hello.slots,
        other_slots=hello.other_slots,
        send=outbox.put,
        introduce=introduce,
        dismiss=outbox.end,
        instance=hello.instance,
        release=release,
        clock_ahead_s=hello.clock_s - time.time() if hello.clock_s else None,
        takes_lots=hello.takes_lots,
        heartbeat_s=pause_s,
    )
    service.fleet.join(member)
    _lengthen_pauses(service)
    return member


def _hear(service: ReorderService, member: Member, kind: str, report: Any, lists: ShardLists) -> None:
    check_report(service.fleet, member, kind, report)
    if kind == "heartbeat":
        member.samples_decoded, member.bytes_decoded = report.samples_decoded, report.bytes_decoded
        member.store_bytes, member.store_budget_bytes = report.store_bytes, report.store_budget_bytes
        member.occupancy = report.occupancy
    elif kind == "order_failed":
        damaged = [rejection_value(item) for item in report.damaged]
        service.fleet.fail(member, report.lease, report.error[:MOST_ERROR], damaged)
    elif kind == "shards_listed":
        lists.drop(lambda of, lease: service.fleet.at_work(of, lease) is None)  # as where a lease was given up meanwhile
        if service.fleet.at_work(member, report.lease) is not None and (whole := lists.add(member, report)) is not None:
            service.fleet.finish(member, report.lease, whole)
    else:
        service.fleet.finish(member, report.lease, report)
