"""What a preprocessor reports to the reorder service: answers to leases, results, and heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import grpc

from headrace.errors import HeadraceError
from headrace.message_codec import rejection_message
from headrace.observability import metrics
from headrace.observability.logs import pairs
from headrace.outbox import Outbox
from headrace.preprocessor.open_leases import OpenLeases
from headrace.preprocessor.payload.part import DamagedPartError
from headrace.printable import printable
from headrace.v1 import fleet_pb2
from headrace.v1.fleet_pb2 import FleetReport, FleetReports

log = logging.getLogger(__name__)


class Reports:
    """The reports of one preprocessor, over one stream after the other. For one event loop."""

    def __init__(self, preprocessor: str, heartbeat: Callable[[], fleet_pb2.Heartbeat]) -> None:
        """`preprocessor`: its name. `heartbeat`: returns what it says of itself now."""
        self.heartbeat_s = 1.0
        """Seconds from one heartbeat to the next, as the reorder service says."""
        self._preprocessor = preprocessor
        self._heartbeat = heartbeat
        self._beaten_s = math.inf  # time of the latest heartbeat on the stream; none yet: infinity, so that none is due
        self._outbox = Outbox[FleetReport]()
        self._leases = OpenLeases()

    def begin(self, hello: fleet_pb2.Hello) -> None:
        """Begin a stream with a hello. What was not sent over the former one is dropped."""
        self._outbox.end()
        self._outbox, self._beaten_s = Outbox[FleetReport](), math.inf
        self.put(hello=hello)

    def void_leases(self) -> None:
        """Answer no lease of a part that came by now, since the stream has ended."""
        self._leases.clear()

    def goodbye(self) -> None:
        """Say that this preprocessor leaves, and nothing after it."""
        self.put(goodbye=fleet_pb2.Goodbye())
        self._outbox.end()

    def put(self, **report: Any) -> None:
        """Report something: one of FleetReport's fields, by its name."""
        self._outbox.put(FleetReport(**report))

    def failed(self, lease: str, err: Exception) -> None:
        """Report that an order could not be carried out."""
        metrics.ORDERS_FAILED.inc()
        if isinstance(err, HeadraceError):
            error = str(err)
        else:
            log.error("order failed %s", pairs(lease=lease), exc_info=err)
            error = f"preprocessor {self._preprocessor}: {type(err).__name__}: {err}"
        damaged = [rejection_message(item) for item in err.damaged] if isinstance(err, DamagedPartError) else ()
        self.put(order_failed=fleet_pb2.OrderFailed(lease=lease, error=printable(error), damaged=damaged))

    def begin_parts(self, lease: str, num_parts: int) -> None:
        """Note how many parts a lease has. It is answered once all are decoded, or one cannot be."""
        self._leases.begin(lease, num_parts)

    def part_decoded(self, lease: str) -> None:
        """Note that a part of a lease is decoded. The lease may be over, or empty."""
        if self._leases.decoded(lease):
            self.decoded(lease)

    def part_failed(self, lease: str, err: Exception) -> None:
        """Note that a part of a lease cannot be decoded. The lease may be over, or empty."""
        if self._leases.failed(lease):
            self.failed(lease, err)

    def decoded(self, lease: str) -> None:
        """Report that all parts of a lease are decoded."""
        self.put(part_decoded=fleet_pb2.PartDecoded(lease=lease))

    async def beat(self) -> None:
        """Report a heartbeat now, and whenever the latest is `heartbeat_s` old."""
        self._beat()
        while True:
            if (left_s := self._beaten_s + self.heartbeat_s - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            else:
                self._beat()

    def _beat(self) -> None:
        self._beaten_s = time.monotonic()
        self.put(heartbeat=self._heartbeat())

    async def send(self, stream: grpc.aio.StreamStreamCall) -> None:
        """Send what is reported, until the stream ends or `goodbye`.

        A heartbeat goes with other reports where it would be due soon, because a message costs the reorder service about the
        same for one as for several.
        """
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # who reads the stream gets the reason
            async for reports in self._outbox.batches(FleetReport.ByteSize):
                if time.monotonic() > self._beaten_s + self.heartbeat_s / 2:
                    self._beaten_s = time.monotonic()
                    reports.append(FleetReport(heartbeat=self._heartbeat()))
                await stream.write(FleetReports(reports=reports))
            await stream.done_writing()
