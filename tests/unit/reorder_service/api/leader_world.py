"""A leading reorder service with all its methods on a real socket, in the test's own event loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from headrace.reorder_service.api.fleet import FleetServicer
from headrace.reorder_service.api.jobs import JobsServicer
from headrace.reorder_service.api.membership import MembershipServicer
from headrace.reorder_service.api.sessions import SessionsServicer, add_to_server
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.state import StateStore
from headrace.rpc import Server
from headrace.v1 import fleet_pb2_grpc, jobs_pb2_grpc, membership_pb2_grpc
from tests.unit.reorder_service.job_world import end


class Leader:
    """A leading service with all its methods."""

    def __init__(self, service: ReorderService) -> None:
        self.service = service
        leadership = Leadership()
        leadership.active_service, leadership.lease_ends_s = service, time.monotonic() + 3600
        leadership.leader = "test"
        self.server = Server(
            "127.0.0.1:0",
            {
                "headrace.v1.Jobs": lambda s: jobs_pb2_grpc.add_JobsServicer_to_server(JobsServicer(leadership), s),
                "headrace.v1.Sessions": lambda s: add_to_server(SessionsServicer(leadership), s),
                "headrace.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(FleetServicer(leadership), s),
                "headrace.v1.Membership": lambda s: membership_pb2_grpc.add_MembershipServicer_to_server(
                    MembershipServicer(leadership), s
                ),
            },
        )

    async def submit(self, request: bytes) -> None:
        async with grpc.aio.insecure_channel(self.server.endpoint) as channel:
            await channel.unary_unary("/headrace.v1.Jobs/Submit")(request)


@contextlib.asynccontextmanager
async def leading(folder: Path) -> AsyncIterator[Leader]:
    """A leader with an empty store in `folder`."""
    service = ReorderService(await StateStore.open(f"embedded:{folder / 'store'}"))
    await service.store.database.lead("test")
    await service.start()
    leader = Leader(service)
    await leader.server.start()
    try:
        yield leader
    finally:
        await leader.server.stop(0)
        await end(service)
