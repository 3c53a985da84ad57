"""Work that waits for a member of the fleet, so that several jobs share it by weight.

Of the jobs that wait the one goes first that has had least for its share (start-time fair queueing; P. Goyal, H. Vin and
H. Cheng, SIGCOMM 1996). Inside of a job, priorities decide. A job that comes, or comes back, is not owed what it did not ask for.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What can wait."""

    job: str
    share: float
    """Of the job, beside those of others; more than 0."""
    priority: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """How much of the fleet it takes; at least 1."""


_Item = TypeVar("_Item", bound=Waiting)


class FairQueue(Generic[_Item]):
    """Items of several jobs."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[tuple[int, ...], int, _Item]]] = {}
        """Of each job that waits; what comes first in it waits still."""
        self._waiting: dict[int, _Item] = {}
        """By identity: what is not in here any more is dropped from its heap when it comes first there."""
        self._had: dict[str, float] = {}
        """Samples that each job has had, over its share."""
        self._now = 0.0
        """The same of the job that was served last, before that."""
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[_Item]:
        return iter(self._waiting.values())

    def push(self, item: _Item) -> None:
        """Let an item wait that does not yet."""
        if item.job not in self._heaps:
            self._heaps[item.job] = []
            self._had[item.job] = max(self._now, self._had.get(item.job, 0.0))
        self._waiting[id(item)] = item
        heapq.heappush(self._heaps[item.job], (item.priority, next(self._count), item))

    def first(self) -> _Item | None:
        """The item to be served next."""
        job = min(self._heaps, key=lambda job: (self._had[job], self._heaps[job][0]), default=None)
        return self._heaps[job][0][2] if job is not None else None

    def first_few(self, count: int) -> list[_Item]:
        """`first`, and those that come behind it in its job: as many as there are, up to `count`."""
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
        """`item` no longer waits, wherever it stood; whether it did."""
        if self._waiting.pop(id(item), None) is None:
            return False
        heap = self._heaps[item.job]
        while heap and id(heap[0][2]) not in self._waiting:
            heapq.heappop(heap)
        if not heap:
            del self._heaps[item.job]
        return True

    def served(self, item: _Item) -> None:
        """The item's job has had it, whether it waited here or not."""
        had = self._had.setdefault(item.job, self._now)
        self._now = max(self._now, had)
        self._had[item.job] = had + item.num_samples / item.share

    def forget(self, job: str) -> None:
        """A job is over."""
        for _, _, item in self._heaps.pop(job, []):
            self._waiting.pop(id(item), None)
        self._had.pop(job, None)
