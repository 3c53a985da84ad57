"""Channels over the simulated network, with the surface of grpc.aio and of blocking gRPC that Headrace uses.

A channel to several endpoints takes those that report SERVING, in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from grpc.aio import EOF

from tests.simulation.fibers import in_fiber, wait_for
from tests.simulation.network import Connection, Network
from tests.simulation.simulated_call import Call, RpcError
from tests.simulation.virtual_loop import PROCESS

_RETRIES, _BACKOFF_S, _MOST_BACKOFF_S = 4, 0.05, 1.0  # as the service config of headrace.rpc asks for unary calls
_JITTER = (0.8, 1.2)  # gRPC's, of every backoff
_JOBS = "headrace.v1.Jobs"


class SimulatedChannel:
    """What `grpc.aio.insecure_channel` returns. `target`: endpoints, of which several are asked for their health."""

    def __init__(self, network: Network, target: str) -> None:
        process = PROCESS.get()
        assert process is not None
        self._process = process
        self._network = network
        self._endpoints = target.partition(":")[2].split(",") if target.startswith("ipv") else target.split(",")
        self._connections: dict[str, Connection] = {}
        self._turn = 0
        self._calls: list[Call] = []

    async def __aenter__(self) -> SimulatedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()
        for connection in self._connections.values():
            self._network.break_connection(connection, self._process)

    async def _connected(self, endpoint: str) -> Connection | None:
        """The connection to an endpoint, made if there is none; None where nobody answers."""
        connection = self._connections.get(endpoint)
        if connection is not None and connection.open_at[self._process]:
            return connection
        await asyncio.sleep(2 * self._network.latency_s())
        server = self._network.listeners.get(endpoint)
        if (
            server is None
            or server.is_closed
            or server.process.is_paused
            or self._network.is_silent(self._process, server.process)
        ):
            return None
        self._connections[endpoint] = self._network.connect(self._process, server.process)
        return self._connections[endpoint]

    def _serves(self, endpoint: str, connection: Connection) -> bool:
        """Whether the client believes that the endpoint serves. It hears of changes while the wire carries."""
        server = self._network.listeners.get(endpoint)
        is_cut_off = self._network.is_silent(self._process, connection.server) or connection.server.is_paused
        if server is not None and server.process is connection.server and not is_cut_off:
            connection.believed[_JOBS] = server.serves(_JOBS)
        return connection.believed.get(_JOBS, False)

    async def is_reached(self, endpoint: str) -> bool:
        """Whether there is a connection to an endpoint, after trying to make one."""
        return await self._connected(endpoint) is not None

    async def call(self, method: str, metadata: Any, ends_s: float | None = None) -> Call:
        """Begin a call with whoever serves. Raises RpcError where nobody does."""
        self._turn += 1
        for number in range(len(self._endpoints)):
            endpoint = self._endpoints[(self._turn + number) % len(self._endpoints)]
            connection = await self._connected(endpoint)
            if connection is not None and (len(self._endpoints) == 1 or self._serves(endpoint, connection)):
                call = Call(self._network, connection, method, metadata, ends_s)
                self._calls = [*(one for one in self._calls if one.status is None), call]
                call.begin()
                return call
        raise RpcError(grpc.StatusCode.UNAVAILABLE, f"nobody serves at {','.join(self._endpoints)}")

    async def ask(self, method: str, request: bytes, timeout_s: float | None, metadata: Any = ()) -> bytes:
        """One unary call, tried again while nobody serves. Raises RpcError."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + (timeout_s if timeout_s is not None else 1e9)
        backoff_s = _BACKOFF_S
        for attempt in range(_RETRIES + 1):
            call: Call | None = None
            try:
                async with asyncio.timeout_at(ends_s):
                    call = await self.call(method, metadata, ends_s)
                    call.send_request(request)
                    call.send_request(None)
                    reply = await call.next_reply()
                assert reply is not None, "a unary call that is OK has a reply"
                return reply
            except TimeoutError:
                raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            except RpcError as err:
                if err.code() is not grpc.StatusCode.UNAVAILABLE or attempt == _RETRIES or loop.time() + backoff_s > ends_s:
                    raise
            finally:
                if call is not None:
                    call.cancel()
            await asyncio.sleep(backoff_s * self._network.random.uniform(*_JITTER))
            backoff_s = min(2 * backoff_s, _MOST_BACKOFF_S)
        raise AssertionError("not reached")

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        async def ask(request: Any, *, metadata: Any = (), **options: Any) -> Any:
            return response_deserializer(await self.ask(method, request_serializer(request), options.get("timeout"), metadata))

        return ask

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def ask(request: Any, *, timeout: float | None = None, metadata: Any = ()) -> StreamCall:
            stream = StreamCall(self, method, request_serializer, response_deserializer, metadata)
            stream.first = request
            return stream

        return ask

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def ask(*, timeout: float | None = None, metadata: Any = ()) -> StreamCall:
            return StreamCall(self, method, request_serializer, response_deserializer, metadata)

        return ask

    stream_unary = stream_stream


