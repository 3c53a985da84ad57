"""Time as this process had it."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """Seconds in which the event loop could run: while it is held up nobody can be heard, so nobody is late for that."""

    def __init__(self) -> None:
        self._held_up_s = 0.0
        self._latest_s = time.monotonic()

    def now_s(self) -> float:
        """Never goes back."""
        self._latest_s = max(self._latest_s, time.monotonic() - self._held_up_s)
        return self._latest_s

    async def sleep(self, pause_s: float) -> None:
        """Pause, and leave out of the time what it took longer than twice that. To be called again and again."""
        began_s = time.monotonic()
        await asyncio.sleep(pause_s)
        self._held_up_s += max(0.0, time.monotonic() - began_s - 2 * pause_s)
