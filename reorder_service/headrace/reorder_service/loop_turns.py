"""Short turns of an event loop for what is done for one of very many peers."""

from __future__ import annotations

import asyncio
import heapq
import itertools

TURN_S = 0.001  # of one turn of the loop that such work may take before the rest waits for the next one
WOKEN = 32  # callers that wait and are woken for one turn; those that find its time used up wait again


class LoopTurns:
    """Spreads work over turns of an event loop, so that none of them gets long, and what has the lowest number goes first.

    A thousand streams that all have something to do at once would make one turn last for seconds. Meanwhile nothing else is
    done, and gRPC accepts one call in a turn.
    """

    def __init__(self) -> None:
        self._ends_s: float | None = None  # of the present turn; None: nobody has had any of it
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    async def turn(self, number: int) -> None:
        """Return at once in a turn that has time left, if nobody waits. Otherwise wait: the lowest number is woken first."""
        loop = asyncio.get_running_loop()
        is_new = True
        while (is_new and self._waiting) or self._is_used_up(loop):
            mine: asyncio.Future[None] = loop.create_future()
            heapq.heappush(self._waiting, (number, next(self._arrivals), mine))
            await mine
            is_new = False

    def _is_used_up(self, loop: asyncio.AbstractEventLoop) -> bool:
        if self._ends_s is None:
            self._ends_s = loop.time() + TURN_S
            loop.call_soon(self._begin_turn, loop)
            return False
        return loop.time() > self._ends_s

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ends_s = None
        for _ in range(min(WOKEN, len(self._waiting))):
            mine = heapq.heappop(self._waiting)[-1]
            if not mine.done():  # it was not cancelled
                mine.set_result(None)
        if self._waiting:  # those that are woken may all be cancelled before their turn
            loop.call_soon(self._begin_turn, loop)
