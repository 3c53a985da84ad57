"""A monotonic clock that leaves out the time in which the event loop of this process was held up."""

from __future__ import annotations

import asyncio
import math
import time

TICK_S = 0.1  # the clock goes on by hardly more in a turn of the event loop, in which one message of each stream can be read
LATE = 1.2  # times TICK_S: what a tick may take until the rest of it counts as a hold-up
HELD_UP_S = 0.8  # below a second, the shortest silence for which any client gives this service up


class Clock:
    """Counts the seconds in which the event loop could run: while it is held up nobody can be heard, so nobody counts as late."""

    def __init__(self) -> None:
        self._held_up_s = 0.0
        self._latest_s = time.monotonic()
        self._due_s = math.inf  # when the present sleep should end
        self._resumed_s = -math.inf  # when the loop last ran again after more than HELD_UP_S

    def now_s(self) -> float:
        """Return the time of this clock in seconds; it never goes back."""
        self._latest_s = max(self._latest_s, time.monotonic() - self._held_up_s)
        return self._latest_s

    async def sleep(self, pause_s: float) -> None:
        """Sleep for `pause_s` and, of every TICK_S of it, leave what took more than LATE times as long out of the clock.

        The clock notices hold-ups only while somebody sleeps here, so this has to be called in a loop.
        """
        while pause_s > 0:
            tick_s = min(TICK_S, pause_s)
            pause_s -= tick_s
            began_s = time.monotonic()
            self._due_s = began_s + tick_s
            await asyncio.sleep(tick_s)
            if self.held_up(0.0):
                self._resumed_s = time.monotonic()
            self._held_up_s += max(0.0, time.monotonic() - began_s - LATE * tick_s)

    def held_up(self, within_s: float) -> bool:
        """Whether the event loop was just held up for more than HELD_UP_S, or ran again after that less than `within_s` ago."""
        now_s = time.monotonic()
        return now_s - self._due_s > HELD_UP_S or now_s - self._resumed_s < within_s
