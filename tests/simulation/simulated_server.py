"""What `grpc.aio.server` returns in a simulation: a server of the process that made it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from grpc_health.v1 import health_pb2

from tests.simulation.network import Network
from tests.simulation.simulated_call import Details
from tests.simulation.virtual_loop import PROCESS


class SimulatedServer:
    """The server: its handlers, interceptors and health."""

    def __init__(self, network: Network, interceptors: Any = ()) -> None:
        process = PROCESS.get()
        assert process is not None
        self.process = process
        self.errors: list[str] = []
        """Exceptions of handlers, which gRPC would answer with UNKNOWN."""
        self.is_closed = False
        self.health: Any = None
        """The real health servicer, where the server has one."""
        self._network = network
        self._interceptors = interceptors
        self._generic: list[Any] = []
        self._registered: dict[str, Any] = {}
        self._known: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._registered |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_insecure_port(self, listen: str) -> int:
        self._network.listeners[listen] = self
        self.is_closed = True  # until it starts
        return 0 if listen.startswith("unix:") else int(listen.rpartition(":")[2])

    async def start(self) -> None:
        self.is_closed = False

    async def stop(self, grace_s: float | None) -> None:
        self.is_closed = True
        await asyncio.sleep(grace_s or 0.0)
        for connection in list(self._network.connections):
            if connection.server is self.process:
                for side in (connection.server, connection.client):
                    self._network.break_connection(connection, side)

    def serves(self, service: str) -> bool:
        """Whether it reports SERVING for a service."""
        serving = health_pb2.HealthCheckResponse.SERVING
        return self.health is not None and self.health._server_status.get(service) == serving

    async def handler(self, details: Details) -> Any:
        """The handler of a method behind the interceptors; they see no metadata but what comes with every call."""
        if details.method not in self._known:

            async def find(of: Any) -> Any:
                if of.method in self._registered:
                    return self._registered[of.method]
                return next((found for generic in self._generic if (found := generic.service(of)) is not None), None)

            proceed: Callable[[Any], Awaitable[Any]] = find
            for interceptor in self._interceptors:
                proceed = _behind(interceptor, proceed)
            self._known[details.method] = await proceed(details)
        return self._known[details.method]


def _behind(interceptor: Any, proceed: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    return lambda details: interceptor.intercept_service(proceed, details)
