"""What trainer ranks ask of the reorder service: decode, call, encode."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator

import grpc

from headrace import codec
from headrace.errors import ConflictError, NotFoundError
from headrace.rpc import answers, answers_stream
from headrace.v1 import sessions_pb2, sessions_pb2_grpc
from reorder_service.fleet import Fleet
from reorder_service.job import JobRun
from reorder_service.leadership import Post
from reorder_service.sessions import Ended, Session
from reorder_service.step import Part, RankCommit, Step

log = logging.getLogger(__name__)

PATIENCE_S = 2.0  # for a job to be ready, until a rank that asks again is told what it waits for
COMMIT_PATIENCE_S = 4.0  # for the other ranks of a step, likewise
MISSING_RANKS = 8  # of a step, that are named


class SessionsServicer(sessions_pb2_grpc.SessionsServicer):
    """What trainer ranks ask."""

    def __init__(self, post: Post) -> None:
        self._post = post

    @answers
    async def Open(self, request: sessions_pb2.OpenRequest, context: grpc.aio.ServicerContext) -> sessions_pb2.OpenReply:
        run = self._post.service.find(request.job)
        try:
            async with asyncio.timeout(PATIENCE_S if request.patient else None):
                await run.wait_ready()
        except TimeoutError:
            return sessions_pb2.OpenReply(waiting=_awaited(run, self._post.service.fleet))
        if not request.together:
            await run.sessions.vacant(request.rank, request.continues)
        generation = request.generation if request.HasField("generation") else None
        if request.HasField("resume_step"):
            await asyncio.shield(run.rewind(request.resume_step))
        vocabulary = run.manifest.vocabulary
        if vocabulary is None:
            raise ConflictError(f"job {run.name!r} ended before it began: {run.message}")
        session = run.open_session(request.rank, request.num_ranks, generation, request.replicas, together=request.together)
        return sessions_pb2.OpenReply(
            session=session.id,
            generation=run.generation,
            next_step=run.committed,
            spec_json=run.spec.to_json(),
            vocabulary=codec.vocabulary_message(vocabulary),
        )

    @answers_stream
    async def Plans(
        self, request: sessions_pb2.PlansRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[sessions_pb2.PlanEvents]:
        run, session = self._post.service.find_session(request.session)
        session.begin_streaming()
        try:
            async for events in session.events():
                yield sessions_pb2.PlanEvents(events=[_plan_event(event, session) for event in events])
        finally:
            run.sessions.leave(session)
        log.debug("plans ended job=%s rank=%d", run.name, session.rank)

    @answers
    async def ReportLost(
        self, request: sessions_pb2.ReportLostRequest, context: grpc.aio.ServicerContext
    ) -> sessions_pb2.ReportLostReply:
        run, _ = self._post.service.find_session(request.session)
        run.report_lost(request.ticket, request.lease)
        return sessions_pb2.ReportLostReply()

    @answers
    async def Commit(self, request: sessions_pb2.CommitRequest, context: grpc.aio.ServicerContext) -> sessions_pb2.CommitReply:
        run, session = self._post.service.find_session(request.session)
        commit = RankCommit(
            rejected=tuple(codec.rejection_value(item) for item in request.rejections),
            loss=request.loss,
            step_s=request.step_s,
            data_wait_s=request.data_wait_s,
        )
        committed = await run.commit(session, request.step, commit)
        if request.wait and not committed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(COMMIT_PATIENCE_S):
                    await run.committed_by_all(session, request.step)
            if session.over is not None:
                raise session.over
            committed = request.step < run.committed
        return sessions_pb2.CommitReply(committed=committed, missing=() if committed else _missing(run, request.step))

    @answers
    async def Close(self, request: sessions_pb2.CloseRequest, context: grpc.aio.ServicerContext) -> sessions_pb2.CloseReply:
        run, session = self._post.service.find_session(request.session)
        run.sessions.by_rank.pop(session.rank, None)
        session.end(NotFoundError(f"session {session.id!r} was closed"))
        return sessions_pb2.CloseReply()


def _awaited(run: JobRun, fleet: Fleet) -> str:
    """What a job that is not ready waits for."""
    if not fleet.members:
        return "no preprocessor is connected: start one with `headrace preprocessor --reorder HOST:PORT`"
    if run.manifest.vocabulary is None:
        return "the preprocessors list its shards"
    return f"the preprocessors count its shards, {run.manifest.num_counted} of {len(run.manifest.shards)} so far"


def _missing(run: JobRun, step: int) -> list[int]:
    """Some of the ranks that have not committed the step."""
    commits = run.steps[step].commits if step in run.steps else {}
    return list(itertools.islice((rank for rank in range(run.sessions.num_ranks) if rank not in commits), MISSING_RANKS))


def _plan_event(event: Step | Part | Ended, session: Session) -> sessions_pb2.PlanEvent:
    if isinstance(event, Step):
        return sessions_pb2.PlanEvent(plan=_rank_plan(event, session))
    if isinstance(event, Part):
        location = sessions_pb2.PartLocation(ticket=event.ticket, lease=event.lease, endpoint=event.endpoint)
        return sessions_pb2.PlanEvent(location=location)
    return sessions_pb2.PlanEvent(ended=sessions_pb2.JobEnded(message=event.message))


def _rank_plan(step: Step, session: Session) -> sessions_pb2.RankPlan:
    replicas = [replica for replica in range(len(step.sizes)) if session.serves(replica)]
    microbatches = [
        sessions_pb2.RankMicrobatch(
            replica=r,
            index=k,
            tickets=step.tickets.get((r, k), ()),
            num_samples=step.sizes[r][k],
            parts=_part_samples(step, r, k) if session.replicas else (),
            seconds=step.seconds[r][k],
        )
        for k in range(max((len(step.sizes[r]) for r in replicas), default=0))
        for r in replicas
        if k < len(step.sizes[r])
    ]
    plan_json = step.plan_json if session.replicas else ""
    return sessions_pb2.RankPlan(step=step.index, microbatches=microbatches, num_samples=len(step.probes), plan_json=plan_json)


def _part_samples(step: Step, replica: int, microbatch: int) -> list[sessions_pb2.PartSamples]:
    parts = [step.parts[ticket] for ticket in step.tickets.get((replica, microbatch), ())]
    return [sessions_pb2.PartSamples(sample_ids=[ref.sample_id for ref in part.samples]) for part in parts]
