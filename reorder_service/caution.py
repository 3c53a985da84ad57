"""Finds the job whose planning ends the reorder service: by memory, say, at every start and with every other job.

The store counts leaders that ended out of order, one soon after the other. Behind RECKLESS of them the next one is careful for as
long: it plans one step at a time, and notes of which job before it does. A job that STRIKES leaders had noted when they ended is
found. In the ordinary course that is two writes a term, and none a step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace.errors import UnavailableError
from reorder_service.database import Database

SETTLED_S = 60.0  # a leader that lives for so long did not end soon: what ended services did so in 4 to 16 s
RECKLESS = 2  # ends in a row that may have had any reason
STRIKES = 3  # a leader that was killed from outside happened to be planning; three in a row were not

_ENDS, _NOTED, _STRIKES = "headrace:ends", "headrace:noted", "headrace:strikes"


class Caution:
    """Of the leader in this process. All methods but `around` raise UnavailableError where the store does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._turn: asyncio.Lock | None = None  # where it is careful

    async def begin(self) -> str:
        """A term begins. The name of the job that was found; empty: none was."""
        read, client = self._database.read, self._database.client
        ends, noted = int(await read(client.get(_ENDS)) or 0), str(await read(client.get(_NOTED)) or "")
        strikes = int(await read(client.hget(_STRIKES, noted)) or 0) + 1 if noted else 0
        found = strikes >= STRIKES
        count = [("HDEL" if found else "HSET", _STRIKES, noted, *([] if found else [strikes]))] if noted else []
        await self._database.write(("SET", _ENDS, ends + 1), ("DEL", _NOTED), *count)
        self._turn = asyncio.Lock() if ends >= RECKLESS else None
        return noted if found else ""

    async def settle(self) -> None:
        """The leader has lived for SETTLED_S, or ends in order."""
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
