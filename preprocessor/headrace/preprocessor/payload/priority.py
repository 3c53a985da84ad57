"""A priority queue whose items may lose their place in it at any time, without being searched for.

The textbook's lazy deletion on a binary heap: an item that is not wanted any more stays until it comes first, and is dropped
then. So every operation costs O(log n), amortised, but `prune`, O(n).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class PriorityQueue(Generic[_T]):
    """Items by a key that never changes, the smallest first; equal ones in the order in which they came."""

    def __init__(self, key: Callable[[_T], int], wanted: Callable[[_T], bool]) -> None:
        """`wanted`: whether an item that was pushed is still to come out."""
        self._key = key
        self._wanted = wanted
        self._heap: list[tuple[int, int, _T]] = []
        self._members: set[_T] = set()
        self._count = itertools.count()

    def __len__(self) -> int:
        """Those included that are not wanted any more and have not come first yet."""
        return len(self._heap)

    def push(self, item: _T) -> None:
        """Put it in; nothing happens where it is in already, or is not wanted."""
        if item not in self._members and self._wanted(item):
            self._members.add(item)
            heapq.heappush(self._heap, (self._key(item), next(self._count), item))

    def first(self) -> _T | None:
        """The first that is wanted, which stays in."""
        while self._heap:
            item = self._heap[0][2]
            if self._wanted(item):
                return item
            self.pop()
        return None

    def pop(self) -> _T:
        """Take out what comes first, wanted or not. Raises IndexError where there is nothing."""
        item = heapq.heappop(self._heap)[2]
        self._members.discard(item)
        return item

    def prune(self) -> None:
        """Drop all that is not wanted."""
        self._heap = [entry for entry in self._heap if self._wanted(entry[2])]
        heapq.heapify(self._heap)
        self._members = {item for _, _, item in self._heap}
