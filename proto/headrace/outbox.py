"""An outgoing queue for one side of a gRPC stream, which sends everything that is waiting in one message."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

MAX_BATCH = 256  # items per message, which keeps it far below rpc.MAX_MESSAGE_BYTES
MAX_BATCH_BYTES = 1 << 20  # per message, where items may be large: thousands of peers may be sending one at the same time

_T = TypeVar("_T")


class Outbox(Generic[_T]):
    """A queue of items to send, for one event loop. Waiting items leave in batches: a message costs the same for one as for a
    hundred."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._ended = False
        self._wake = asyncio.Event()

    def put(self, item: _T) -> None:
        """Add an item without blocking. Items added after `end` are dropped."""
        if not self._ended:
            self._items.append(item)
            self._wake.set()

    def end(self) -> None:
        """Let `batches` end once the items already queued are out."""
        self._ended = True
        self._wake.set()

    async def batches(self, num_bytes: Callable[[_T], int] | None = None) -> AsyncIterator[list[_T]]:
        """Yield the waiting items in order, at most MAX_BATCH at once, whenever there are some, until `end` is called.

        `num_bytes`: returns the size of an item; those of a batch then have no more than MAX_BATCH_BYTES together, unless there
        is only one.
        """
        while not (self._ended and not self._items):
            await self._wake.wait()
            self._wake.clear()
            while self._items:
                yield self._take(num_bytes)

    def _take(self, num_bytes: Callable[[_T], int] | None) -> list[_T]:
        """Return the next batch. There are items."""
        count = min(MAX_BATCH, len(self._items))
        if num_bytes is not None:
            sums = itertools.accumulate(num_bytes(item) for item in itertools.islice(self._items, count))
            count = max(1, sum(1 for _ in itertools.takewhile(lambda total: total <= MAX_BATCH_BYTES, sums)))
        return [self._items.popleft() for _ in range(count)]
