"""The health service of a gRPC server, which no client can hold up: everybody may watch it, also who does not read."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2


class HealthService(health.aio.HealthServicer):  # type: ignore[misc]  # gRPC has no types
    """As gRPC's, which writes to watchers under a lock that a change of status waits for; here none is held."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: set[asyncio.Event] = set()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802 - the base class's name
        """Write the status of a service now and whenever it has become another, until the watcher goes."""
        changed, last = asyncio.Event(), None
        self._changes.add(changed)
        try:
            while True:
                changed.clear()
                status = self._server_status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != last:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    last = status
                await changed.wait()
        finally:
            self._changes.discard(changed)

    async def _set(self, service: str, status: int) -> None:
        self._server_status[service] = status
        for changed in self._changes:
            changed.set()
