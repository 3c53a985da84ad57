"""The simulation's event loop: time jumps, and what a paused or killed process would do waits or never comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

import pytest

from tests.simulation import virtual_loop
from tests.simulation.fibers import Threading, in_fiber, sleep
from tests.simulation.virtual_loop import PROCESS, Process, StalledError, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(Random(0))
    yield loop
    loop.close()


def test_an_hour_of_sleep_takes_no_time(loop: VirtualLoop) -> None:
    loop.run_until_complete(asyncio.sleep(3600.0))
    assert loop.time() == 3600.0


def test_a_loop_with_nothing_left_to_do_says_so(loop: VirtualLoop) -> None:
    with pytest.raises(StalledError):
        loop.run_until_complete(loop.create_future())


def test_a_killed_process_does_not_even_run_its_finally_blocks(loop: VirtualLoop) -> None:
    process, done = Process("one", loop), []

    async def main() -> None:
        try:
            await asyncio.sleep(2.0)
        finally:
            done.append(loop.time())

    task = process.spawn(main())
    loop.call_at(1.0, process.kill)
    loop.run_until_complete(asyncio.sleep(5.0))
    assert done == []
    task._log_destroy_pending = False


def test_what_a_killed_process_waited_for_may_be_forgotten_and_its_finally_blocks_do_not_run(loop: VirtualLoop) -> None:
    process, done = Process("one", loop), []

    async def main() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            done.append(loop.time())

    process.spawn(main())
    loop.call_at(1.0, process.kill)
    loop.run_until_complete(asyncio.sleep(5.0))
    assert (len(process.left), done) == (2, [])  # and the test's own, which sleeps
    process.left[0]._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_sleep_that_is_cancelled_ends_at_once_and_only_once(loop: VirtualLoop) -> None:
    ended: list[float] = []

    async def main() -> None:
        try:
            await asyncio.sleep(2.0)
        finally:
            ended.append(loop.time())

    async def cancel() -> None:
        task = asyncio.create_task(main())
        await asyncio.sleep(0.5)
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(5.0)

    loop.run_until_complete(cancel())
    assert (ended, loop.errors) == ([0.5], [])


def test_a_loop_that_is_stuck_in_one_moment_says_so(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def spin() -> None:
        loop.call_soon(spin)

    monkeypatch.setattr(virtual_loop, "MOST_CALLBACKS", 3 * virtual_loop.LOOK_CALLBACKS)
    spin()
    with pytest.raises(StalledError, match="no end after"):
        loop.run_forever()


def test_a_simulation_that_holds_too_much_says_so(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def spin() -> None:
        loop.call_later(0.1, spin)

    monkeypatch.setattr(virtual_loop, "MOST_BYTES", 0)
    held: list[bytearray] = []

    def hold() -> None:
        held.append(bytearray(b"x" * (8 << 20)))  # more and more, as freed memory of former tests may come first
        loop.call_later(1_000.0, hold)

    hold()
    spin()
    with pytest.raises(StalledError, match="MiB more than"):
        loop.run_forever()
    assert held


def test_a_paused_process_goes_on_where_it_was_when_it_resumes(loop: VirtualLoop) -> None:
    process, beats = Process("one", loop), []

    async def main() -> None:
        for _ in range(4):
            await asyncio.sleep(1.0)
            beats.append(loop.time())

    process.spawn(main())
    loop.call_at(1.5, process.pause)
    loop.call_at(7.25, process.resume)
    loop.run_until_complete(asyncio.sleep(20.0))
    assert beats == [1.0, 7.25, 8.25, 9.25]


def test_tasks_and_timers_of_a_process_belong_to_it(loop: VirtualLoop) -> None:
    process, found = Process("one", loop), []

    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: found.append(PROCESS.get()))
        await asyncio.create_task(inner())

    async def inner() -> None:
        found.append(PROCESS.get())

    process.spawn(main())
    loop.run_until_complete(asyncio.sleep(2.0))
    assert found == [process, process]
    assert PROCESS.get() is None


def test_work_in_a_thread_is_done_a_little_later(loop: VirtualLoop) -> None:
    assert loop.run_until_complete(asyncio.wait_for(loop.run_in_executor(None, lambda: 7), 1.0)) == 7
    assert loop.time() > 0


def test_two_fibers_that_block_run_beside_each_other(loop: VirtualLoop) -> None:
    order: list[str] = []

    def block(name: str, pause_s: float) -> str:
        for _ in range(2):
            sleep(pause_s)
            order.append(name)
        return name

    async def main() -> list[str]:
        return await asyncio.gather(in_fiber(block, "slow", 1.0), in_fiber(block, "quick", 0.4))

    assert loop.run_until_complete(main()) == ["slow", "quick"]
    assert order == ["quick", "quick", "slow", "slow"]


def test_a_lock_is_held_by_one_fiber_at_a_time(loop: VirtualLoop) -> None:
    holding, most = 0, 0

    def block() -> None:
        nonlocal holding, most
        for _ in range(3):
            with lock:
                holding += 1
                most = max(most, holding)
                sleep(0.1)
                holding -= 1

    async def main() -> None:
        await asyncio.gather(*(in_fiber(block) for _ in range(3)))

    lock = Threading.Lock()
    loop.run_until_complete(main())
    assert (most, round(loop.time(), 6)) == (1, 0.9)


def test_a_fiber_raises_what_it_waits_for(loop: VirtualLoop) -> None:
    from tests.simulation.fibers import wait_for

    async def fail() -> None:
        raise ValueError("on purpose")

    def block() -> str:
        with pytest.raises(ValueError, match="on purpose"):
            wait_for(fail())
        return "went on"

    assert loop.run_until_complete(in_fiber(block)) == "went on"
