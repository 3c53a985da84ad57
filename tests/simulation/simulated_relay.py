"""A host's relay: the real Relay and RelayStream, in fibers of the rank that relays, and who that is.

Simulated are the lock and the Unix socket by which a host's ranks find it (`RelayPlace`), and the gRPC server that runs each call
in a thread of its own (`BlockingServer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import grpc

from headrace import rpc
from headrace.trainer.loading.relay import ANSWER_S, Relay
from tests.simulation.fibers import in_fiber, wait_for
from tests.simulation.network import Network
from tests.simulation.simulated_call import AbortedError, Context
from tests.simulation.simulated_channel import BlockingChannel, SimulatedChannel
from tests.simulation.simulated_server import SimulatedServer

_TRY_S = 0.1  # between two tries to connect to the relay
_END = object()  # of a stream of replies


class SimulatedPlace:
    """headrace.trainer.loading.relay.RelayPlace: the first rank of a host that asks becomes the relay, until its process ends."""

    def __init__(self, network: Network, socket: str, endpoint: str) -> None:
        """`socket`: the host's."""
        self._network, self._socket, self._endpoint = network, socket, endpoint
        self._reach = SimulatedChannel(network, socket)
        self.channel = BlockingChannel(self._reach)

    def is_answering(self) -> bool:
        if self._socket not in self._network.listeners:  # a process that ends listens no more, and its lock is free
            Relay(rpc.channel(self._endpoint)).serve(self._socket)
        return wait_for(self._answers())

    async def _answers(self) -> bool:
        for _ in range(round(ANSWER_S / _TRY_S)):
            if await self._reach.is_reached(self._socket):
                return True
            await asyncio.sleep(_TRY_S)
        return False


class BlockingServer(SimulatedServer):
    """What `grpc.server` returns: handlers that block run in fibers, and go on where nobody waits for them any more."""

    def start(self) -> None:  # type: ignore[override]
        self.is_closed = False

    async def handler(self, details: Any) -> Any:
        blocking = await super().handler(details)
        if blocking is None:
            return None

        async def one(request: Any, context: Context) -> Any:
            return await self._beside(in_fiber(blocking.unary_unary, request, BlockingContext(context)))

        async def many(request: Any, context: Context) -> AsyncIterator[Any]:
            replies = blocking.unary_stream(request, BlockingContext(context))
            while (reply := await self._beside(in_fiber(next, replies, _END))) is not _END:
                yield reply

        return SimpleNamespace(
            request_streaming=False,
            response_streaming=blocking.response_streaming,
            request_deserializer=blocking.request_deserializer,
            response_serializer=blocking.response_serializer,
            unary_unary=one,
            stream_unary=None,
            unary_stream=many,
            stream_stream=None,
        )

    async def _beside(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await what runs in a thread of its own: it does not end when the call is cancelled."""
        running = self.process.spawn(call)
        running.add_done_callback(_note)
        return await asyncio.shield(running)


def _note(running: asyncio.Task[Any]) -> None:
    """Keep asyncio from reporting the error of a call that nobody waits for any more: gRPC only logs it."""
    if not running.cancelled():
        running.exception()


class BlockingContext:
    """grpc.ServicerContext, of which the relay uses this."""

    def __init__(self, context: Context) -> None:
        self._call = context.call

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self._call.end_at_server((code, details))
        raise AbortedError

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        server = self._call.connection.server

        def act() -> None:
            if not server.loop.is_closed():  # else the simulation is over
                server.spawn(in_fiber(callback))

        return self._call.when_over_at_server(act)
