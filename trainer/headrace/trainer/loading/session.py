"""A rank's session with the reorder service."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace import rpc
from headrace.errors import (
    ConflictError,
    HeadraceError,
    NotFoundError,
    SupersededError,
    UnavailableError,
    lost_commits,
)
from headrace.herd import retry_pause_s
from headrace.measured import MeasuredWork
from headrace.message_codec import measured_message, rejection_message
from headrace.quarantine import Rejected
from headrace.trainer.loading.loader_state import LoaderState, Opened
from headrace.trainer.loading.log_throttle import LogThrottle
from headrace.trainer.loading.relay import RelayPlace, is_relayed, num_callers
from headrace.trainer.rank_progress import PROGRESS
from headrace.v1 import sessions_pb2, sessions_pb2_grpc

log = logging.getLogger(__name__)

_T = TypeVar("_T")

INDEXING_TIMEOUT_S = 3600.0  # how long `open` waits for a job whose shards are still being indexed
AWAY_TIMEOUT_S = 600.0  # how long a trainer waits for a lost reorder service to restart and to plan its window again
MISSING_TIMEOUT_S = 3600.0  # how long a commit waits for those of other ranks, which may be saving or evaluating
OCCUPIED_TIMEOUT_S = 15.0  # how long `open` waits for another process connected as the same rank, which may be dead or hang
RETRY_S = 0.2  # pause before a request is repeated
REMIND_S = 30.0  # interval at which the reason for a wait is logged again


class SessionClient:
    """One rank's session with the reorder service. Thread-safe.

    Commits open the session again when the service was restarted; whoever reads `events` calls `reopen`.
    """

    def __init__(
        self,
        endpoint: str,
        job: str,
        rank: int,
        num_ranks: int,
        replicas: Sequence[int] = (),
        *,
        unit: str = "",
        shared_commit: bool = False,
        token: str | None = None,
        tls: str | Path | None = None,
    ) -> None:
        """`replicas`: those of `unit` whose samples a process of a pipeline takes, which gets whole plans; none: every
        `num_ranks`-th. `shared_commit`: the rank is one of several nodes of which one commits for all: it gets whole plans and
        all parts, and `num_ranks` does not matter. `token`, `tls`: as in `headrace.rpc.channel`; None: the environment's."""
        self._unit = unit
        self._replicas = replicas
        self._shared_commit = shared_commit
        self.endpoint, self._tls = endpoint, tls
        self.job = job
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_callers = num_callers(num_ranks)
        self._relay = RelayPlace(endpoint, token, tls) if is_relayed() else None
        self._channel = rpc.channel(endpoint, token=token, tls=tls)
        self._stub = sessions_pb2_grpc.SessionsStub(self._channel)
        self._lock = threading.Lock()  # guards the opening of the session, and the commits
        self._session = ""
        self._generation = 0
        self._stream: Any = None
        self._closed = threading.Event()
        self._durable = 0  # number of steps that the store is known to have
        self._lost: ConflictError | None = None  # the store has lost some of them: every further call raises this
        self._unsettled: dict[int, sessions_pb2.CommitRequest] = {}  # commits that other ranks lack, at most a window

    def open(self, states: Sequence[LoaderState]) -> Opened:
        """Open the session to go on from one of `states`, each of another step: from the newest one that all ranks have.

        Raises UserError where endpoint, job, rank or states do not fit.
        """
        rpc.await_reorder_service(self.endpoint, tls=self._tls)
        with self._lock:
            reply = self._open([state for state in states if state.step is not None], INDEXING_TIMEOUT_S)
            self._durable = reply.next_step
        return Opened.of(reply, self.job, states)

    @property
    def session(self) -> str:
        """Id of the present session; empty before the first one."""
        return self._session

    def reopen(self, lost: str, timeout_s: float) -> None:
        """Open a new session in place of the one with id `lost`, trying for `timeout_s`; then raises UnavailableError.

        Threads that lost the same session share one new session. Commits that other ranks had not completed are sent again, as
        a restarted service has forgotten them: until then the service may lose the new session as well, and another is opened.
        Raises ConflictError where the service's store has lost commits.
        """
        deadline = time.monotonic() + timeout_s
        while (unsettled := self._replace(lost, deadline - time.monotonic())) is not None:
            lost = self._session
            try:
                for request in unsettled:
                    self._answer_to(request, deadline)
                return
            except NotFoundError as err:
                if time.monotonic() > deadline or self._closed.is_set():
                    raise UnavailableError(
                        f"for {timeout_s:g} s {self.endpoint} knew none of the sessions that it opened for rank {self._rank} of "
                        f"job {self.job!r}: does it lead to several reorder services that do not share a store?"
                    ) from err
                self._pause(RETRY_S)

    def _replace(self, lost: str, timeout_s: float) -> list[sessions_pb2.CommitRequest] | None:
        """Open a session in place of `lost`, and return the commits to send in it; None where another thread has opened one.

        Raises as `_open`, and ConflictError where the service's store has lost commits.
        """
        with self._lock:
            if self._session != lost:
                return None
            self._pause(0.0)  # the other ranks have lost it at the same moment
            next_step = self._open((), timeout_s, self._generation).next_step
            if next_step < self._durable:
                self._lost = ConflictError(lost_commits(self.job, self._durable, next_step))
                raise self._lost
            self._settle(before=next_step)
            return list(self._unsettled.values())

    def _open(self, states: Sequence[LoaderState], timeout_s: float, generation: int | None = None) -> sessions_pb2.OpenReply:
        """Open a session, waiting up to `timeout_s`. `generation`: that of the session which the new one continues.

        Raises SupersededError where that generation is over, ConflictError where another process stays connected as the rank,
        and UnavailableError after `timeout_s`.
        """
        request = sessions_pb2.OpenRequest(
            job=self.job,
            rank=self._rank,
            num_ranks=self._num_ranks,
            resume_step=states[0].step if len(states) == 1 else None,  # for services of release 0.1
            states=[state.message() for state in states],
            generation=generation,
            unit=self._unit,
            replicas=self._replicas,
            together=self._shared_commit,
            patient=True,
            continues=self._session,
        )
        deadline = time.monotonic() + timeout_s
        occupied_s: float | None = None  # since when another process is connected as the rank
        throttle = LogThrottle(REMIND_S)
        while True:
            try:
                self._go_by_relay()
                reply: sessions_pb2.OpenReply = rpc.call(self._stub.Open, request, self.endpoint)
                if not reply.waiting:
                    break
                if not reply.occupied:
                    raise UnavailableError(f"job {self.job!r} has not begun: {reply.waiting}")
                occupied_s = occupied_s or time.monotonic()
                if time.monotonic() > occupied_s + OCCUPIED_TIMEOUT_S:
                    raise ConflictError(reply.waiting)
                raise UnavailableError(reply.waiting)
            except UnavailableError as err:
                if time.monotonic() > deadline or self._closed.is_set():
                    raise
                if throttle.is_due(str(err), time.monotonic()):
                    log.info("waiting for job=%s: %s", self.job, err)
                PROGRESS.move()
                self._pause(RETRY_S)
        self._session, self._generation = reply.session, reply.generation
        return reply

    def _pause(self, pause_s: float) -> None:
        """Wait for `pause_s`, and longer where many hosts or ranks may do the same at the same moment."""
        self._closed.wait(retry_pause_s(pause_s, self._num_callers, random.random()))

    def _go_by_relay(self) -> None:
        """Have the next session go by the host's relay, if the ranks of this host have one and it answers."""
        if self._relay is not None:
            channel = self._relay.channel if self._relay.is_answering() else self._channel
            self._stub = sessions_pb2_grpc.SessionsStub(channel)

    def _call(self, method: Callable[..., _T], request: Any) -> _T:
        """Send a request in the present session. Raises SupersededError only where another process has taken over the rank."""
        if self._lost is not None:
            raise self._lost
        session = self._session
        message = type(request)(session=session)  # a copy: two threads may send the same request in different sessions
        message.MergeFrom(request)
        try:
            return rpc.call(method, message, self.endpoint)
        except SupersededError as err:
            raise self._error_if_replaced(session) or err from err
        except ValueError as err:  # gRPC raises it for a call on a closed channel
            raise UnavailableError("the session is closed") from err

    def _error_if_replaced(self, session: str) -> UnavailableError | None:
        """Return an UnavailableError if this client itself has replaced the session; None if it is the present one."""
        with self._lock:
            return UnavailableError("the session was opened again meanwhile") if self._session != session else None

    def events(self) -> Iterator[sessions_pb2.PlanEvent]:
        """Yield plans and locations of parts until the job or the session ends. Raises as `headrace.errors.from_rpc`."""
        session = self._session
        try:
            with rpc.translated(self.endpoint):
                self._stream = self._stub.Plans(sessions_pb2.PlansRequest(session=session))
                for message in self._stream:
                    yield from message.events
        except SupersededError as err:
            raise self._error_if_replaced(session) or err from err
        except ValueError as err:
            raise UnavailableError("the session is closed") from err

    def report_lost(self, ticket: str, lease: str) -> None:
        """Report that a part cannot be had under `lease`, so that it is decoded elsewhere."""
        self._call(self._stub.ReportLost, sessions_pb2.ReportLostRequest(ticket=ticket, lease=lease))

    def commit(
        self,
        step: int,
        rejected: Sequence[Rejected],
        loss: float,
        step_s: float,
        data_wait_s: float,
        *,
        content: int = 0,
        measured: Sequence[MeasuredWork] = (),
        wait: bool = False,
    ) -> bool:
        """Commit a step, and return whether all ranks have now and it is in the ledger. `wait`: wait until that is so.

        `content`: `RankPlan.content` of the step.
        """
        request = sessions_pb2.CommitRequest(
            step=step,
            rejections=[rejection_message(item) for item in rejected],
            loss=loss,
            step_s=step_s,
            data_wait_s=data_wait_s,
            content=content,
            measured=map(measured_message, measured),
        )
        with self._lock:
            self._unsettled[step] = request
        return self._send_commit(request, wait=wait)

    def _settle(self, before: int) -> None:
        """Note that all ranks have committed the steps below `before`. The caller holds the lock."""
        self._durable = max(self._durable, before)
        self._unsettled = {step: request for step, request in self._unsettled.items() if step >= before}

    def _send_commit(self, request: sessions_pb2.CommitRequest, *, wait: bool) -> bool:
        """Send a commit until it is answered: the service may be away, or still be planning the step again.

        Returns whether all ranks have committed the step; `wait`: wait until they have. Raises UnavailableError where the
        service is away, or other ranks are missing, for too long.
        """
        asked = sessions_pb2.CommitRequest(wait=wait)
        asked.MergeFrom(request)
        missed_s = time.monotonic() + MISSING_TIMEOUT_S
        throttle = LogThrottle(REMIND_S)
        while True:
            session = self._session
            try:
                reply = self._answer_to(asked, time.monotonic() + AWAY_TIMEOUT_S)
            except NotFoundError as err:
                if time.monotonic() > missed_s or self._closed.is_set():
                    raise
                log.warning("commit of step=%d failed (%s); opening a new session", request.step, err)
                self.reopen(session, AWAY_TIMEOUT_S)
                self._pause(RETRY_S)
                continue
            if reply.committed or not wait:
                return bool(reply.committed)
            words = f"job={self.job} step={request.step} missing={','.join(map(str, reply.missing))}"
            if time.monotonic() > missed_s or self._closed.is_set():
                raise UnavailableError(f"other ranks have not committed the step: {words}")
            if throttle.is_due(words, time.monotonic()):
                log.info("waiting for other ranks to commit %s", words)
            self._pause(RETRY_S)

    def _answer_to(self, request: sessions_pb2.CommitRequest, deadline: float) -> sessions_pb2.CommitReply:
        """Return the service's answer to a commit; where the service is away, send it again until `deadline` (monotonic clock).

        Raises NotFoundError where the service does not know the session.
        """
        while True:
            try:
                reply: sessions_pb2.CommitReply = self._call(self._stub.Commit, request)
            except UnavailableError as err:
                if time.monotonic() > deadline or self._closed.is_set():
                    raise
                log.warning("commit of step=%d failed (%s); trying again", request.step, err)
                PROGRESS.move()  # the service is away, no rank hangs
                self._pause(RETRY_S)
                continue
            if reply.committed:
                with self._lock:
                    self._settle(before=request.step + 1)
            return reply

    def leave(self) -> None:
        """End the session. The client stays usable: `open` begins another one."""
        if self._stream is not None:
            self._stream.cancel()
        if self._session:
            try:
                rpc.call(self._stub.Close, sessions_pb2.CloseRequest(session=self._session), self.endpoint, timeout_s=1.0)
            except HeadraceError as err:  # the service notices the end of the stream anyhow
                log.debug("closing the session: %s", err)

    def close(self) -> None:
        """End the session for good, and close the connection to the service."""
        self._closed.set()
        self.leave()
        self._channel.close()
        if self._relay is not None:
            self._relay.channel.close()