class StreamCall:
    """A call with a stream of replies, as grpc.aio returns it."""

    def __init__(self, channel: SimulatedChannel, method: str, encode: Any, decode: Any, metadata: Any) -> None:
        self._channel, self._method, self._metadata = channel, method, metadata
        self._encode, self._decode = encode, decode
        self._call: Call | None = None
        self._beginning = asyncio.Lock()
        self._failed: RpcError | None = None
        self._is_cancelled = False
        self.first: Any = None
        """The one request of a call that has one."""

    async def _begun(self) -> Call:
        async with self._beginning:
            if self._failed is not None:
                raise self._failed
            if self._call is None:
                try:
                    self._call = await self._channel.call(self._method, self._metadata)
                except RpcError as err:
                    self._failed = err
                    raise
                if self.first is not None:
                    self._call.send_request(self._encode(self.first))
                    self._call.send_request(None)
                if self._is_cancelled:
                    self._call.cancel()
        return self._call

    async def write(self, message: Any) -> None:
        call = await self._begun()
        if call.status is not None:
            raise asyncio.InvalidStateError("RPC is done.")
        call.send_request(self._encode(message))

    async def done_writing(self) -> None:
        (await self._begun()).send_request(None)

    async def read(self) -> Any:
        reply = await (await self._begun()).next_reply()
        return EOF if reply is None else self._decode(reply)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        call = await self._begun()
        try:
            while (reply := await call.next_reply()) is not None:
                yield self._decode(reply)
        finally:
            call.cancel()


class BlockingChannel:
    """A channel for code that blocks, in fibers."""

    def __init__(self, channel: SimulatedChannel) -> None:
        self._channel = channel

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        ask = self._channel.unary_unary(*args, **options)
        return lambda request, **how: wait_for(ask(request, **how))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        ask = self._channel.unary_stream(*args, **options)
        return lambda request, **how: BlockingStream(ask(request, **how))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        ask = self._channel.stream_stream(*args, **options)

        def call(requests: Iterator[Any], **how: Any) -> BlockingStream:
            stream, process = ask(**how), PROCESS.get()
            assert process is not None
            process.spawn(in_fiber(_send_all, stream, requests))
            return BlockingStream(stream)

        return call

    def stream_unary(self, *_: Any, **__: Any) -> None:
        """No client that blocks uses such a method; stubs only ask for it."""

    def close(self) -> None:
        wait_for(self._channel.close())

    def __enter__(self) -> BlockingChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send_all(stream: StreamCall, requests: Iterator[Any]) -> None:
    """Send each request as soon as there is one, as gRPC does in a thread. Who reads the replies hears what goes wrong."""
    try:
        for request in requests:
            wait_for(stream.write(request))
        wait_for(stream.done_writing())
    except (RpcError, asyncio.InvalidStateError):
        pass


class BlockingStream:
    """A stream of replies for code that blocks."""

    def __init__(self, stream: StreamCall) -> None:
        self._stream = stream

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Any:
        reply = wait_for(self._stream.read())
        if reply is EOF:
            raise StopIteration
        return reply

    def cancel(self) -> None:
        self._stream.cancel()
