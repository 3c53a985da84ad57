"""A rank's session with the reorder service, and its connections to preprocessors."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from headrace import rpc
from headrace.codec import rejection_message, rejection_value, vocabulary_value
from headrace.errors import HeadraceError, NotFoundError, SupersededError, UnavailableError, UserError
from headrace.manifest import Vocabulary
from headrace.quarantine import Rejected
from headrace.spec import JobSpec, load_spec_json
from headrace.telemetry import pairs
from headrace.transport.base import GRPC, SHARED_MEMORY, TRANSPORTS, Delivery, checksum
from headrace.transport.chunks import ChunkReceiver
from headrace.transport.shared_memory import ArenaError
from headrace.transport.slots import SlotReceiver
from headrace.v1 import payload_pb2, payload_pb2_grpc, sessions_pb2, sessions_pb2_grpc

log = logging.getLogger(__name__)

_T = TypeVar("_T")

INDEXING_TIMEOUT_S = 3600.0  # how long `open` waits for a job whose shards are still being counted
RECONNECT_TIMEOUT_S = 60.0  # how long a trainer waits for a reorder service that went away
COMMIT_TIMEOUT_S = 600.0  # how long a commit waits for a lost service: its restart, and the planning of the window again
RETRY_S = 0.2  # pause before a service is asked again
FETCH_TIMEOUT_S = 120.0  # a part is waited for while it is decoded; a dead preprocessor is noticed by its connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A fetched part: one Arrow row a sample, and the samples that turned out to be damaged."""

    batch: pa.RecordBatch
    """Lies in `delivery`: not to be read after its release."""
    rejected: tuple[Rejected, ...]
    num_bytes: int
    delivery: Delivery


