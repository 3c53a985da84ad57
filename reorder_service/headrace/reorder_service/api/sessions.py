"""gRPC servicer for trainer ranks: it opens their sessions, streams plans to them, and takes their commits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator

import grpc

from headrace import message_codec
from headrace.errors import ConflictError, NotFoundError
from headrace.plan import LLM
from headrace.reorder_service.fleet.fleet import Fleet
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.planned_step import PlannedPart, PlannedStep, RankCommit
from headrace.reorder_service.jobs.resuming import ResumeState
from headrace.reorder_service.jobs.sessions import Ended, EventBatch, Session
from headrace.reorder_service.leadership import Leadership
from headrace.rpc import stream_method, unary_method
from headrace.v1 import sessions_pb2, sessions_pb2_grpc

log = logging.getLogger(__name__)

PATIENCE_S = 2.0  # wait for a ready job and a vacant rank, until a client that retries is told what it waits for
VACANT_S = 7.0  # wait for a vacant rank where the client does not retry: longer than keepalive takes (headrace.rpc)
COMMIT_PATIENCE_S = 4.0  # wait for the other ranks of a step, until a committing rank is told which are missing
MISSING_RANKS = 8  # most ranks that a reply names as missing from a step


def add_to_server(servicer: SessionsServicer, server: grpc.aio.Server) -> None:
    """Register the servicer, with a `Plans` method that sends bytes: a message for a thousand ranks is serialized only once.

    gRPC asks generic handlers in the order of their addition, and finds registered ones by name, where the last addition counts.
    So our handler is added before the generated ones as a generic one, and after them as a registered one, and wins both times.
    """
    plans = grpc.unary_stream_rpc_method_handler(
        servicer.Plans, request_deserializer=sessions_pb2.PlansRequest.FromString, response_serializer=bytes
    )
    service, handlers = "headrace.v1.Sessions", {"Plans": plans}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    sessions_pb2_grpc.add_SessionsServicer_to_server(servicer, server)
    server.add_registered_method_handlers(service, handlers)


class SessionsServicer(sessions_pb2_grpc.SessionsServicer):
    """Serves trainer ranks: it opens and closes sessions, streams plans, and takes commits and reports of lost parts."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    @unary_method
    async def Open(self, request: sessions_pb2.OpenRequest, context: grpc.aio.ServicerContext) -> sessions_pb2.OpenReply:
        run = self._leadership.service.find(request.job)
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
                await asyncio.shield(run.rewind(begin))
        vocabulary = run.manifest.vocabulary
        if vocabulary is None:
            raise ConflictError(f"job {run.name!r} ended before it began: {run.cursor.message}")
        if run.formations and not (request.together or run.sessions.has_nodes):
            await asyncio.shield(run.leave_formations())
        session = run.open_session(
            request.rank,
            request.num_ranks,
            generation,
            request.replicas,
            unit=request.unit or LLM,
            together=request.together,
        )
        session.opened_at_step = begin
        return sessions_pb2.OpenReply(
            session=session.id,
            generation=run.generation,
            next_step=run.cursor.committed,
            state=None if begin is None else _state_message(run, begin),
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
        commit = RankCommit(
            rejected=tuple(message_codec.rejection_value(item) for item in request.rejections),
            loss=request.loss,
            step_s=request.step_s,
            data_wait_s=request.data_wait_s,
            measured=tuple(map(message_codec.measured_value, request.measured)),
            content=request.content,
        )
        committed = await run.commit(session, request.step, commit)
        if request.wait and not committed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_PATIENCE_S):
                    await run.cursor.committed_by_all(session, request.step)
            committed = request.step < run.cursor.committed
        if session.over is not None and not committed:
            raise session.over
        return sessions_pb2.CommitReply(committed=committed, missing=() if committed else _missing(run, request.step))

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


def _state_message(run: JobRun, step: int) -> sessions_pb2.TrainerState:
    """Return the state of a trainer that begins with a step."""
    known = step > 0 and run.batches.knows(step - 1)
    return sessions_pb2.TrainerState(step=step, content=run.batches.content(step - 1) if known else 0)


