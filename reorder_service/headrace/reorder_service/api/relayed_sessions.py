"""The sessions of one host's ranks over one stream, which the host's relay holds (headrace.trainer.loading.relay).

A message costs a gRPC server about the same whether it is for one rank or for eight. So the ranks of a host are told what there
is in one message, with the bytes that several of them share only once in it, and their commits are messages of the stream too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterable

import grpc

from headrace import message_codec
from headrace.errors import HeadraceError, UnavailableError, UserError, status_of
from headrace.reorder_service.api.open_session import open_session
from headrace.reorder_service.api.plan_events import compressed_plan_events, plan_events
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.planned_step import RankCommit
from headrace.reorder_service.jobs.sessions import EventBatch, Session
from headrace.reorder_service.service import FOR_RANKS, ReorderService
from headrace.v1 import sessions_pb2

COMMIT_PATIENCE_S = 4.0  # wait for the other ranks of a step, until a committing rank is told which are missing
MISSING_RANKS = 8  # most ranks that a reply names as missing from a step
COMPRESSED_BYTES = 4096  # of events, from which they are compressed: to some 40 % where tickets make most of them
# Between two messages to a host, as the places of a step's parts come in quick succession, and longer where very many hosts are
# told: so many of them in a second. Answers do not wait.
PAUSE_S, TOLD_PER_S = 0.03, 2_000.0


def rank_commit(request: sessions_pb2.CommitRequest) -> RankCommit:
    """Return what a commit says of its step. Raises UserError for a step that no job has."""
    if request.step < 0:
        raise UserError(f"step {request.step} cannot be committed: steps count from 0")
    return RankCommit(
        rejected=tuple(message_codec.rejection_value(item) for item in request.rejections),
        loss=request.loss,
        step_s=request.step_s,
        data_wait_s=request.data_wait_s,
        measured=tuple(map(message_codec.measured_value, request.measured)),
        content=request.content,
    )


def commit_reply(run: JobRun, step: int) -> sessions_pb2.CommitReply:
    """Return how far a step is committed: whether it is in the ledger, and which ranks are missing if it is not."""
    committed = step < run.cursor.committed
    return sessions_pb2.CommitReply(committed=committed, missing=() if committed else _missing(run, step))


def _missing(run: JobRun, step: int) -> list[int]:
    """Return the first MISSING_RANKS of the ranks that have not committed the step."""
    commits = run.cursor.steps[step].commits if step in run.cursor.steps else {}
    return list(itertools.islice((rank for rank in range(run.sessions.num_ranks) if rank not in commits), MISSING_RANKS))


class RelayedSessions:
    """The sessions that one stream serves. Use it in one event loop, and `close` it at the stream's end."""

    def __init__(self, service: ReorderService) -> None:
        self._service = service
        service.num_relays += 1
        self._sessions: dict[str, tuple[JobRun, Session]] = {}
        self._reply = sessions_pb2.RelayReply()
        self._waiting: dict[tuple[str, int], list[str]] = {}  # (job, step) -> sessions whose commits wait for those of others
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()  # there is something to say
        self._go_on = asyncio.Event()  # the pause after the last message is over, or something cannot wait for its end
        self._ended = False

    async def read(self, requests: AsyncIterator[sessions_pb2.RelayRequest]) -> None:
        """Handle the host's messages until its side of the stream ends."""
        try:
            async for request in requests:
                for session in request.listen:
                    self._listen(session)
                for session in request.leave:
                    self._leave(session)
                if request.opens:
                    await self._service.turns.turn(FOR_RANKS)
                for asked in request.opens:
                    self._do(self._open(asked))
                for commit in request.commits:
                    await self._commit(commit)
        finally:
            self._ended = True
            self._speak()

    async def replies(self) -> AsyncIterator[bytes]:
        """Yield serialized RelayReply messages whenever there is something to say, until the host's side has ended.

        Raises UnavailableError once this process leads no more, though it may stand by: the host has to find out who leads.
        """
        while not self._ended:
            if self._service.has_stopped:
                raise UnavailableError("this reorder service has stopped leading")
            self._wake.clear()
            self._go_on.clear()
            await self._service.turns.turn(FOR_RANKS)
            self._collect()
            if self._reply.ByteSize():
                reply, self._reply = self._reply, sessions_pb2.RelayReply()
                yield reply.SerializeToString()
                pause_s = max(PAUSE_S, self._service.num_relays / TOLD_PER_S)
                asyncio.get_running_loop().call_later(pause_s, self._go_on.set)
                await self._go_on.wait()
            else:
                await self._wake.wait()

    def close(self) -> None:
        """Note that the ranks read no more plans."""
        self._service.num_relays -= 1
        for task in self._tasks:
            task.cancel()
        for session in list(self._sessions):
            self._leave(session)

    async def _open(self, asked: sessions_pb2.RelayedOpenRequest) -> None:
        try:
            reply = await open_session(self._service, asked.request)
        except HeadraceError as err:
            self._reply.opened.add(call=asked.call, status=status_of(err).value[0], error=str(err))
        else:
            self._reply.opened.add(call=asked.call, reply=reply)
        self._speak()

    def _listen(self, name: str) -> None:
        try:
            run, session = self._service.find_session(name)
        except HeadraceError as err:
            self._end(name, err)
            return
        session.begin_streaming(self._wake)
        self._sessions[name] = run, session

    def _leave(self, name: str) -> None:
        if found := self._sessions.pop(name, None):
            run, session = found
            run.sessions.leave(session)

    def _end(self, name: str, error: HeadraceError | None) -> None:
        """Say that no plans follow for a session: the job has ended, or the session has with an error."""
        status = grpc.StatusCode.OK if error is None else status_of(error)
        self._reply.ends.add(session=name, status=status.value[0], error="" if error is None else str(error))
        self._reply.opens = self._reply.opens or not name
        self._speak()

    def _collect(self) -> None:
        """Move what the sessions are to be told into the reply: a batch of events once for all sessions that share it."""
        batches: list[tuple[EventBatch, Session, list[str]]] = []
        for name, (_, session) in list(self._sessions.items()):
            last = -1
            for batch in session.take_batches():  # no session may hear its batches in another order
                last = next((i for i in range(last + 1, len(batches)) if batches[i][0] is batch), len(batches))
                if last == len(batches):
                    batches.append((batch, session, []))
                batches[last][2].append(name)
            if session.over is not None or session.heard_all:
                self._end(name, session.over)
                self._leave(name)
        for batch, session, names in batches:
            if len(events := plan_events(batch, session)) < COMPRESSED_BYTES:
                self._reply.events.add(sessions=names, events=events)
            else:
                self._reply.events.add(sessions=names, events=compressed_plan_events(batch, session), compressed=True)

    async def _commit(self, request: sessions_pb2.CommitRequest) -> None:
        """Take a commit. It is answered once the step is in the ledger if the rank waits for that, otherwise at once."""
        try:
            run, session = self._service.find_session(request.session)
        except HeadraceError as err:
            self._answer([request.session], request.step, error=err)
            return
        if run.cursor.can_judge(session, request.step):
            await self._note(run, session, request)
        else:  # its plan is to come: other ranks' commits need not wait
            self._do(self._note(run, session, request))

    async def _note(self, run: JobRun, session: Session, request: sessions_pb2.CommitRequest) -> None:
        try:
            committed = await run.commit(session, request.step, rank_commit(request))
        except HeadraceError as err:
            self._answer([session.id], request.step, error=err)
            return
        if committed or not request.wait:
            self._answer([session.id], request.step, run=run)
            return
        waiting = self._waiting.setdefault((run.name, request.step), [])
        waiting.append(session.id)
        if len(waiting) == 1:
            self._do(self._answer_waiting(run, session, request.step))

    async def _answer_waiting(self, run: JobRun, session: Session, step: int) -> None:
        """Answer all commits of a step once it is in the ledger, or after COMMIT_PATIENCE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_PATIENCE_S):
                await run.cursor.committed_by_all(session, step)
        waiting = self._waiting.pop((run.name, step))
        if step < run.cursor.committed:
            self._answer(waiting, step, run=run)
            return
        for name in waiting:
            found = self._sessions.get(name)
            self._answer([name], step, run=run, error=found[1].over if found else None)

    def _answer(self, names: Iterable[str], step: int, *, run: JobRun | None = None, error: HeadraceError | None = None) -> None:
        answer = self._reply.commits.add(sessions=names, step=step)
        if error is not None:
            answer.status, answer.error = status_of(error).value[0], str(error)
        elif run is not None:
            answer.reply.CopyFrom(commit_reply(run, step))
        self._speak()

    def _speak(self) -> None:
        """Have `replies` send what there is without a pause."""
        self._wake.set()
        self._go_on.set()

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
