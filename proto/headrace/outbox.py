"""What one side of a stream has to say: put in at any time, sent as much at a time as there is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

MOST_AT_A_TIME = 256  # a message of so many stays far below rpc.MAX_MESSAGE_BYTES

_T = TypeVar("_T")


class Outbox(Generic[_T]):
    """For one event loop. A message costs the same for one thing as for a hundred, so nothing is sent alone that has company."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._ended = False
        self._wake = asyncio.Event()

    def put(self, item: _T) -> None:
        """Never blocks. What is put in after the end is dropped."""
        if not self._ended:
            self._items.append(item)
            self._wake.set()

    def end(self) -> None:
        """Nothing follows what is in already."""
        self._ended = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[_T]]:
        """All there is, in order, whenever there is something, until the end."""
        while not (self._ended and not self._items):
            await self._wake.wait()
            self._wake.clear()
            while self._items:
                yield [self._items.popleft() for _ in range(min(MOST_AT_A_TIME, len(self._items)))]
