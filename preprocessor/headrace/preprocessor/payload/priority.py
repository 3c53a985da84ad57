"""A priority queue from which items can drop out at any time without being searched for.

It is a binary heap with lazy deletion: an item that is no longer wanted stays until it comes first, and is dropped then. Every
operation takes amortised O(log n), except `prune`, which takes O(n).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class PriorityQueue(Generic[_T]):
    """Items ordered by a key that never changes, smallest first; items with equal keys keep the order of their arrival."""

    def __init__(self, key: Callable[[_T], int], wanted: Callable[[_T], bool]) -> None:
        """`wanted` tells whether an item that was pushed is still to come out."""
        self._key = key
        self._wanted = wanted
        self._heap: list[tuple[int, int, _T]] = []
        self._members: set[_T] = set()
        self._count = itertools.count()

    def __len__(self) -> int:
        """Return the number of items, including unwanted ones that have not come first yet."""
        return len(self._heap)

    def push(self, item: _T) -> None:
        """Add an item; do nothing if it is in the queue already or is not wanted."""
        if item not in self._members and self._wanted(item):
            self._members.add(item)
            heapq.heappush(self._heap, (self._key(item), next(self._count), item))

    def first(self) -> _T | None:
        """Return the first wanted item, which stays in the queue; None if there is none."""
        while self._heap:
            item = self._heap[0][2]
            if self._wanted(item):
                return item
            self.pop()
        return None

    def pop(self) -> _T:
        """Remove and return the first item, wanted or not. Raises IndexError if the queue is empty."""
        item = heapq.heappop(self._heap)[2]
        self._members.discard(item)
        return item

    def prune(self) -> None:
        """Drop all items that are not wanted any more."""
        self._heap = [entry for entry in self._heap if self._wanted(entry[2])]
        heapq.heapify(self._heap)
        self._members = {item for _, _, item in self._heap}
