"""A coroutine in an event loop and a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from headrace.reorder_service.own_loop import run_in_own_loop


async def test_it_goes_on_while_the_main_loop_is_busy() -> None:
    ticks: list[threading.Thread] = []

    async def tick() -> None:
        while len(ticks) < 5:
            ticks.append(threading.current_thread())
            await asyncio.sleep(0.01)

    running = asyncio.create_task(run_in_own_loop(tick))
    await asyncio.sleep(0)
    while len(ticks) < 5:
        time.sleep(0.01)  # noqa: ASYNC251 - the main loop is busy
    await running
    assert threading.current_thread() not in ticks


async def test_its_error_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        await run_in_own_loop(fail)


async def test_it_is_cancelled_until_it_has_ended() -> None:
    begun, cancelled = threading.Event(), []

    async def swallow() -> None:
        begun.set()
        while len(cancelled) < 3:  # as the store's client may, in the middle of a command
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError as err:
                cancelled.append(err)
        raise cancelled[-1]

    running = asyncio.create_task(run_in_own_loop(swallow))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(cancelled) == 3
