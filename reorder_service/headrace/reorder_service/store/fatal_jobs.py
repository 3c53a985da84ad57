"""Finds the job whose planning crashes the reorder service, as for lack of memory, at every start and so for all other jobs.

The store counts leaders that crashed within SETTLED_S of their start. After CRASHES_UNTIL_CAREFUL of them in a row the next
leader is careful for its first SETTLED_S: it plans one step at a time, and notes the step's job in the store before. A job that
STRIKES leaders had noted when they crashed is set to failed. In normal operation this costs two writes per term, and none per
step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from headrace.errors import UnavailableError
from headrace.observability.logs import pairs
from headrace.reorder_service.store.redis_database import Command, Database
from headrace.reorder_service.store.store_retry import retry_while_unavailable

log = logging.getLogger(__name__)

SETTLED_S = 60.0  # a leader that lives so long has not crashed soon: such jobs crashed leaders in 4 to 16 s
CRASHES_UNTIL_CAREFUL = 2  # crashes in a row that may have any reason
STRIKES = 3  # a leader killed from outside may have been planning by chance; three in a row were not

_ENDS, _NOTED, _STRIKES = "headrace:ends", "headrace:noted", "headrace:strikes"


class FatalJobs:
    """Guards the leader in this process against a job whose planning crashes it."""

    def __init__(self, database: Database, failing: Callable[[str, str], Awaitable[Sequence[Command]]]) -> None:
        """`failing`: returns the commands that set a job to failed with a message; none where the job is over or gone."""
        self._database = database
        self._failing = failing
        self._turn: asyncio.Lock | None = None  # held while a step is planned; None unless this leader is careful

    async def begin_term(self) -> str:
        """Begin a term. Set the job that was found to crash leaders to failed, and return its name; empty: none was found.

        Waits for the store; raises UnavailableError where that is an embedded one whose server has ended.
        """
        check = self._database.check
        ends, noted, strikes = await retry_while_unavailable(self._read, check)
        found, message = strikes >= STRIKES, _sentence(noted)
        count = [("HDEL" if found else "HSET", _STRIKES, noted, *([] if found else [strikes]))] if noted else []
        fail = await retry_while_unavailable(lambda: self._failing(noted, message), check) if found else []
        # In one transaction, so that a leader that crashes here has found the job or not; as values, so that it may be repeated.
        commands: list[Command] = [("SET", _ENDS, ends + 1), ("DEL", _NOTED), *count, *fail]
        await retry_while_unavailable(lambda: self._database.write(*commands), check)
        self._turn = asyncio.Lock() if ends >= CRASHES_UNTIL_CAREFUL else None
        if fail:
            log.error("job set aside %s", pairs(job=noted, error=message))
        return noted if found else ""

    async def _read(self) -> tuple[int, str, int]:
        """Return how many leaders have crashed, the job that the last one had noted (or ""), and how many had noted that job."""
        read, client = self._database.read, self._database.client
        ends, noted = int(await read(client.get(_ENDS)) or 0), str(await read(client.get(_NOTED)) or "")
        return ends, noted, int(await read(client.hget(_STRIKES, noted)) or 0) + 1 if noted else 0

    async def reset_counts(self) -> None:
        """Reset all counts, since the leader has lived for SETTLED_S or stops normally.

        Raises UnavailableError where the store does not answer.
        """
        self._turn = None
        await self._database.write(("DEL", _ENDS, _NOTED, _STRIKES))

    @contextlib.asynccontextmanager
    async def guard_planning(self, job: str) -> AsyncIterator[None]:
        """Guard the planning of one step: a careful leader plans one at a time, and has its job noted in the store meanwhile."""
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
