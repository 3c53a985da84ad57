"""A preprocessor's Flight server with papers that are renewed.

Arrow Flight cannot take up another certificate. So a server with the new papers takes the port of the former one: that one stops
listening, and sends to their ends the parts that are on their way, while the new one gets all calls that begin. Clients connect
again by themselves, within the same call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator

from headrace.errors import EndpointError
from headrace.identity import Identity, Papers
from headrace.observability.logs import pairs
from headrace.transport.flight_server import FlightServer, Lend

log = logging.getLogger(__name__)

LOOK_S = 5.0  # how often the files of the papers are looked at
RETRY_S = 0.05  # pause before the port is tried again: the former server takes a millisecond to leave it


class RenewingFlight:
    """Flight servers on one port, one after the other, each with newer papers than the one before."""

    def __init__(self, listen: str, lend: Lend, identity: Identity | None) -> None:
        """As `FlightServer`, with the identity's papers; None: plain text. Call it in a coroutine of the loop of `lend`."""
        self._host, self._lend, self._identity = listen.rpartition(":")[0], lend, identity
        self._papers = identity.present() if identity is not None else None
        self._server = FlightServer(listen, lend, self._papers)
        self.port = self._server.port

    async def keep_renewed(self) -> None:
        """Look for new papers every LOOK_S, until cancelled."""
        while self._identity is not None:
            await asyncio.sleep(LOOK_S)
            try:
                if (papers := self._identity.present()) is not self._papers:
                    await self._renew(papers)
            except Exception:
                log.exception("flight goes on with the papers that it shows")

    async def _renew(self, papers: Papers) -> None:
        # Papers that Arrow refuses are found before anybody is sent away.
        await asyncio.to_thread(FlightServer(f"{self._host}:0", self._lend, papers).stop, 0.0)
        former = self._server
        threading.Thread(target=former.shutdown, name="flight-former", daemon=True).start()  # returns after the last receiver
        told = False
        while self._server is former:
            try:
                self._server = FlightServer(f"{self._host}:{self.port}", self._lend, papers)
            except EndpointError as err:
                if not told:
                    log.warning("flight waits for its port to show new papers %s", pairs(port=self.port, reason=err))
                told = True
                await asyncio.sleep(RETRY_S)
        self._papers = papers
        until = papers.until.isoformat()
        log.info("flight shows new papers; parts on their way end as they began %s", pairs(port=self.port, until=until))

    def stop(self, grace_s: float) -> None:
        """As `FlightServer.stop`."""
        self._server.stop(grace_s)


@contextlib.asynccontextmanager
async def flight_served(listen: str, lend: Lend, identity: Identity | None, grace_s: float) -> AsyncIterator[RenewingFlight]:
    """Run a Flight server during the block, with renewed papers; then let parts on their way end within `grace_s`."""
    serving = RenewingFlight(listen, lend, identity)
    renewing = asyncio.create_task(serving.keep_renewed())
    try:
        yield serving
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})
        await asyncio.to_thread(serving.stop, grace_s)
