"""A queue of work that waits for a preprocessor; it shares the fleet among jobs in proportion to their weights.

The job with the least service for its share goes first (start-time fair queueing; P. Goyal, H. Vin and H. Cheng, SIGCOMM 1996).
Within a job, priorities decide. A job that arrives, or comes back, gets no credit for the time in which it asked for nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """An item that can wait in a `FairQueue`."""

    job: str
    share: float
    """Weight of the item's job relative to other jobs; more than 0."""
    priority: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """Number of samples to charge to the item's job; at least 1."""


_Item = TypeVar("_Item", bound=Waiting)


class FairQueue(Generic[_Item]):
    """A weighted fair queue over the work of several jobs."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[tuple[int, ...], int, _Item]]] = {}
        """(priority, arrival number, item) heap of each job that has items waiting; the item at the top is never stale."""
        self._waiting: dict[int, _Item] = {}
        """Waiting items by `id`. A heap entry whose item is missing here is stale, and is dropped when it reaches the top."""
        self._had: dict[str, float] = {}
        """Virtual time of each job: the samples it was served, divided by its share."""
        self._now = 0.0
        """Virtual time of the queue: that of the job served last, from before that service. It never falls."""
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[_Item]:
        return iter(self._waiting.values())

    def push(self, item: _Item) -> None:
        """Add an item that is not waiting yet."""
        if item.job not in self._heaps:
            self._heaps[item.job] = []
            self._had[item.job] = max(self._now, self._had.get(item.job, 0.0))
        self._waiting[id(item)] = item
        heapq.heappush(self._heaps[item.job], (item.priority, next(self._count), item))

    def first(self) -> _Item | None:
        """Return the item to serve next, without removing it; None if nothing waits."""
        if not self._heaps:
            return None
        job = min(self._heaps, key=lambda job: (self._had[job], self._heaps[job][0]))
        return self._heaps[job][0][2]

    def first_few(self, count: int) -> list[_Item]:
        """Return `first` and the items that follow it in the same job, in order and at most `count` in all."""
        item = self.first()
        heap = self._heaps[item.job] if item is not None else []
        few: list[_Item] = []
        places = [(heap[0][:2], 0)] if heap else []
        while places and len(few) < count:
            _, place = heapq.heappop(places)
            if id(heap[place][2]) in self._waiting:
                few.append(heap[place][2])
            for behind in (2 * place + 1, 2 * place + 2):
                if behind < len(heap):
                    heapq.heappush(places, (heap[behind][:2], behind))
        return few

    def pop(self, item: _Item) -> bool:
        """Remove `item` from wherever it stands in the queue; return whether it was waiting."""
        if self._waiting.pop(id(item), None) is None:
            return False
        heap = self._heaps[item.job]
        while heap and id(heap[0][2]) not in self._waiting:
            heapq.heappop(heap)
        if not heap:
            del self._heaps[item.job]
        return True

    def served(self, item: _Item) -> None:
        """Charge `item` to its job, whether or not it waited in this queue."""
        had = self._had.setdefault(item.job, self._now)
        self._now = max(self._now, had)
        self._had[item.job] = had + item.num_samples / item.share

    def forget(self, job: str) -> None:
        """Drop a job that is over, with all its items."""
        for _, _, item in self._heaps.pop(job, []):
            self._waiting.pop(id(item), None)
        self._had.pop(job, None)
