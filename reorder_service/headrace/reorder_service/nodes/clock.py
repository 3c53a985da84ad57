"""Time as this process had it."""

from __future__ import annotations

import asyncio
import math
import time

HELD_UP_S = 0.8  # nobody who listens to this service gives it up for a shorter silence than a second


class Clock:
    """Seconds in which the event loop could run: while it is held up nobody can be heard, so nobody is late for that."""

    def __init__(self) -> None:
        self._held_up_s = 0.0
        self._latest_s = time.monotonic()
        self._due_s = math.inf  # of the present sleep
        self._resumed_s = -math.inf  # after the latest time of HELD_UP_S or more

    def now_s(self) -> float:
        """Never goes back."""
        self._latest_s = max(self._latest_s, time.monotonic() - self._held_up_s)
        return self._latest_s

    async def sleep(self, pause_s: float) -> None:
        """Pause, and leave out of the time what it took longer than twice that. To be called again and again."""
        began_s = time.monotonic()
        self._due_s = began_s + pause_s
        await asyncio.sleep(pause_s)
        if self.held_up(0.0):
            self._resumed_s = time.monotonic()
        self._held_up_s += max(0.0, time.monotonic() - began_s - 2 * pause_s)

    def held_up(self, within_s: float) -> bool:
        """Whether the event loop has just been held up for HELD_UP_S, or was within so many seconds before."""
        now_s = time.monotonic()
        return now_s - self._due_s > HELD_UP_S or now_s - self._resumed_s < within_s
