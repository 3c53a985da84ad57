"""The opening of a rank's session: what it waits for, and where the rank goes on."""

from __future__ import annotations

import asyncio

from headrace import message_codec
from headrace.errors import ConflictError
from headrace.plan import LLM
from headrace.reorder_service.fleet.fleet import Fleet
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.resuming import ResumeState
from headrace.reorder_service.jobs.stopping import to_its_end
from headrace.reorder_service.service import ReorderService
from headrace.v1 import sessions_pb2

PATIENCE_S = 2.0  # wait for a ready job and a vacant rank, until a client that retries is told what it waits for
VACANT_S = 7.0  # wait for a vacant rank where the client does not retry: longer than keepalive takes (headrace.rpc)


async def open_session(service: ReorderService, request: sessions_pb2.OpenRequest) -> sessions_pb2.OpenReply:
    """Open the session that a rank asks for, or say what it waits for.

    Raises the HeadraceError that refuses it.
    """
    run = await service.load(request.job)
    try:
        async with asyncio.timeout(PATIENCE_S if request.patient else None):
            await run.wait_ready()
    except TimeoutError:
        return sessions_pb2.OpenReply(waiting=_awaited(run, service.fleet))
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
    if vocabulary is None and not run.cursor.is_over:
        return sessions_pb2.OpenReply(waiting=_awaited(run, service.fleet))
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
        run.sessions.note_begun(session, begin, gave_state=bool(_states(request)))
    return sessions_pb2.OpenReply(
        session=session.id,
        generation=run.generation,
        next_step=run.cursor.committed,
        state=None if begin is None else _state_message(run.resuming.state_at(begin)),
        spec_json=run.planned_spec.to_peer_json(),
        vocabulary=message_codec.vocabulary_message(vocabulary),
    )


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
        return "no preprocessor is connected: start one with `headrace preprocessor --endpoint HOST:PORT`"
    if run.manifest.vocabulary is None:
        return "the preprocessors list its shards"
    return f"the preprocessors count its shards, {run.manifest.num_counted} of {len(run.manifest.shards)} so far"
