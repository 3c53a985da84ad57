"""Which of several reorder services on one store works, and which stand by.

All of them listen. The one that leads says that it serves (gRPC's health service), and clients that were given several
endpoints follow that. It renews its lease while it runs; where it cannot, it serves nobody new until it can, and goes on as
before if that is soon and no other has led meanwhile. Else it lets go of all who are connected: another one may lead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from headrace.errors import UnavailableError
from headrace.observability import metrics
from headrace.observability.logs import pairs
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.redis_database import LEASE_S, Database

log = logging.getLogger(__name__)

POLL_S = 0.1  # how often one that stands by looks whether it may lead
RENEW_S = 0.3
GIVE_UP_S = 5.0  # how long a leader whose lease is over keeps its work: a store may be started again


class Post:
    """The place of the service in this process: taken while it leads, empty while it stands by."""

    def __init__(self) -> None:
        self.leader = ""
        """The name of the process that leads, as far as this one knows."""
        self.taken: ReorderService | None = None
        self.starting = False
        """Whether this process cannot lead yet."""
        self.lease_ends_s = 0.0
        """By this process's clock, not after the store lets another one lead."""
        self.trouble = ""
        """Why the store did not answer, or refused, when it was last asked who leads; empty: it did answer."""

    @property
    def service(self) -> ReorderService:
        """Raises UnavailableError while this process stands by, or cannot know that no other leads: it may have hung for long."""
        if self.starting:
            raise UnavailableError("this reorder service is starting: it compiles its planner, once, or loads it")
        if self.taken is None and self.trouble:
            raise UnavailableError(f"this reorder service waits for its store: {self.trouble}")
        if self.taken is None:
            leader = f"{self.leader.split()[0]} leads" if self.leader else "none leads yet"
            raise UnavailableError(f"this reorder service stands by; {leader}")
        if time.monotonic() > self.lease_ends_s:
            why = self.trouble or "it was asked too late"
            raise UnavailableError(f"this reorder service could not renew its lease ({why}): another one may lead by now")
        return self.taken


async def elected(database: Database, name: str, post: Post) -> None:
    """Return as soon as this process leads. `name`: its endpoint, and what tells it from others of that endpoint."""
    stands_by = False
    while True:
        asked_s = time.monotonic()
        try:
            if await database.lead(name):
                post.leader, post.lease_ends_s, post.trouble = name, asked_s + LEASE_S, ""
                metrics.TERMS.set(database.term)
                log.info("leading %s", pairs(term=database.term))
                return
            leader = await database.leader()
            if leader and leader != post.leader:
                log.info("standing by %s", pairs(leader=leader.split()[0]))
            post.leader, post.trouble, stands_by = leader, "", True
        except UnavailableError as err:
            post.trouble = str(err)
            log.warning("waiting for the store %s", pairs(error=err))
        database.check()
        await asyncio.sleep(POLL_S if stands_by else RENEW_S)


async def keep_leading(database: Database, name: str, post: Post, serve: Callable[[bool], Awaitable[None]]) -> None:
    """Keep the lease; return when another process leads, or may well. `serve(False)`, `serve(True)`: it ran out, it goes on."""
    serving = True
    while True:
        asked_s = time.monotonic()
        try:
            if not await database.renew(name):
                log.warning("replaced %s", pairs(term=database.term))
                return
            post.lease_ends_s, post.trouble = asked_s + LEASE_S, ""
        except UnavailableError as err:
            post.trouble = str(err)
            log.warning("lease not renewed %s", pairs(term=database.term, error=err))
        database.check()
        if time.monotonic() > post.lease_ends_s + GIVE_UP_S:
            log.warning("given up %s", pairs(term=database.term))
            return
        if serving != (time.monotonic() < post.lease_ends_s):
            serving = not serving
            await serve(serving)
        await asyncio.sleep(RENEW_S)
