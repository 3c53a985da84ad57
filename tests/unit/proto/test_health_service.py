"""The health service: a watcher that reads nothing holds up no change of status."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2

from headrace.health_service import HealthService

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class _Stream:
    """A watcher's stream, whose writes end when the watcher reads."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[int] = asyncio.Queue()
        self.reads = asyncio.Event()

    async def write(self, response: health_pb2.HealthCheckResponse) -> None:
        self.written.put_nowait(response.status)
        await self.reads.wait()


def test_a_watcher_that_does_not_read_holds_up_no_change() -> None:
    async def watch() -> None:
        service, stream = HealthService(), _Stream()
        watching = asyncio.create_task(service.Watch(health_pb2.HealthCheckRequest(), stream))
        try:
            assert await asyncio.wait_for(stream.written.get(), 60) == SERVING
            await asyncio.wait_for(service.enter_graceful_shutdown(), 60)
            stream.reads.set()
            assert await asyncio.wait_for(stream.written.get(), 60) == NOT_SERVING
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    asyncio.run(watch())
