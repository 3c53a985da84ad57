"""A gRPC call over the simulated network: both of its sides, and what is under way between them.

Handlers, interceptors, serializers and stubs are the real ones. A call has a status, a deadline and a cancellation; a stream of
replies waits while too much of it is under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata

from tests.simulation.network import Connection, Network, Stream
from tests.simulation.virtual_loop import Process

UNDER_WAY_BYTES = 1 << 16  # of a stream that is not delivered yet, before its sender waits: gRPC's flow control

Status = tuple[grpc.StatusCode, str]
_OK: Status = (grpc.StatusCode.OK, "")


class RpcError(AioRpcError):
    """A call's status that is not OK."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, Metadata(), Metadata(), details=details)


class AbortedError(Exception):
    """Raised by ServicerContext.abort."""


class Context:
    """grpc.aio.ServicerContext, of which handlers use `abort`, `invocation_metadata` and `peer`."""

    def __init__(self, call: Call) -> None:
        self.call = call

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self.call.end_at_server((code, details))
        raise AbortedError

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self.call._metadata or ())

    def peer(self) -> str:
        return "simulated"


class Details:
    def __init__(self, method: str, metadata: Any) -> None:
        self.method, self.invocation_metadata = method, tuple(metadata or ())


class Call:
    """One call over one connection: both of its sides, and what is under way between them."""

    def __init__(self, network: Network, connection: Connection, method: str, metadata: Any, ends_s: float | None = None) -> None:
        """`ends_s`: the call's deadline on the simulation's clock; None: it has none."""
        self._network = network
        self.connection = connection
        self._method = method
        self._metadata = metadata
        self._ends_s = ends_s
        self._up, self._down = Stream(), Stream()
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._handling: asyncio.Task[Any] | None = None
        self._is_over_at_server = False
        self._when_over: list[Callable[[], None]] = []
        self.replies: deque[bytes] = deque()
        self.status: Status | None = None
        """At the client; None while the call lasts."""
        self._news = asyncio.Event()
        self._under_way_bytes = 0
        self._room = asyncio.Event()
        connection.calls[self] = None

    # -- client side --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._to_server(self._begin_at_server)

    def send_request(self, message: bytes | None) -> None:
        """Send a message; None: there are no more."""
        self._to_server(lambda: self._requests.put_nowait(message))

    def cancel(self, status: Status = (grpc.StatusCode.CANCELLED, "Locally cancelled by application!")) -> None:
        if self.status is None:
            self._end_at_client(status)
            self._to_server(self._cancel_at_server)

    async def next_reply(self) -> bytes | None:
        """The next message; None at the end of an OK call. Raises RpcError."""
        while not self.replies:
            if self.status is not None:
                if self.status[0] is not grpc.StatusCode.OK:
                    raise RpcError(*self.status)
                return None
            self._news.clear()
            await self._news.wait()
        return self.replies.popleft()

    def _end_at_client(self, status: Status) -> None:
        if self.status is None:
            self.status = status
            self._news.set()
        if self._is_over_at_server:
            self.connection.calls.pop(self, None)

    def _hear(self, message: bytes) -> None:
        if self.status is None:
            self.replies.append(message)
            self._news.set()

    # -- both ---------------------------------------------------------------------------------------------------------

    def broken(self, side: Process) -> None:
        if side is self.connection.client:
            self._end_at_client((grpc.StatusCode.UNAVAILABLE, "the connection is broken"))
        if side is self.connection.server:  # as well, where a process calls itself
            self._cancel_at_server()

    def _to_server(self, act: Callable[[], None]) -> None:
        connection = self.connection

        def deliver() -> None:
            if connection.open_at[connection.server]:
                act()

        if connection.open_at[connection.client]:
            self._network.transmit(self._up, connection.client, connection.server, deliver)

    def _to_client(self, act: Callable[[], None]) -> None:
        connection = self.connection

        def deliver() -> None:
            if connection.open_at[connection.client]:
                act()

        if connection.open_at[connection.server]:
            self._network.transmit(self._down, connection.server, connection.client, deliver)

    # -- server side --------------------------------------------------------------------------------------------------

    def _begin_at_server(self) -> None:
        server = next((s for s in self._network.listeners.values() if s.process is self.connection.server), None)
        if server is None or server.is_closed:
            self.end_at_server((grpc.StatusCode.UNAVAILABLE, "the server does not listen"))
        else:
            self._handling = self.connection.server.spawn(self._handle(server))

    async def _handle(self, server: Any) -> None:
        try:
            handler = await server.handler(Details(self._method, self._metadata))
            if handler is None:
                self.end_at_server((grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
                return
            context = Context(self)
            requests = self._decoded(handler.request_deserializer)
            given = requests if handler.request_streaming else await anext(requests)
            if handler.response_streaming:
                async for reply in (handler.stream_stream or handler.unary_stream)(given, context):
                    await self._reply(handler.response_serializer(reply))
            else:
                reply = await (handler.stream_unary or handler.unary_unary)(given, context)
                await self._reply(handler.response_serializer(reply))
            self.end_at_server(_OK)
        except AbortedError:
            pass
        except Exception as err:
            server.errors.append(f"{self._method}: {type(err).__name__}: {err}")
            self.end_at_server((grpc.StatusCode.UNKNOWN, f"Unexpected {type(err)}: {err}"))
        finally:
            self._over_at_server()

    async def _decoded(self, decode: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        while (message := await self._requests.get()) is not None:
            yield decode(message) if decode is not None else message

    async def _reply(self, message: bytes) -> None:
        while self._under_way_bytes > UNDER_WAY_BYTES:
            self._room.clear()
            await self._room.wait()
        self._under_way_bytes += len(message)

        def deliver() -> None:
            self._hear(message)
            self._under_way_bytes -= len(message)
            self._room.set()

        self._to_client(deliver)
        await asyncio.sleep(self._network.latency_s() / 10)  # gRPC completes a write in a later turn of the loop

    def end_at_server(self, status: Status) -> None:
        if not self._is_over_at_server:
            self._over_at_server()
            self._to_client(lambda: self._end_at_client(status))

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None: the call has none."""
        return None if self._ends_s is None else max(0.0, self._ends_s - self.connection.server.loop.time())

    def when_over_at_server(self, act: Callable[[], None]) -> bool:
        """Call `act` when the call has ended at the server, in whatever way; return False, and do not, where it has already."""
        if not self._is_over_at_server:
            self._when_over.append(act)
        return not self._is_over_at_server

    def _over_at_server(self) -> None:
        self._is_over_at_server = True
        acts, self._when_over = self._when_over, []
        for act in acts:
            act()
        if self.status is not None:
            self.connection.calls.pop(self, None)

    def _cancel_at_server(self) -> None:
        if self._handling is not None and not self._is_over_at_server:
            self._handling.cancel()
