"""The relay's stream to the reorder service, which serves all sessions of its host."""

from __future__ import annotations

import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import grpc

from headrace.outbox import MAX_BATCH_BYTES
from headrace.v1 import sessions_pb2, sessions_pb2_grpc

_T = TypeVar("_T")

_STATUS = {status.value[0]: status for status in grpc.StatusCode}
_LOST = "the relay has lost its stream"


class RefusedError(Exception):
    """A call that the reorder service has refused, or that did not reach it."""

    def __init__(self, status: grpc.StatusCode, error: str) -> None:
        super().__init__(error)
        self.status, self.error = status, error


class NotRelayedError(Exception):
    """The reorder service is of an older release, which opens no sessions over a relay's stream."""


Tell = Callable[[bytes | RefusedError | None], None]
"""Called with each serialized PlanEvents that a session is told, and then with None, or with why it is told no more."""


class RelayStream:
    """One stream to the reorder service, for all sessions of the host, until it breaks. Thread-safe."""

    def __init__(self, stub: sessions_pb2_grpc.SessionsStub) -> None:
        self.is_over = False
        self._lock = threading.Lock()  # guards `is_over`, and all that wait for the stream
        self._plans: dict[str, Tell] = {}
        self._commits: dict[tuple[str, int], Future[sessions_pb2.CommitReply]] = {}
        self._opens: dict[int, Future[sessions_pb2.OpenReply]] = {}
        self._calls = itertools.count()
        self._opens_sessions = True
        self._requests = queue.SimpleQueue[sessions_pb2.RelayRequest | None]()
        replies = stub.Relay(self._merged())
        threading.Thread(target=self._read, args=(replies,), name="relay", daemon=True).start()

    def open(self, request: sessions_pb2.OpenRequest) -> Future[sessions_pb2.OpenReply]:
        """Have a session opened, and return a future of the answer, or of a `RefusedError` or `NotRelayedError`."""
        answer = Future[sessions_pb2.OpenReply]()
        with self._lock:
            if self.is_over:
                answer.set_exception(RefusedError(grpc.StatusCode.UNAVAILABLE, _LOST))
                return answer
            if not self._opens_sessions:
                answer.set_exception(NotRelayedError())
                return answer
            call = next(self._calls)
            self._opens[call] = answer
        asked = sessions_pb2.RelayRequest(opens=[sessions_pb2.RelayedOpenRequest(call=call, request=request)])
        if call == 0:
            asked.listen.append("")  # its end says whether the service opens sessions over the stream
        self._requests.put(asked)
        return answer

    def listen(self, session: str, put: Tell) -> None:
        """Have the session's plans sent, and passed to `put`."""
        with self._lock:
            if self.is_over:
                put(RefusedError(grpc.StatusCode.UNAVAILABLE, _LOST))
                return
            self._plans[session] = put
        self._requests.put(sessions_pb2.RelayRequest(listen=[session]))

    def leave(self, session: str) -> None:
        """Have the session told nothing more."""
        with self._lock:
            put = self._plans.pop(session, None)
        if put is not None:
            put(None)
            self._requests.put(sessions_pb2.RelayRequest(leave=[session]))

    def commit(self, request: sessions_pb2.CommitRequest) -> Future[sessions_pb2.CommitReply]:
        """Send a commit, and return a future of its answer, or of a `RefusedError`."""
        answer = Future[sessions_pb2.CommitReply]()
        with self._lock:
            if self.is_over:
                answer.set_exception(RefusedError(grpc.StatusCode.UNAVAILABLE, _LOST))
                return answer
            former = self._commits.get((request.session, request.step))
            self._commits[request.session, request.step] = answer
        if former is not None:
            former.set_exception(RefusedError(grpc.StatusCode.UNAVAILABLE, "the commit was sent again meanwhile"))
        self._requests.put(sessions_pb2.RelayRequest(commits=[request]))
        return answer

    def _merged(self) -> Iterator[sessions_pb2.RelayRequest]:
        """Yield what there is to send, in few messages of MAX_BATCH_BYTES at most, unless one request is larger."""
        held: sessions_pb2.RelayRequest | None = None
        while (request := held or self._requests.get()) is not None:
            held = None
            while held is None and not self._requests.empty():
                if (further := self._requests.get()) is None:
                    return
                if request.ByteSize() + further.ByteSize() > MAX_BATCH_BYTES:
                    held = further
                else:
                    request.MergeFrom(further)
            yield request

    def _read(self, replies: Iterator[sessions_pb2.RelayReply]) -> None:
        refused = RefusedError(grpc.StatusCode.UNAVAILABLE, _LOST)
        try:
            for reply in replies:
                self._hear(reply)
        except grpc.RpcError as err:
            refused = RefusedError(err.code(), err.details())
        finally:
            with self._lock:
                self.is_over = True
                plans, commits, opens = list(self._plans.values()), list(self._commits.values()), list(self._opens.values())
                self._plans.clear()
                self._commits.clear()
                self._opens.clear()
            self._requests.put(None)
            for put in plans:
                put(refused)
            for commit in commits:
                commit.set_exception(refused)
            for opening in opens:
                opening.set_exception(refused)

    def _hear(self, reply: sessions_pb2.RelayReply) -> None:
        for told in reply.events:
            events = zlib.decompress(told.events) if told.compressed else told.events
            for session in told.sessions:
                if put := self._plans.get(session):
                    put(events)
        for end in reply.ends:
            if not end.session and not reply.opens:
                self._open_no_more()
            with self._lock:
                ended = self._plans.pop(end.session, None)
            if ended is not None:
                ended(RefusedError(_STATUS[end.status], end.error) if end.status else None)
        for opened in reply.opened:
            with self._lock:
                opening = self._opens.pop(opened.call)
            _answer(opening, opened.reply, opened.status, opened.error)
        for answered in reply.commits:
            for session in answered.sessions:
                with self._lock:
                    answer = self._commits.pop((session, answered.step), None)
                if answer is not None:
                    _answer(answer, answered.reply, answered.status, answered.error)

    def _open_no_more(self) -> None:
        with self._lock:
            self._opens_sessions = False
            opens = list(self._opens.values())
            self._opens.clear()
        for answer in opens:
            answer.set_exception(NotRelayedError())


def _answer(call: Future[_T], reply: _T, status: int, error: str) -> None:
    """Set the answer to a call. `status`: a gRPC status code, with its `error` where it is not OK."""
    if status:
        call.set_exception(RefusedError(_STATUS[status], error))
    else:
        call.set_result(reply)
