"""Payload through shared memory: clients ask for a part on a socket beside the arena, and are told its slot in the arena.

A request takes some 50 us this way, a fifth of a gRPC call. On each connection requests follow one another:

    client -> SlotRequest     4 bytes length, little-endian, then the message
    server -> SlotReply       4 bytes length, little-endian, then the message
    client -> 1 byte          the client has locked the slot, or does not want it: until then the server keeps it
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace.errors import UnavailableError
from headrace.ticket import part_of
from headrace.transport.base import SHARED_MEMORY, Delivery, Receiver, refusal_value
from headrace.transport.shared_memory import FOLDER, ArenaError, ArenaReader, socket_path
from headrace.v1 import payload_pb2

_LENGTH = struct.Struct("<I")
_TAKEN = b"\x01"
CONNECT_TIMEOUT_S = 5.0  # needed because an owner that hangs accepts no connection once its queue is full
MAX_REQUEST_BYTES = 64 << 10  # a ticket and a token fit easily; requests are buffered before either is checked
MAX_REPLY_BYTES = 64 << 20  # like rpc.MAX_MESSAGE_BYTES: a reply names every damaged sample of its part


class SlotReceiver(Receiver):
    """A receiver that fetches parts from one preprocessor's arena, with one connection per thread that asks at the same time."""

    def __init__(self, arena: str, folder: Path = FOLDER) -> None:
        """`arena`: its name. Raises ArenaError if the arena cannot be read here or its owner does not answer."""
        self._arena = ArenaReader(arena, folder)
        self._lock = threading.Lock()
        self._idle = [self._connect()]
        self._busy: set[socket.socket] = set()
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the arena."""
        return self._arena.name

    def fetch(self, ticket: str, timeout_s: float) -> Delivery | None:
        """Fetch a part as bytes, as `base.Receiver.fetch` says. The delivery's buffer is the arena's memory itself.

        None if the part does not lie in the arena. Raises ArenaError if the owner is gone.
        """
        connection = self._take_connection()
        try:
            connection.settimeout(timeout_s)
            _send(connection, payload_pb2.SlotRequest(ticket=ticket, arena_token=self._arena.token).SerializeToString())
            reply = payload_pb2.SlotReply.FromString(_receive(connection))
            try:
                return self._delivery(reply)
            finally:
                connection.sendall(_TAKEN)
                self._return_connection(connection)
        except OSError as err:
            self._discard(connection)
            if self._closed:
                raise UnavailableError(f"the arena {self.name} is closed") from err
            if isinstance(err, TimeoutError):
                raise UnavailableError(f"part {part_of(ticket)} did not come within {timeout_s:.0f} s") from err
            raise ArenaError(f"the owner of the arena {self.name} does not answer ({err.strerror or err})") from err

    def close(self) -> None:
        """Close all connections. Threads that wait for a part in `fetch` raise UnavailableError."""
        with self._lock:
            self._closed = True
            for connection in self._busy:
                connection.shutdown(socket.SHUT_RDWR)
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _delivery(self, reply: payload_pb2.SlotReply) -> Delivery | None:
        if reply.HasField("refusal"):
            raise refusal_value(reply.refusal)
        if not reply.HasField("offset"):
            return None
        buffer, release = self._arena.view(reply.offset, reply.header.num_bytes, reply.generation)
        return Delivery(header=reply.header, buffer=buffer, transport=SHARED_MEMORY, release=release)

    def _take_connection(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise UnavailableError(f"the arena {self.name} is closed")
            connection = self._idle.pop() if self._idle else self._connect()
            self._busy.add(connection)
            return connection

    def _return_connection(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed:
                self._busy.discard(connection)
                self._idle.append(connection)
                return
        self._discard(connection)

    def _discard(self, connection: socket.socket) -> None:
        with self._lock:
            self._busy.discard(connection)
            connection.close()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(str(socket_path(self._arena.path)))
        except OSError as err:
            connection.close()
            raise ArenaError(f"the owner of the arena {self.name} does not answer ({err.strerror})") from err
        return connection


class SlotServer:
    """The server of the socket beside an arena, which answers requests for slots. For use in one event loop."""

    def __init__(self, arena: Path, answer: Callable[[payload_pb2.SlotRequest, Reply], Awaitable[None]]) -> None:
        """`arena`: its path. `answer(request, reply)` must await `reply(message)`, which returns once the client has locked the
        slot or does not want it. If `answer` raises OSError, the connection ends.
        """
        self._path = socket_path(arena)
        self._answer = answer
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on the socket. Raises OSError if that is not possible."""
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def stop(self) -> None:
        """Stop listening and end all connections."""
        self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._converse(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def reply(message: payload_pb2.SlotReply) -> None:
            data = message.SerializeToString()
            writer.write(_LENGTH.pack(len(data)) + data)
            await reader.readexactly(len(_TAKEN))

        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if length > MAX_REQUEST_BYTES:
                    return
                await self._answer(payload_pb2.SlotRequest.FromString(await reader.readexactly(length)), reply)
        except (asyncio.IncompleteReadError, OSError):
            return  # the client went, which it may do at any time, or `answer` refused it
        finally:
            writer.close()


Reply = Callable[[payload_pb2.SlotReply], Awaitable[None]]


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def _receive(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if length > MAX_REPLY_BYTES:
        raise OSError(f"a message of {length} bytes")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = connection.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
    while len(data) < num_bytes:  # with a timeout on the socket, MSG_WAITALL may return less
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return data
