"""The clock by which silent nodes and preprocessors are judged."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from headrace.reorder_service.nodes import clock
from headrace.reorder_service.nodes.clock import LATE, TICK_S, Clock

Late = Callable[[list[float]], None]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """Have each sleep last longer by the next of some seconds, in a time of its own."""
    now_s, later_s = [100.0], [0.0]

    async def sleep(pause_s: float) -> None:
        now_s[0] += pause_s + (later_s.pop(0) if later_s else 0.0)

    monkeypatch.setattr(clock, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    later_s.clear()
    return later_s.extend


async def slept_s(pause_s: float) -> float:
    """Return the seconds that a new clock counts while somebody sleeps by it."""
    one = Clock()
    began_s = one.now_s()
    await one.sleep(pause_s)
    return one.now_s() - began_s


async def test_a_loop_that_is_on_time_counts_every_second(late: Late) -> None:
    assert await slept_s(1.0) == pytest.approx(1.0)
    assert await slept_s(0.05) == pytest.approx(0.05)


async def test_a_hold_up_does_not_count_wherever_in_a_long_sleep_it_is(late: Late) -> None:
    late([0.0, 0.0, 0.0, 5.0])
    assert await slept_s(1.0) == pytest.approx(1.0 + (LATE - 1) * TICK_S)


async def test_a_busy_loop_has_several_turns_in_what_counts_as_a_second(late: Late) -> None:
    """In a turn of the loop a message or two of each stream are read: nobody is silent whose messages lie unread."""
    late([3 * TICK_S] * 10)
    assert await slept_s(10 * TICK_S) == pytest.approx(10 * LATE * TICK_S)


async def test_only_long_hold_ups_are_remembered(late: Late) -> None:
    one = Clock()
    late([0.5])
    await one.sleep(TICK_S)
    assert not one.held_up(within_s=10.0)
    late([1.0])
    await one.sleep(TICK_S)
    assert one.held_up(within_s=10.0)
