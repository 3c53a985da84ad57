"""Payload through UCX, the producer's end: a port where ranks ask for parts (`headrace.transport.ucx` is their end).

The part is sent from where it lies. The arena is one mapping that lasts as long as the process, so an adapter knows it after the
first parts, and nothing is registered again.
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
SEND_TIMEOUT_S = 120.0  # a rank that stops in the middle of a part holds it in the store for so long
MAX_ASKED = 256  # parts that one rank waits for at a time; it has some dozen threads
_MAX_QUESTION_BYTES = 1 << 20
_WHOLE_SHARE = 0.5  # of a part's bytes: where so many are asked for, the part is sent as it lies, and less is copied out first


@dataclass(slots=True, kw_only=True, eq=False)
class _Asked:
    """One part that one rank waits for."""

    connection: Connection
    number: int
    task: asyncio.Task[None] | None = None
    is_sending: bool = False
    is_answered: bool = False


class UcxServer:
    """Sends the parts that an event loop lends to ranks, on a port of its own. UCX runs on a thread beside that loop."""

    def __init__(self, lend: Lend, *, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._lend = lend
        self._send_timeout_s = send_timeout_s
        self.token = secrets.token_bytes(TOKEN_BYTES)
        """Shown to who connects, who was told it by gRPC."""
        self.port = 0
        """On all of this host's addresses, once it is started."""
        self._asked: dict[tuple[Connection, int], _Asked] = {}
        self._numbers = numbers()
        self._listener: Any = None  # on UCX's thread

    @property
    def num_asked(self) -> int:
        """Parts that ranks wait for, or that are being sent, now."""
        return len(self._asked)

    async def start(self) -> None:
        """Listen. Raises UcxError where that is not possible."""
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
        """End all connections."""
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
        """Called by UCX, in the midst of its work: the connection begins when that is over."""

        def begin() -> bool:
            connection = Connection(self._ucx, endpoint, self._on_lost)
            number = next(self._numbers)
            connection.greet(HELLO.pack(VERSION, self.token, number))
            self._listen_to(connection, number)
            return True

        self._ucx.until(begin)

    def _listen_to(self, connection: Connection, number: int) -> None:
        """Take the next question, and then the one after it."""
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
        asked.task.add_done_callback(lambda _: self._forget(asked))  # not in the task: one that is cancelled at once never runs

    def _forget(self, asked: _Asked) -> None:
        self._refuse(asked, UnavailableError("the preprocessor gave the part up"))
        del self._asked[asked.connection, asked.number]

    def _give_up(self, connection: Connection, number: int) -> None:
        asked = self._asked.get((connection, number))
        if asked is not None and asked.task is not None and not asked.is_sending:
            asked.task.cancel()

    def _end(self, connection: Connection) -> None:
        """Whoever is sending notices by itself, when UCX has done with the part."""
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
        """Unless there is an answer already."""
        if asked.is_answered:
            return
        asked.is_answered = True
        reply = REPLY_HEAD.pack(Kind.REFUSED) + refusal_message(error).SerializeToString()
        self._on_ucx(lambda: asked.connection.send(Role.REPLY, asked.number, reply))

    async def _send(self, asked: _Asked, loan: Loan) -> None:
        """Returns when UCX has done with the memory. Raises UcxError where the rank is gone, or does not take it in time."""
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
            if not sent.done():  # too late, or cancelled
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
    """What to send of a part: itself, or a copy of the columns asked for. Raises NotFoundError where the part is damaged."""
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
