"""Payload through UCX, the preprocessor's end: a port on which ranks ask for parts (`headrace.transport.ucx` is the rank's end).

A part is sent straight from the arena. That is one mapping that lasts as long as the process, so it is registered with an adapter
after the first parts and never again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from headrace.errors import HeadraceError, NotFoundError, UnavailableError
from headrace.observability.logs import pairs
from headrace.transport.base import UCX, checksum, read_batches, refusal_message
from headrace.transport.flight_server import Lend, Loan
from headrace.transport.ucx import VERSION
from headrace.transport.ucx_connection import HELLO, NUMBER_BITS, QUESTION_HEAD, REPLY_HEAD, Connection, Kind, Role, numbers
from headrace.transport.ucx_library import UcxError
from headrace.transport.ucx_loop import UcxLoop
from headrace.v1 import payload_pb2

log = logging.getLogger(__name__)

TOKEN_BYTES = 16
SEND_TIMEOUT_S = 120.0  # how long a rank that stops in the middle of a part can hold it in the store
MAX_ASKED = 256  # parts that one rank may wait for at a time; it has some dozen threads
_MAX_QUESTION_BYTES = 1 << 20
_WHOLE_SHARE = 0.5  # columns with at least this share of a part's bytes are sent with the whole part, fewer are copied out first


@dataclass(slots=True, kw_only=True, eq=False)
class _Asked:
    """A rank's question for one part, from its arrival until the part is sent or refused."""

    connection: Connection
    number: int
    task: asyncio.Task[None] | None = None
    is_sending: bool = False
    is_answered: bool = False


