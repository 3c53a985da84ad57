"""gRPC servicer for trainer ranks: it opens their sessions, streams plans to them, and takes their commits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc

from headrace import message_codec
from headrace.errors import ConflictError, NotFoundError
from headrace.plan import LLM
from headrace.reorder_service.api.plan_events import plan_events
from headrace.reorder_service.api.relayed_sessions import COMMIT_PATIENCE_S, RelayedSessions, commit_reply, rank_commit
from headrace.reorder_service.fleet.fleet import Fleet
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.resuming import ResumeState
from headrace.reorder_service.jobs.stopping import stop_task, to_its_end
from headrace.reorder_service.leadership import Leadership
from headrace.rpc import stream_method, unary_method
from headrace.v1 import sessions_pb2, sessions_pb2_grpc

log = logging.getLogger(__name__)

PATIENCE_S = 2.0  # wait for a ready job and a vacant rank, until a client that retries is told what it waits for
VACANT_S = 7.0  # wait for a vacant rank where the client does not retry: longer than keepalive takes (headrace.rpc)


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
        run = await self._leadership.service.load(request.job)
        try:
            async with asyncio.timeout(PATIENCE_S if request.patient else None):
                await run.wait_ready()
        except TimeoutError:
            return sessions_pb2.OpenReply(waiting=_awaited(run, self._leadership.service.fleet))
        if not request.together:
            try:
                await run.sessions.vacant(request.rank, request.continues, PATIENCE_S if request.patient else VACANT_S)
            except ConflictError as err:
                if not request.patient:
                    raise
                return sessions_pb2.OpenReply(waiting=str(err), occupied=True)
        generation = request.generation if request.HasField("generation") else None
        begin = None if generation is not None else run.cursor.committed
        if begin is not None and not (request.together or run.cursor.is_broken_off):
            begin, awaited = run.resuming.begin(request.rank, request.num_ranks, _states(request))
            if awaited:
                return sessions_pb2.OpenReply(waiting=awaited)
            if begin < run.cursor.committed:
                await to_its_end(run.rewind(begin))
        vocabulary = run.manifest.vocabulary
        if vocabulary is None:
            raise ConflictError(f"job {run.name!r} ended before it began: {run.cursor.message}")
        if run.formations and not (request.together or run.sessions.has_nodes):
            await to_its_end(run.leave_formations())
        session = run.open_session(
            request.rank,
            request.num_ranks,
            generation,
            request.replicas,
            unit=request.unit or LLM,
            together=request.together,
        )
        if begin is not None:
            run.sessions.note_begun(session, begin)
        return sessions_pb2.OpenReply(
            session=session.id,
            generation=run.generation,
            next_step=run.cursor.committed,
            state=None if begin is None else _state_message(run.resuming.state_at(begin)),
            spec_json=run.planned_spec.to_peer_json(),
            vocabulary=message_codec.vocabulary_message(vocabulary),
        )

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


def _states(request: sessions_pb2.OpenRequest) -> list[ResumeState]:
    """Return the states from which a rank can resume."""
    if request.states:
        return [ResumeState(step=state.step, content=state.content) for state in request.states]
    return [ResumeState(step=request.resume_step)] if request.HasField("resume_step") else []


def _state_message(state: ResumeState) -> sessions_pb2.TrainerState:
    return sessions_pb2.TrainerState(step=state.step, content=state.content)


def _awaited(run: JobRun, fleet: Fleet) -> str:
    """Say what a job that is not ready waits for."""
    if not fleet.members:
        return "no preprocessor is connected: start one with `headrace preprocessor --reorder HOST:PORT`"
    if run.manifest.vocabulary is None:
        return "the preprocessors list its shards"
    return f"the preprocessors count its shards, {run.manifest.num_counted} of {len(run.manifest.shards)} so far"