class SessionClient:
    """One rank's session. It opens again by itself when the reorder service was restarted. Thread-safe."""

    def __init__(self, endpoint: str, job: str, rank: int, num_ranks: int) -> None:
        self.endpoint = endpoint
        self.job = job
        self._rank = rank
        self._num_ranks = num_ranks
        self._channel = rpc.channel(endpoint)
        self._stub = sessions_pb2_grpc.SessionsStub(self._channel)
        self._lock = threading.Lock()  # of the session, while it is opened, and of the commits
        self._session = ""
        self._stream: Any = None
        self._closed = threading.Event()
        self._unsettled: dict[int, sessions_pb2.CommitRequest] = {}  # commits that wait for other ranks, at most a window

    def open(self, resume_step: int | None = None) -> tuple[JobSpec, Vocabulary, int, int]:
        """(spec, vocabulary, next step, generation). Raises UserError where endpoint, job or rank do not fit."""
        rpc.await_reorder_service(self.endpoint)
        with self._lock:
            reply = self._open(resume_step, INDEXING_TIMEOUT_S)
        return load_spec_json(reply.spec_json), vocabulary_value(reply.vocabulary), reply.next_step, reply.generation

    @property
    def session(self) -> str:
        """The present session's id."""
        return self._session

    def reopen(self, lost: str, timeout_s: float) -> None:
        """Open again after the session `lost` was, waiting up to `timeout_s`. Raises UnavailableError after that.

        Threads that lost the same session share one new one. Commits that other ranks had not completed are said again: a
        restarted service has forgotten them.
        """
        with self._lock:
            if self._session != lost:
                return
            self._settle(before=self._open(None, timeout_s).next_step)
            unsettled = list(self._unsettled.values())
        for request in unsettled:
            self._send_commit(request)

    def _open(self, resume_step: int | None, timeout_s: float) -> sessions_pb2.OpenReply:
        request = sessions_pb2.OpenRequest(job=self.job, rank=self._rank, num_ranks=self._num_ranks, resume_step=resume_step)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                reply: sessions_pb2.OpenReply = rpc.call(self._stub.Open, request, self.endpoint)
                break
            except UnavailableError as err:
                if time.monotonic() > deadline or self._closed.is_set():
                    raise
                log.info("waiting for job=%s: %s", self.job, err)
                self._closed.wait(RETRY_S)
        self._session = reply.session
        return reply

    def _call(self, method: Callable[..., _T], request: Any) -> _T:
        """A call in the present session. Raises SupersededError only where another process took over."""
        session = self._session
        message = type(request)(session=session)  # a copy: two threads may say the same request in different sessions
        message.MergeFrom(request)
        try:
            return rpc.call(method, message, self.endpoint)
        except SupersededError as err:
            raise self._replaced(session) or err from err
        except ValueError as err:  # gRPC's word for a call on a closed channel
            raise UnavailableError("the session is closed") from err

    def _replaced(self, session: str) -> UnavailableError | None:
        """The error that stands for a session which this client itself has replaced; None where it is the present one."""
        with self._lock:
            return UnavailableError("the session was opened again meanwhile") if self._session != session else None

    def events(self) -> Iterator[sessions_pb2.PlanEvent]:
        """Plans and places of parts until the job or the session ends. Raises as `headrace.errors.from_rpc`."""
        session = self._session
        try:
            with rpc.translated(self.endpoint):
                self._stream = self._stub.Plans(sessions_pb2.PlansRequest(session=session))
                yield from self._stream
        except SupersededError as err:
            raise self._replaced(session) or err from err
        except ValueError as err:
            raise UnavailableError("the session is closed") from err

    def report_lost(self, ticket: str, lease: str) -> None:
        """Ask for a part to be decoded elsewhere."""
        self._call(self._stub.ReportLost, sessions_pb2.ReportLostRequest(ticket=ticket, lease=lease))

    def commit(self, step: int, rejected: list[Rejected], loss: float, step_s: float, data_wait_s: float) -> bool:
        """Whether the step is committed by all ranks now."""
        request = sessions_pb2.CommitRequest(
            step=step,
            rejections=[rejection_message(item) for item in rejected],
            loss=loss,
            step_s=step_s,
            data_wait_s=data_wait_s,
        )
        with self._lock:
            self._unsettled[step] = request
        return self._send_commit(request)

    def _settle(self, before: int) -> None:
        """All ranks have committed the steps before that one. The caller holds the lock."""
        self._unsettled = {step: request for step, request in self._unsettled.items() if step >= before}

    def _send_commit(self, request: sessions_pb2.CommitRequest) -> bool:
        """Until it is answered: the service may be away, or still planning the step again."""
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        while True:
            session = self._session
            try:
                committed = bool(self._call(self._stub.Commit, request).committed)
            except (NotFoundError, UnavailableError) as err:
                if time.monotonic() > deadline or self._closed.is_set():
                    raise
                log.warning("commit of step=%d failed (%s); trying again", request.step, err)
                if isinstance(err, NotFoundError):
                    self.reopen(session, RECONNECT_TIMEOUT_S)
                self._closed.wait(RETRY_S)
                continue
            if committed:
                with self._lock:
                    self._settle(before=request.step + 1)
            return committed

    def close(self) -> None:
        """End the session. The job goes on with the next one."""
        self._closed.set()
        if self._stream is not None:
            self._stream.cancel()
        if self._session:
            try:
                rpc.call(self._stub.Close, sessions_pb2.CloseRequest(session=self._session), self.endpoint, timeout_s=1.0)
            except HeadraceError as err:  # the service notices the end of the stream anyhow
                log.debug("closing the session: %s", err)
        self._channel.close()


