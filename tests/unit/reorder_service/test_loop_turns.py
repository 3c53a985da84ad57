"""Work for many peers is spread over turns of the event loop, and what comes first goes first."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.reorder_service import loop_turns
from headrace.reorder_service.loop_turns import TURN_S, LoopTurns


class Counted:
    """Calls that take some time each, and the turns of the event loop in which they were made."""

    def __init__(self, takes_s: float) -> None:
        self.turns = LoopTurns()
        self.seen: list[tuple[int, int]] = []
        """(number, turn of the loop) of each call, in order."""
        self._takes_s = takes_s
        self._turn = 0

    async def call_all(self, *numbers: int) -> None:
        counting = asyncio.create_task(self._count())
        await asyncio.gather(*(self.call(number) for number in numbers))
        counting.cancel()

    async def call(self, number: int) -> None:
        await self.turns.turn(number)
        self.seen.append((number, self._turn))
        time.sleep(self._takes_s)  # noqa: ASYNC251 - work that does not give the loop a turn

    async def _count(self) -> None:
        while True:
            self._turn += 1
            await asyncio.sleep(0)


async def test_short_works_share_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_turns, "TURN_S", 60.0)  # none is long beside it, however busy the machine is
    calls = Counted(takes_s=0.0)
    await calls.call_all(*range(5))
    assert [number for number, _ in calls.seen] == [0, 1, 2, 3, 4]
    assert len({turn for _, turn in calls.seen}) == 1


async def test_long_works_have_turns_of_their_own_and_the_lowest_number_goes_first() -> None:
    calls = Counted(takes_s=1.5 * TURN_S)
    await calls.call_all(1, 1, 0, 1, 0)
    assert [number for number, _ in calls.seen] == [1, 0, 0, 1, 1]
    assert len({turn for _, turn in calls.seen}) == 5


@pytest.mark.parametrize("turns_before", range(5))
async def test_those_that_are_cancelled_while_they_wait_keep_nobody_waiting(turns_before: int) -> None:
    calls = Counted(takes_s=1.5 * TURN_S)
    tasks = [asyncio.create_task(calls.call(number)) for number in range(4)]
    for _ in range(turns_before):
        await asyncio.sleep(0)
    for task in tasks[1:3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert {0, 3} <= {number for number, _ in calls.seen}
    await asyncio.wait_for(calls.call(9), timeout=1.0)
