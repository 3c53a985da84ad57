"""Choose which member takes a work: the one with the most free slots, where shards and samples it read recently count as slots.

Members are rows of arrays here, so that hundreds are compared in some microseconds.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NEARNESS = 0.5  # share of its slots that a member may be busier than another one, if it has read all shards and the other none
FAMILIARITY = 0.5  # the same, if it has probed all samples and the other none

_TURN = 1e-9  # in slots: breaks ties
_FULL = float(1 << 17)  # in slots, more than any member has: puts those without a free slot behind all others

ShardKey = tuple[str, int]
"""A job's name, and the number of one of its shards."""


class Reading(NamedTuple):
    """The samples that a work reads, by shard, and how many of them each member has probed."""

    num_samples: int
    shards: Mapping[ShardKey, int]
    """Number of samples to read from each shard."""
    probed: Mapping[int, int] = {}
    """Row of a member -> number of the samples that it has probed."""


class Roster:
    """Free slots of members and the shards they read, by row. Slots are of two kinds: for kept work, and for other work."""

    def __init__(self) -> None:
        self._vacant: list[int] = []
        self._by_name: list[tuple[str, int]] = []  # (name, row) of each member, in order
        self._free = {keep: np.empty(0, np.float64) for keep in (False, True)}  # -inf where there is no member
        # The score of a member that has read nothing of a work: free slots and rank, less _FULL where no slot is free.
        self._score = {keep: np.empty(0, np.float64) for keep in (False, True)}
        self._open: dict[bool, set[int]] = {False: set(), True: set()}  # rows with free slots
        self._slots = np.empty(0, np.float64)
        # Far less than a slot: makes the choice between equal members deterministic, and has them take turns, for each kind.
        self._rank = {keep: np.empty(0, np.float64) for keep in (False, True)}
        self._last_rank = 0.0
        self._readers: dict[ShardKey, npt.NDArray[np.float32]] = {}  # (rows,) each: 1 where the member has read the shard

    def add(self, name: str, slots: int) -> int:
        """Add a member, without free slots as yet, and return its row."""
        if not self._vacant:
            self._grow()
        row = self._vacant.pop()
        self._slots[row] = slots
        insort(self._by_name, (name, row))
        rows = np.fromiter((known for _, known in self._by_name), np.int64, len(self._by_name))
        for ranks in self._rank.values():
            ranks[rows] = _TURN * np.arange(len(rows))
        for keep in (False, True):
            self._score_all(keep)
        return row

    def remove(self, row: int, shards: Iterable[ShardKey]) -> None:
        """Remove a member from its row, with all the shards that were noted for it."""
        self.forget(row, shards)
        self._by_name = [known for known in self._by_name if known[1] != row]
        for keep in (False, True):
            self._free[keep][row] = self._score[keep][row] = -np.inf
            self._open[keep].discard(row)
        self._vacant.append(row)

    def set_free(self, row: int, free: int, *, keep: bool) -> None:
        """Set how many slots of a kind a member has free; below 0 if it has more work than slots."""
        self._free[keep][row] = free
        if free > 0:
            self._open[keep].add(row)
            self._score[keep][row] = free + self._rank[keep][row]
        else:
            self._open[keep].discard(row)
            self._score[keep][row] = free + self._rank[keep][row] - _FULL

    def has_free(self, *, keep: bool) -> bool:
        """Whether any member has a free slot of this kind."""
        return bool(self._open[keep])

    def served(self, row: int, *, keep: bool) -> None:
        """Note that a member takes a work, so that other equal members are chosen before it is again."""
        self._last_rank -= _TURN
        self._score[keep][row] += self._last_rank - self._rank[keep][row]
        self._rank[keep][row] = self._last_rank

    def note(self, row: int, shards: Iterable[ShardKey]) -> None:
        """Note that a member reads `shards`."""
        for shard in shards:
            readers = self._readers.get(shard)
            if readers is None:
                readers = self._readers[shard] = np.zeros(len(self._slots), np.float32)
            readers[row] = 1

    def forget(self, row: int, shards: Iterable[ShardKey]) -> None:
        """Note that a member read `shards` too long ago to have them at hand."""
        for shard in shards:
            self._readers[shard][row] = 0
            if not self._readers[shard].any():
                del self._readers[shard]

    def only_free(self, *, keep: bool) -> int | None:
        """Return the row of the member that alone has free slots; None if none or several have."""
        rows = self._open[keep]
        return next(iter(rows)) if len(rows) == 1 else None

    def nearness(self, row: int, reading: Reading) -> float:
        """Return how much of a work the member in `row` has read or probed, as the share of its slots that this is worth."""
        samples = sum(number for shard, number in reading.shards.items() if shard in self._readers and self._readers[shard][row])
        return (NEARNESS * samples + FAMILIARITY * reading.probed.get(row, 0)) / reading.num_samples

    def choose(self, reading: Reading, avoid: Collection[int], *, keep: bool, most_over: float = 0.0) -> int | None:
        """Return the row of the member that is to take a work with this reading and is not in `avoid`; None if there is none.

        `most_over`: where no slot is free, a member takes it that has fewer works beyond its slots than this times its slots.
        """
        score, rows = self._score[keep], self._open[keep]
        if len(rows) == 1 and not avoid:
            return next(iter(rows))
        if avoid:
            score = score.copy()
            score[list(avoid)] = -np.inf
            rows = rows.difference(avoid)
        if not (rows or most_over):
            return None
        if (near := self._near_slots(reading)) is not None:
            score = score + near
        if not rows and most_over < np.inf:
            score = np.where(self._free[keep] > -most_over * self._slots, score, -np.inf)
        best = int(np.argmax(score))
        return best if score[best] > -np.inf else None

    def _near_slots(self, reading: Reading) -> npt.NDArray[np.float64] | None:
        """(rows,) `nearness` of every member, in slots; None where no member has read or probed anything of the work."""
        read: npt.NDArray[np.float32] | None = None
        for shard, number in reading.shards.items():
            if (readers := self._readers.get(shard)) is not None:
                of_shard = readers if number == 1 else readers * number
                read = of_shard if read is None else read + of_shard
        if read is None and not reading.probed:
            return None
        near = self._slots * (NEARNESS / reading.num_samples)
        near *= 0 if read is None else read
        for row, number in reading.probed.items():
            near[row] += FAMILIARITY * number / reading.num_samples * self._slots[row]
        return near

    def _score_all(self, keep: bool) -> None:
        free = self._free[keep]
        self._score[keep] = free + self._rank[keep] - np.where(free > 0, 0.0, _FULL)

    def _grow(self) -> None:
        num_rows = max(8, 2 * len(self._slots))
        more = num_rows - len(self._slots)
        self._vacant = list(range(len(self._slots), num_rows))[::-1]
        self._slots = np.pad(self._slots, (0, more))
        self._rank = {keep: np.pad(rank, (0, more)) for keep, rank in self._rank.items()}
        self._free = {keep: np.pad(free, (0, more), constant_values=-np.inf) for keep, free in self._free.items()}
        for keep in (False, True):
            self._score_all(keep)
        self._readers = {shard: np.pad(readers, (0, more)) for shard, readers in self._readers.items()}