class PartClient:
    """Fetches parts from preprocessors, one connection each. Thread-safe."""

    def __init__(self, transports: Sequence[str] = TRANSPORTS) -> None:
        """Raises UserError where `transports` are not some of headrace.transport.base.TRANSPORTS."""
        if not transports or not set(transports) <= set(TRANSPORTS):
            raise UserError(f"transports {tuple(transports)!r} must be some of {', '.join(TRANSPORTS)}")
        self._transports = frozenset(transports)
        self._connections: dict[str, _Connection] = {}
        self._lock = threading.Lock()
        self.num_parts: Counter[str] = Counter()
        """Parts received, by transport."""

    def fetch(self, endpoint: str, ticket: str) -> Part:
        """The part, valid until its delivery is released.

        Raises NotFoundError where the preprocessor does not hold the part, UnavailableError where it is gone or the part came
        damaged, UserError where it has none of the transports.
        """
        with self._lock:
            connection = self._connections.get(endpoint)
            if connection is None:
                connection = self._connections[endpoint] = _Connection(endpoint, self._transports)
        try:
            delivery = connection.fetch(ticket)
        except UnavailableError:
            self._drop(connection)
            raise
        header = delivery.header
        if header.HasField("crc32") and header.crc32 != checksum(delivery.buffer):
            delivery.release()
            raise UnavailableError(f"part {ticket} of {endpoint} came damaged through {delivery.transport}: its checksum differs")
        with self._lock:
            self.num_parts[delivery.transport] += 1
        with pa.ipc.open_stream(delivery.buffer) as reader:
            batch = reader.read_next_batch()
        rejected = tuple(rejection_value(item) for item in header.rejections)
        return Part(batch=batch, rejected=rejected, num_bytes=header.num_bytes, delivery=delivery)

    def _drop(self, connection: _Connection) -> None:
        """Preprocessors come and go, each with a port of its own: keep no connection to those that went."""
        with self._lock:
            if self._connections.get(connection.endpoint) is connection:
                del self._connections[connection.endpoint]
        connection.close()

    def close(self) -> None:
        """Close all connections. What was delivered through shared memory is held until it is released."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()


class _Connection:
    """One preprocessor, and the best transport that it and this process have in common. Thread-safe."""

    def __init__(self, endpoint: str, transports: frozenset[str]) -> None:
        self.endpoint = endpoint
        self._transports = transports
        self._channel = rpc.channel(endpoint)
        self._stub = payload_pb2_grpc.PayloadStub(self._channel)
        self._chunks = ChunkReceiver(self._channel, endpoint)
        self._lock = threading.Lock()  # of both below
        self._slots: SlotReceiver | None = None
        self._arena: str | None = None  # that the preprocessor last named; None: it was not asked yet

    def fetch(self, ticket: str) -> Delivery:
        """Raises as PartClient.fetch, but does not look at the payload."""
        slots = self._open_slots()
        delivery = self._from_slot(slots, ticket) if slots is not None else None
        if delivery is None:
            delivery = self._chunks.fetch(ticket, FETCH_TIMEOUT_S)
            with self._lock:
                if delivery.header.arena != self._arena:  # another process has taken over the endpoint
                    self._choose(delivery.header.arena)
        return delivery

    def _open_slots(self) -> SlotReceiver | None:
        with self._lock:
            if self._arena is None:
                try:
                    self._choose(rpc.call(self._stub.Offer, payload_pb2.OfferRequest(), self.endpoint).arena)
                except ValueError as err:  # gRPC's word for a call on a closed channel: another thread found it broken
                    raise UnavailableError(f"the connection to {self.endpoint} was closed") from err
            return self._slots

    def _from_slot(self, slots: SlotReceiver, ticket: str) -> Delivery | None:
        try:
            return slots.fetch(ticket, FETCH_TIMEOUT_S)
        except ArenaError as err:  # its owner may have died, or been started anew: gRPC tells
            log.warning("shared memory is lost %s", pairs(endpoint=self.endpoint, reason=err))
            with self._lock:
                if self._slots is slots:
                    self._slots = None
            slots.close()
            return None

    def _choose(self, arena: str) -> None:
        """Choose the transport. Raises UserError where none of those asked for is possible. The caller holds the lock."""
        reason = ""
        if self._slots is not None:
            self._slots.close()
            self._slots = None
        if SHARED_MEMORY not in self._transports:
            reason = "as asked for"
        elif not arena:
            reason = "the preprocessor has no shared memory"
        else:
            try:
                self._slots = SlotReceiver(arena)
            except ArenaError as err:
                reason = str(err)
        transport = GRPC if reason else SHARED_MEMORY
        if transport not in self._transports:
            raise UserError(
                f"transport {SHARED_MEMORY} is asked for, but not possible with {self.endpoint}: {reason}; "
                f"share /dev/shm between preprocessor and trainer, or allow {GRPC}"
            )
        self._arena = arena
        log.info("receiving %s", pairs(endpoint=self.endpoint, transport=transport, **({"reason": reason} if reason else {})))

    def close(self) -> None:
        """End the calls that are open."""
        self._channel.close()
        with self._lock:
            if self._slots is not None:
                self._slots.close()