class UcxServer:
    """A UCX server that sends to ranks the parts which an event loop lends. UCX runs on a thread of its own beside that loop."""

    def __init__(self, lend: Lend, *, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._lend = lend
        self._send_timeout_s = send_timeout_s
        self.token = secrets.token_bytes(TOKEN_BYTES)
        """Random token that the server shows to whoever connects; ranks know it from gRPC, and so recognise the server."""
        self.port = 0
        """The port on which it listens, on all addresses of this host; 0 until it is started."""
        self._asked: dict[tuple[Connection, int], _Asked] = {}
        self._numbers = numbers()
        self._listener: Any = None  # on UCX's thread

    @property
    def num_asked(self) -> int:
        """Number of parts that ranks wait for or that are being sent now."""
        return len(self._asked)

    async def start(self) -> None:
        """Listen on a free port. Raises UcxError if that is not possible."""
        self._loop = asyncio.get_running_loop()
        self._ucx = await asyncio.to_thread(UcxLoop, "ucx-server")
        listening: Future[int] = Future()
        self._ucx.call(lambda: self._listen(listening))
        try:
            self.port = await asyncio.wrap_future(listening)
        except UcxError:
            await asyncio.to_thread(self._ucx.close)
            raise
        log.info("listening %s", pairs(transport=UCX, port=self.port))

    async def stop(self) -> None:
        """End all connections and stop listening."""
        await asyncio.to_thread(self._ucx.close)
        tasks = [asked.task for asked in self._asked.values() if asked.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- on UCX's thread --------------------------------------------------------------------------------------------------

    def _listen(self, listening: Future[int]) -> None:
        library = self._ucx.library
        try:
            self._listener = library.api.UCXListener.create(self._ucx.worker, 0, self._accept, deliver_endpoint=True)
        except library.error as err:
            listening.set_exception(UcxError(f"UCX cannot listen here ({err})"))
            return
        self._ucx.at_close.add(self._stop_listening)
        listening.set_result(self._listener.port)

    def _stop_listening(self) -> None:
        self._listener = None

    def _accept(self, endpoint: Any) -> None:
        """Accept a connection. UCX calls this while it makes progress, so the connection begins only afterwards."""

        def begin() -> bool:
            connection = Connection(self._ucx, endpoint, self._on_lost)
            number = next(self._numbers)
            connection.greet(HELLO.pack(VERSION, self.token, number))
            self._listen_to(connection, number)
            return True

        self._ucx.until(begin)

    def _listen_to(self, connection: Connection, number: int) -> None:
        """Receive all questions of a connection, one after the other."""
        question = bytearray()

        def room(num_bytes: int) -> bytearray:
            if num_bytes > _MAX_QUESTION_BYTES:
                raise UcxError(f"a question has {num_bytes} bytes")
            question.extend(bytes(num_bytes))
            return question

        def done(error: UcxError | None) -> None:
            if error is None:
                self._on_question(connection, bytes(question))
                self._listen_to(connection, number)

        connection.receive(Role.QUESTION, number, room, done)

    def _on_question(self, connection: Connection, question: bytes) -> None:
        try:
            if len(question) < QUESTION_HEAD.size:
                raise DecodeError
            kind, number = QUESTION_HEAD.unpack_from(question)
            request = payload_pb2.FetchRequest.FromString(question[QUESTION_HEAD.size :])
            if kind not in (Kind.ASK, Kind.GIVE_UP) or number.bit_length() > NUMBER_BITS:
                raise DecodeError
        except DecodeError:
            connection.close(f"{len(question)} bytes are no question")
            return
        if kind == Kind.ASK:
            self._loop.call_soon_threadsafe(self._begin, _Asked(connection=connection, number=number), request)
        else:
            self._loop.call_soon_threadsafe(self._give_up, connection, number)

    def _on_lost(self, connection: Connection) -> None:
        log.debug("disconnected %s", pairs(transport=UCX, reason=connection.lost))
        self._loop.call_soon_threadsafe(self._end, connection)

    # -- on the event loop ------------------------------------------------------------------------------------------------

    def _begin(self, asked: _Asked, request: payload_pb2.FetchRequest) -> None:
        num_asked = sum(1 for connection, _ in self._asked if connection is asked.connection)
        key = (asked.connection, asked.number)
        if num_asked >= MAX_ASKED or key in self._asked:
            self._close(asked.connection, f"more than {MAX_ASKED} parts are asked for at a time, or one of them twice")
            return
        self._asked[key] = asked
        asked.task = asyncio.create_task(self._converse(asked, request))
        asked.task.add_done_callback(lambda _: self._forget(asked))  # a task cancelled at once never runs its code

    def _forget(self, asked: _Asked) -> None:
        self._refuse(asked, UnavailableError("the preprocessor gave the part up"))
        del self._asked[asked.connection, asked.number]

    def _give_up(self, connection: Connection, number: int) -> None:
        asked = self._asked.get((connection, number))
        if asked is not None and asked.task is not None and not asked.is_sending:
            asked.task.cancel()

    def _end(self, connection: Connection) -> None:
        """Give up the questions of a lost connection. One whose part is being sent ends by itself, when UCX is done with it."""
        for asked in list(self._asked.values()):
            if asked.connection is connection:
                self._give_up(connection, asked.number)

    async def _converse(self, asked: _Asked, request: payload_pb2.FetchRequest) -> None:
        try:
            async with self._lend(request) as loan:
                if request.columns:
                    loan = await asyncio.to_thread(_selected, loan, tuple(request.columns))
                await self._send(asked, loan)
        except HeadraceError as err:
            self._refuse(asked, err)

    def _refuse(self, asked: _Asked, error: HeadraceError) -> None:
        """Answer a question with an error, unless it is answered already."""
        if asked.is_answered:
            return
        asked.is_answered = True
        reply = REPLY_HEAD.pack(Kind.REFUSED) + refusal_message(error).SerializeToString()
        self._on_ucx(lambda: asked.connection.send(Role.REPLY, asked.number, reply))

    async def _send(self, asked: _Asked, loan: Loan) -> None:
        """Send a part, and return when UCX is done with its memory. Raises UcxError if the rank is gone or does not take it in
        time."""
        sent: asyncio.Future[UcxError | None] = self._loop.create_future()
        reply = REPLY_HEAD.pack(Kind.PART) + loan.header.SerializeToString()

        def done(error: UcxError | None) -> None:
            self._loop.call_soon_threadsafe(sent.set_result, error)

        def post() -> None:
            asked.connection.send(Role.REPLY, asked.number, reply)
            asked.connection.send(Role.PAYLOAD, asked.number, memoryview(loan.data), done)

        self._ucx.call(post)
        asked.is_sending = asked.is_answered = True
        try:
            await asyncio.wait([sent], timeout=self._send_timeout_s)
        finally:
            if not sent.done():  # the timeout passed, or this task was cancelled
                self._close(asked.connection, "a part was not taken in time")
                await asyncio.wait([sent])
        if (error := sent.result()) is not None:
            raise error

    def _close(self, connection: Connection, reason: str) -> None:
        self._on_ucx(lambda: connection.close(reason))

    def _on_ucx(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(UcxError):  # it is closed, and all connections with it
            self._ucx.call(function)


def _selected(loan: Loan, columns: tuple[str, ...]) -> Loan:
    """Return what to send of a part: all of it, or a copy of the columns asked for. Raises NotFoundError if it is damaged."""
    batches = read_batches(loan.data, columns)
    if sum(batch.nbytes for batch in batches) >= _WHOLE_SHARE * loan.data.size:
        return loan
    header = payload_pb2.PartHeader()
    header.CopyFrom(loan.header)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data = sink.getvalue()
    if header.HasField("crc32"):
        if header.crc32 != checksum(loan.data):
            raise NotFoundError("the part is damaged where it is held: its checksum differs")
        header.crc32 = checksum(data)
    return Loan(header=header, data=data)
