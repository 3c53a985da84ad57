"""Finds the job whose planning ends the reorder service: by memory, say, at every start and with every other job.

The store counts leaders that ended out of order, one soon after the other. Behind RECKLESS of them the next one is careful for as
long: it plans one step at a time, and notes of which job before it does. A job that STRIKES leaders had noted when they ended is
found. In the ordinary course that is two writes a term, and none a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from headrace.errors import UnavailableError
from headrace.observability.logs import pairs
from headrace.reorder_service.store.redis_database import Command, Database
from headrace.reorder_service.store.store_retry import patiently

log = logging.getLogger(__name__)

SETTLED_S = 60.0  # a leader that lives for so long did not end soon: what ended services did so in 4 to 16 s
RECKLESS = 2  # ends in a row that may have had any reason
STRIKES = 3  # a leader that was killed from outside happened to be planning; three in a row were not

_ENDS, _NOTED, _STRIKES = "headrace:ends", "headrace:noted", "headrace:strikes"


class Caution:
    """Of the leader in this process."""

    def __init__(self, database: Database, failing: Callable[[str, str], Awaitable[Sequence[Command]]]) -> None:
        """`failing`: of a job and a sentence, the commands that set it to failed; none where it is over or gone."""
        self._database = database
        self._failing = failing
        self._turn: asyncio.Lock | None = None  # where it is careful

    async def begin(self) -> str:
        """A term begins. The name of the job that was found, and has failed therefore; empty: none was.

        Waits for the store; raises UnavailableError where that is an embedded one whose server has ended.
        """
        check = self._database.check
        ends, noted, strikes = await patiently(self._read, check)
        found, message = strikes >= STRIKES, _sentence(noted)
        count = [("HDEL" if found else "HSET", _STRIKES, noted, *([] if found else [strikes]))] if noted else []
        fail = await patiently(lambda: self._failing(noted, message), check) if found else []
        # All at once, so that a leader that ends here has found the job or not; and values, so that it may be sent again.
        commands: list[Command] = [("SET", _ENDS, ends + 1), ("DEL", _NOTED), *count, *fail]
        await patiently(lambda: self._database.write(*commands), check)
        self._turn = asyncio.Lock() if ends >= RECKLESS else None
        if fail:
            log.error("job set aside %s", pairs(job=noted, error=message))
        return noted if found else ""

    async def _read(self) -> tuple[int, str, int]:
        """How many leaders have ended; the job that the last one had noted, if any; and how many have now."""
        read, client = self._database.read, self._database.client
        ends, noted = int(await read(client.get(_ENDS)) or 0), str(await read(client.get(_NOTED)) or "")
        return ends, noted, int(await read(client.hget(_STRIKES, noted)) or 0) + 1 if noted else 0

    async def settle(self) -> None:
        """The leader has lived for SETTLED_S, or ends in order. Raises UnavailableError where the store does not answer."""
        self._turn = None
        await self._database.write(("DEL", _ENDS, _NOTED, _STRIKES))

    @contextlib.asynccontextmanager
    async def around(self, job: str) -> AsyncIterator[None]:
        """While a step of a job is planned."""
        if self._turn is None:
            yield
            return
        async with self._turn:
            with contextlib.suppress(UnavailableError):
                await self._database.write(("SET", _NOTED, job))
            try:
                yield
            finally:
                with contextlib.suppress(UnavailableError):
                    await self._database.write(("DEL", _NOTED))


def _sentence(job: str) -> str:
    return (
        f"planning a step of job {job!r} ended {STRIKES} reorder services in a row, as one does that takes too much memory: "
        "lower its global_batch, window or topology in a new job, or submit it again to have it tried once more"
    )
