"""Leader election among reorder services that share one store: one of them leads and serves, the others stand by.

All of them listen. The leader reports SERVING to gRPC's health checks, and clients that were given several endpoints follow that.
The leader renews its lease while it runs. While it cannot, it serves nobody new; it carries on as before if it succeeds soon and
no other process has led meanwhile. Otherwise it disconnects all clients, since another process may lead.

The lease is renewed in a thread and over a connection of its own, so that a main event loop which is busy for some seconds, as
where a thousand ranks open sessions at once, does not lose it. A loop that has hung for HANG_S loses it all the same.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable

from headrace.errors import UnavailableError
from headrace.observability import metrics
from headrace.observability.logs import pairs
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.own_loop import run_in_own_loop
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.redis_database import LEASE_S, Database, Lease

log = logging.getLogger(__name__)

POLL_S = 0.1  # how often a standby tries to become the leader
RENEW_S = 0.3
HANG_S = 10.0  # without a sign of life of the main loop, after which the lease is not renewed: longer than any known pause of it
GIVE_UP_S = 5.0  # how long a leader keeps its work after its lease ran out: the store may be restarting


class Leadership:
    """Whether this process leads, stands by or is still starting, and the service that it runs while it leads."""

    def __init__(self) -> None:
        self.leader = ""
        """The name of the process that leads, as far as this one knows."""
        self.active_service: ReorderService | None = None
        self.starting = False
        """Whether this process is still loading or compiling its planner, and cannot lead yet."""
        self.lease_ends_s = 0.0
        """Time on this process's monotonic clock when its lease ends; the store lets no other process lead before."""
        self.seen_s = 0.0
        """Time on this process's monotonic clock when its main event loop last gave a sign of life."""
        self.trouble = ""
        """Why the store did not answer, or refused, when it was last asked who leads; empty if it answered."""

    @property
    def service(self) -> ReorderService:
        """The service that this process runs as the leader.

        Raises UnavailableError while this process starts, stands by or waits for its store, and when its lease has run out, as it
        may have after the process hung: another one may lead by then.
        """
        if self.starting:
            raise UnavailableError("this reorder service is starting: it compiles its planner, once, or loads it")
        if self.active_service is None and self.trouble:
            raise UnavailableError(f"this reorder service waits for its store: {self.trouble}")
        if self.active_service is None:
            leader = f"{self.leader.split()[0]} leads" if self.leader else "none leads yet"
            raise UnavailableError(f"this reorder service stands by; {leader}")
        if time.monotonic() > self.lease_ends_s:
            why = self.trouble or "it was asked too late"
            raise UnavailableError(f"this reorder service could not renew its lease ({why}): another one may lead by now")
        return self.active_service


async def wait_until_leader(database: Database, name: str, leadership: Leadership) -> None:
    """Try to become the leader, and return once this process is. `name`: its endpoint, and an id unique to the process."""
    stands_by = False
    while True:
        try:
            leader = await database.leader() if stands_by else ""  # it costs the store less than an attempt to lead
            asked_s = time.monotonic()
            if leader in ("", name) and await database.lead(name):
                leadership.leader, leadership.lease_ends_s, leadership.trouble = name, asked_s + LEASE_S, ""
                metrics.TERMS.set(database.term)
                log.info("leading %s", pairs(term=database.term))
                return
            leader = leader or await database.leader()
            if leader and leader != leadership.leader:
                log.info("standing by %s", pairs(leader=leader.split()[0]))
            leadership.leader, leadership.trouble, stands_by = leader, "", True
        except UnavailableError as err:
            leadership.trouble = str(err)
            log.warning("waiting for the store %s", pairs(error=err))
        database.check()
        await asyncio.sleep(POLL_S if stands_by else RENEW_S)


async def keep_leading(database: Database, name: str, leadership: Leadership, serve: Callable[[bool], Awaitable[None]]) -> None:
    """Keep the lease until another process leads, or may lead since the lease ran out GIVE_UP_S ago.

    `serve` is awaited with False when the lease has run out, and with True when it is renewed after that.
    """
    leadership.seen_s = time.monotonic()
    renewing = asyncio.create_task(run_in_own_loop(functools.partial(_renew_lease, database, name, leadership)))
    serving = True
    try:
        while not renewing.done():
            await asyncio.wait({renewing}, timeout=RENEW_S)
            leadership.seen_s = time.monotonic()
            database.check()
            if serving != (time.monotonic() < leadership.lease_ends_s):
                serving = not serving
                await serve(serving)
        renewing.result()
    finally:
        await stop_task(renewing)


async def _renew_lease(database: Database, name: str, leadership: Leadership) -> None:
    """Renew the lease while the main loop gives signs of life, until another process leads, or may lead for GIVE_UP_S already."""
    async with database.lease(name) as lease:
        while True:
            asked_s = time.monotonic()
            if asked_s - leadership.seen_s > HANG_S:
                leadership.trouble = f"its event loop was busy for more than {HANG_S:g} s"
                log.warning("lease not renewed %s", pairs(term=database.term, error=leadership.trouble))
            elif not await _renewed(lease, database.term, leadership):
                return
            await asyncio.sleep(RENEW_S)


async def _renewed(lease: Lease, term: int, leadership: Leadership) -> bool:
    """Try to renew the lease; return False where it is lost for good."""
    asked_s = time.monotonic()
    try:
        if not await lease.renew():
            log.warning("replaced %s", pairs(term=term))
            return False
        leadership.lease_ends_s, leadership.trouble = asked_s + LEASE_S, ""
    except UnavailableError as err:
        leadership.trouble = str(err)
        log.warning("lease not renewed %s", pairs(term=term, error=err))
    if time.monotonic() > leadership.lease_ends_s + GIVE_UP_S:
        log.warning("given up %s", pairs(term=term))
        return False
    return True
