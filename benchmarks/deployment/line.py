"""A line that holds every frame back for a while, and loses some: a queue in front of a clock that others read."""

from __future__ import annotations

import random
from collections import deque

MOST_FRAMES = 4096
"""That are on the way at a time; what comes then is lost, as a router's full queue loses it."""


class Line:
    """One direction of a link. Frames come out in the order in which they went in."""

    def __init__(self, delay_s: float, loss: float, seed: int) -> None:
        """`loss`: the share of frames that get lost, drawn from `seed`."""
        self._delay_s = delay_s
        self._loss = loss
        self._draw = random.Random(seed).random
        self._way: deque[tuple[float, bytes]] = deque()
        self.num_frames = 0
        """That went in."""
        self.num_lost = 0

    def put(self, frame: bytes, now_s: float) -> None:
        """Take a frame in, or lose it."""
        self.num_frames += 1
        if self._draw() < self._loss or len(self._way) >= MOST_FRAMES:
            self.num_lost += 1
        else:
            self._way.append((now_s + self._delay_s, frame))

    def due(self, now_s: float) -> bytes | None:
        """The next frame that has arrived by now; None: there is none."""
        return self._way.popleft()[1] if self._way and self._way[0][0] <= now_s else None

    @property
    def next_s(self) -> float:
        """When the next frame arrives; infinite without one."""
        return self._way[0][0] if self._way else float("inf")
