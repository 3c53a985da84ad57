"""One at a time, the lowest number first."""

from __future__ import annotations

import asyncio

import pytest

from headrace.reorder_service.jobs.turns import Turns


async def work(turns: Turns, number: int, began: list[int]) -> None:
    async with turns.turn(number):
        began.append(number)
        await asyncio.sleep(0)


async def test_of_those_that_wait_the_lowest_is_next() -> None:
    turns, began = Turns(), list[int]()
    await asyncio.gather(*(work(turns, number, began) for number in (5, 3, 4, 1, 3)))
    assert began == [5, 1, 3, 3, 4]


async def test_a_turn_goes_on_where_the_work_fails() -> None:
    turns, began = Turns(), list[int]()

    async def fail() -> None:
        async with turns.turn(0):
            await asyncio.sleep(0)
            raise ValueError

    results = await asyncio.gather(fail(), work(turns, 1, began), return_exceptions=True)
    assert isinstance(results[0], ValueError)
    assert began == [1]


@pytest.mark.parametrize("turns_before", range(5))
async def test_one_that_is_cancelled_while_it_waits_or_as_its_turn_comes_keeps_nobody_waiting(turns_before: int) -> None:
    turns, began = Turns(), list[int]()
    tasks = [asyncio.create_task(work(turns, number, began)) for number in range(3)]
    for _ in range(turns_before):
        await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert began in ([0, 2], [0, 1, 2])
    await asyncio.wait_for(work(turns, 9, began), timeout=1.0)
