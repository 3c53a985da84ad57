"""The stream of a preprocessor ends when it is dismissed, whatever comes at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.v1 import fleet_pb2
from reorder_service.fleet import Fleet
from reorder_service.fleet_servicer import _read


@pytest.mark.parametrize("turns", range(6))
async def test_a_dismissal_beside_a_report_is_not_missed(turns: int) -> None:
    """So many turns of the loop lie between them."""
    service: Any = SimpleNamespace(fleet=Fleet())
    outbox: asyncio.Queue[fleet_pb2.FleetOrder | None] = asyncio.Queue()
    beat: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def reports() -> AsyncIterator[fleet_pb2.FleetReport]:
        yield fleet_pb2.FleetReport(hello=fleet_pb2.Hello(preprocessor="p", endpoint="p:1", slots=1))
        await beat
        yield fleet_pb2.FleetReport(heartbeat=fleet_pb2.Heartbeat())
        await asyncio.Event().wait()

    reader = asyncio.create_task(_read(service, reports(), outbox))
    while not service.fleet.members:  # noqa: ASYNC110 - turns of the loop are what this is about
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    beat.set_result(None)
    for _ in range(turns):
        await asyncio.sleep(0)
    reader.cancel()
    async with asyncio.timeout(2.0):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.shield(reader)
    assert not service.fleet.members
