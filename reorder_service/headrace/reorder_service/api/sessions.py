"""gRPC servicer for trainer ranks: it opens their sessions, streams plans to them, and takes their commits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc

from headrace.errors import NotFoundError
from headrace.reorder_service.api.open_session import open_session
from headrace.reorder_service.api.plan_events import plan_events
from headrace.reorder_service.api.relayed_sessions import COMMIT_PATIENCE_S, RelayedSessions, commit_reply, rank_commit
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.service import FOR_RANKS
from headrace.rpc import stream_method, unary_method
from headrace.v1 import sessions_pb2, sessions_pb2_grpc

log = logging.getLogger(__name__)


def add_to_server(servicer: SessionsServicer, server: grpc.aio.Server) -> None:
    """Register the servicer, with methods `Plans` and `Relay` that send bytes: a message for many ranks is serialized only once.

    gRPC asks generic handlers in the order of their addition, and finds registered ones by name, where the last addition counts.
    So our handler is added before the generated ones as a generic one, and after them as a registered one, and wins both times.
    """
    plans = grpc.unary_stream_rpc_method_handler(
        servicer.Plans, request_deserializer=sessions_pb2.PlansRequest.FromString, response_serializer=bytes
    )
    relay = grpc.stream_stream_rpc_method_handler(
        servicer.Relay, request_deserializer=sessions_pb2.RelayRequest.FromString, response_serializer=bytes
    )
    service, handlers = "headrace.v1.Sessions", {"Plans": plans, "Relay": relay}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    sessions_pb2_grpc.add_SessionsServicer_to_server(servicer, server)
    server.add_registered_method_handlers(service, handlers)


class SessionsServicer(sessions_pb2_grpc.SessionsServicer):
    """Serves trainer ranks: it opens and closes sessions, streams plans, and takes commits and reports of lost parts."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    @unary_method
    async def Open(self, request: sessions_pb2.OpenRequest, context: grpc.aio.ServicerContext) -> sessions_pb2.OpenReply:
        service = self._leadership.service
        await service.turns.turn(FOR_RANKS)
        return await open_session(service, request)

    @stream_method
    async def Plans(self, request: sessions_pb2.PlansRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        run, session = self._leadership.service.find_session(request.session)
        session.begin_streaming()
        try:
            async for batches in session.event_batches():
                yield b"".join(plan_events(batch, session) for batch in batches)
        finally:
            run.sessions.leave(session)
        log.debug("plans ended job=%s rank=%d", run.name, session.rank)

    @stream_method
    async def Relay(
        self, requests: AsyncIterator[sessions_pb2.RelayRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        sessions = RelayedSessions(self._leadership.service)
        reading = asyncio.create_task(sessions.read(requests))
        try:
            async for reply in sessions.replies():
                yield reply
            await reading  # raises its error, if it had one
        finally:
            await stop_task(reading)
            sessions.close()

    @unary_method
    async def ReportLost(
        self, request: sessions_pb2.ReportLostRequest, context: grpc.aio.ServicerContext
    ) -> sessions_pb2.ReportLostReply:
        run, _ = self._leadership.service.find_session(request.session)
        run.report_lost(request.ticket, request.lease)
        return sessions_pb2.ReportLostReply()

    @unary_method
    async def Commit(self, request: sessions_pb2.CommitRequest, context: grpc.aio.ServicerContext) -> sessions_pb2.CommitReply:
        run, session = self._leadership.service.find_session(request.session)
        committed = await run.commit(session, request.step, rank_commit(request))
        if request.wait and not committed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_PATIENCE_S):
                    await run.cursor.committed_by_all(session, request.step)
            committed = request.step < run.cursor.committed
        if session.over is not None and not committed:
            raise session.over
        return commit_reply(run, request.step)

    @unary_method
    async def Close(self, request: sessions_pb2.CloseRequest, context: grpc.aio.ServicerContext) -> sessions_pb2.CloseReply:
        run, session = self._leadership.service.find_session(request.session)
        run.sessions.by_rank.pop(session.rank, None)
        session.end(NotFoundError(f"session {session.id!r} was closed"))
        return sessions_pb2.CloseReply()
