"""A preprocessor's reports: each lease is answered once, and heartbeats go with other reports."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.preprocessor.open_leases import OpenLeases
from headrace.preprocessor.reporting import Reports
from headrace.v1 import fleet_pb2


def test_a_lease_is_answered_when_its_last_part_is_decoded_and_no_sooner() -> None:
    leases = OpenLeases()
    leases.begin("lot", 3)
    assert [leases.decoded("lot") for _ in range(4)] == [False, False, True, False]


def test_a_lease_of_which_a_part_has_failed_is_answered_no_more() -> None:
    leases = OpenLeases()
    leases.begin("lot", 3)
    assert not leases.decoded("lot")
    assert leases.failed("lot")
    assert not leases.failed("lot")
    assert not leases.decoded("lot")


def test_leases_of_a_stream_that_has_ended_are_answered_no_more() -> None:
    leases = OpenLeases()
    leases.begin("lot", 1)
    leases.clear()
    assert not leases.decoded("lot")
    assert not leases.failed("lot")
    assert not leases.decoded("")


class Stream:
    """A stream that writes down what kinds of reports each message has."""

    def __init__(self) -> None:
        self.messages: list[list[str]] = []

    async def write(self, message: fleet_pb2.FleetReports) -> None:
        self.messages.append([str(report.WhichOneof("report")) for report in message.reports])

    async def done_writing(self) -> None:
        self.messages.append([])


async def test_a_heartbeat_that_is_due_soon_goes_with_another_report() -> None:
    reports, stream = Reports("p", fleet_pb2.Heartbeat), Stream()
    reports.heartbeat_s = 0.1
    reports.begin(fleet_pb2.Hello(preprocessor="p"))
    sending: Any = asyncio.create_task(reports.send(stream))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    beating = asyncio.create_task(reports.beat())
    async with asyncio.timeout(10):
        while sum("heartbeat" in message and len(message) > 1 for message in stream.messages) < 3:
            await asyncio.sleep(0.01)
            reports.decoded("lease")
    beating.cancel()
    reports.goodbye()
    await sending
    assert stream.messages[0] == ["hello"], "no heartbeat before the service has said how often"
    assert "goodbye" in stream.messages[-2]
    assert stream.messages[-1] == []


async def test_heartbeats_come_by_themselves_where_there_is_nothing_else() -> None:
    reports, stream = Reports("p", fleet_pb2.Heartbeat), Stream()
    reports.heartbeat_s = 0.02
    reports.begin(fleet_pb2.Hello(preprocessor="p"))
    tasks = [asyncio.create_task(reports.send(stream)), asyncio.create_task(reports.beat())]  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        while stream.messages.count(["heartbeat"]) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    assert stream.messages[0] == ["hello"]
    assert all(message == ["heartbeat"] for message in stream.messages[1:])