def _awaited(run: JobRun, fleet: Fleet) -> str:
    """Say what a job that is not ready waits for."""
    if not fleet.members:
        return "no preprocessor is connected: start one with `headrace preprocessor --reorder HOST:PORT`"
    if run.manifest.vocabulary is None:
        return "the preprocessors list its shards"
    return f"the preprocessors count its shards, {run.manifest.num_counted} of {len(run.manifest.shards)} so far"


def _missing(run: JobRun, step: int) -> list[int]:
    """Return the first MISSING_RANKS of the ranks that have not committed the step."""
    commits = run.cursor.steps[step].commits if step in run.cursor.steps else {}
    return list(itertools.islice((rank for rank in range(run.sessions.num_ranks) if rank not in commits), MISSING_RANKS))


def plan_events(batch: EventBatch, session: Session) -> bytes:
    """Serialize a batch of events as PlanEvents, once for all sessions of a lane: the first call keeps the bytes in `batch`."""
    if not batch.message:
        batch.message = b"".join(_event_message(event, session) for event in batch.events)
    return batch.message


def _event_message(event: PlannedStep | PlannedPart | Ended, session: Session) -> bytes:
    """Serialize one event as a PlanEvents message."""
    if isinstance(event, PlannedStep):
        return _plan_message(event, session)
    if isinstance(event, PlannedPart):
        if event.message[0] != event.lease:
            location = sessions_pb2.PartLocation(
                ticket=event.ticket, lease=event.lease, endpoint=event.endpoint, left_out=event.agreed.left_out
            )
            event.message = event.lease, _written(sessions_pb2.PlanEvent(location=location))
        return event.message[1]
    return _written(sessions_pb2.PlanEvent(ended=sessions_pb2.JobEnded(message=event.message)))


def _written(event: sessions_pb2.PlanEvent) -> bytes:
    written: bytes = sessions_pb2.PlanEvents(events=[event]).SerializeToString()
    return written


def _plan_message(step: PlannedStep, session: Session) -> bytes:
    """Serialize a plan for a session; what all ranks share, and what the session's lane shares, is serialized only once."""
    if session.lane not in step.messages:
        step.messages[session.lane] = _rank_plan(step, session).SerializeToString()
    plan = step.messages[session.lane]
    if session.replicas:
        plan += message_codec.field_bytes(sessions_pb2.RankPlan.WHOLE_FIELD_NUMBER, step.whole)
    event = message_codec.field_bytes(sessions_pb2.PlanEvent.PLAN_FIELD_NUMBER, plan)
    return message_codec.field_bytes(sessions_pb2.PlanEvents.EVENTS_FIELD_NUMBER, event)


def _rank_plan(step: PlannedStep, session: Session) -> sessions_pb2.RankPlan:
    """Build the session's share of a step's plan, without the whole plan that some sessions need as well.

    It has the microbatches of the replicas that the session takes, and those others in which the LLM has samples of its unit.
    """
    replicas = [replica for replica in range(len(step.sizes)) if session.takes(replica)]
    needed = {part.ticket: part for replica in replicas for part in step.parts_at.get((session.unit, replica), ())}
    parts: dict[tuple[int, int], list[PlannedPart]] = {(k, r): [] for r in replicas for k in range(len(step.sizes[r]))}
    for part in needed.values():
        parts.setdefault((part.microbatch, part.replica), []).append(part)
    microbatches = [
        sessions_pb2.RankMicrobatch(
            replica=r,
            index=k,
            tickets=[part.ticket for part in of_microbatch],
            num_samples=step.sizes[r][k],
            parts=[_part_samples(part) for part in of_microbatch] if session.replicas else (),
            packs=[sessions_pb2.Pack(sample_ids=samples) for samples in step.packs_in(r, k)],
        )
        for (k, r), of_microbatch in sorted(parts.items(), key=lambda item: item[0])
    ]
    return sessions_pb2.RankPlan(
        step=step.index,
        microbatches=microbatches,
        num_samples=len(step.probes),
        content=step.content,
        formation=step.formation.generation if step.formation is not None else 0,
        seconds=step.seconds if step.formation is not None else (),
    )


def _part_samples(part: PlannedPart) -> sessions_pb2.PartSamples:
    return sessions_pb2.PartSamples(sample_ids=[ref.sample_id for ref in part.samples])
