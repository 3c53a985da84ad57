"""Work that waits for a member of the fleet, so that several jobs share it by weight.

Of the jobs that wait the one goes first that has had least for its share (start-time fair queueing; P. Goyal, H. Vin and
H. Cheng, SIGCOMM 1996). Inside of a job, priorities decide. A job that comes, or comes back, is not owed what it did not ask for.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
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
        self._had: dict[str, float] = {}
        """Samples that each job has had, over its share."""
        self._now = 0.0
        """The same of the job that was served last, before that."""
        self._count = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def __iter__(self) -> Iterator[_Item]:
        return (entry[2] for heap in self._heaps.values() for entry in heap)

    def push(self, item: _Item) -> None:
        """Let an item wait."""
        if item.job not in self._heaps:
            self._heaps[item.job] = []
            self._had[item.job] = max(self._now, self._had.get(item.job, 0.0))
        heapq.heappush(self._heaps[item.job], (item.priority, next(self._count), item))

    def first(self) -> _Item | None:
        """The item to be served next."""
        job = min(self._heaps, key=lambda job: (self._had[job], self._heaps[job][0]), default=None)
        return self._heaps[job][0][2] if job is not None else None

    def pop(self, item: _Item) -> None:
        """`item`, the first, no longer waits."""
        heapq.heappop(self._heaps[item.job])
        self._tidy(item.job)

    def served(self, item: _Item) -> None:
        """The item's job has had it, whether it waited here or not."""
        had = self._had.setdefault(item.job, self._now)
        self._now = max(self._now, had)
        self._had[item.job] = had + item.num_samples / item.share

    def keep(self, wanted: Callable[[_Item], bool]) -> None:
        """Drop all others. `wanted` is asked job by job, in the order of the priorities."""
        for job in list(self._heaps):
            self._heaps[job] = [entry for entry in sorted(self._heaps[job]) if wanted(entry[2])]  # sorted: a heap as well
            self._tidy(job)

    def forget(self, job: str) -> None:
        """A job is over."""
        self._heaps.pop(job, None)
        self._had.pop(job, None)

    def _tidy(self, job: str) -> None:
        if not self._heaps[job]:
            del self._heaps[job]
