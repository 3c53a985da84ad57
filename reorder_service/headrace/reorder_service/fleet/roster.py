"""Who takes a work: the member with most free slots, where shards and samples that it has read of late count as slots.

A member is a row of arrays here, so that hundreds are compared in some microseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NEARNESS = 0.5  # of a member's slots: so much less free it may be than another one that would have to fetch all shards
FAMILIARITY = 0.5  # the same, than another one that has probed none of the samples

_TURN = 1e-9  # of a slot

ShardKey = tuple[str, int]
"""A job, and the number of a shard of it."""


class Reading(NamedTuple):
    """What a work reads."""

    num_samples: int
    shards: Mapping[ShardKey, int]
    """Samples of each."""
    probed: Mapping[int, int] = {}
    """Row -> samples that this member has probed."""


class Roster:
    """Free slots of members and what they have read, by row. Slots are of two kinds: for work that is kept, and for other."""

    def __init__(self) -> None:
        self._vacant: list[int] = []
        self._names: dict[int, str] = {}
        self._free = {keep: np.empty(0, np.float64) for keep in (False, True)}  # -inf where there is no member
        self._open: dict[bool, set[int]] = {False: set(), True: set()}  # rows with free slots
        self._slots = np.empty(0, np.float64)
        # Far less than a slot: of equals it is certain who is chosen first, and then they take turns, for each kind.
        self._rank = {keep: np.empty(0, np.float64) for keep in (False, True)}
        self._last_rank = 0.0
        self._readers: dict[ShardKey, npt.NDArray[np.float32]] = {}  # 1 for who has read the shard

    def add(self, name: str, slots: int) -> int:
        """The row of a new member, without free slots as yet."""
        if not self._vacant:
            self._grow()
        row = self._vacant.pop()
        self._names[row] = name
        self._slots[row] = slots
        for rank, known in enumerate(sorted(self._names, key=self._names.__getitem__)):
            for ranks in self._rank.values():
                ranks[known] = _TURN * rank
        return row

    def remove(self, row: int, shards: Iterable[ShardKey]) -> None:
        """A member leaves, with all the shards that were noted for it."""
        self.forget(row, shards)
        del self._names[row]
        for keep in (False, True):
            self._free[keep][row] = -np.inf
            self._open[keep].discard(row)
        self._vacant.append(row)

    def set_free(self, row: int, free: int, *, keep: bool) -> None:
        """So many slots are free; below 0: it has more than it has slots."""
        self._free[keep][row] = free
        if free > 0:
            self._open[keep].add(row)
        else:
            self._open[keep].discard(row)

    def has_free(self, *, keep: bool) -> bool:
        """Whether any member has a free slot."""
        return bool(self._open[keep])

    def served(self, row: int, *, keep: bool) -> None:
        """A member takes a work: of equals, others are chosen before it is again."""
        self._last_rank -= _TURN
        self._rank[keep][row] = self._last_rank

    def note(self, row: int, shards: Iterable[ShardKey]) -> None:
        """A member reads these."""
        for shard in shards:
            readers = self._readers.get(shard)
            if readers is None:
                readers = self._readers[shard] = np.zeros(len(self._slots), np.float32)
            readers[row] = 1

    def forget(self, row: int, shards: Iterable[ShardKey]) -> None:
        """A member has read these too long ago."""
        for shard in shards:
            self._readers[shard][row] = 0
            if not self._readers[shard].any():
                del self._readers[shard]

    def only_free(self, *, keep: bool) -> int | None:
        """The row of the member that alone has free slots."""
        rows = self._open[keep]
        return next(iter(rows)) if len(rows) == 1 else None

    def nearness(self, row: int, reading: Reading) -> float:
        """Of one member to a work, as a share of its slots."""
        samples = sum(number for shard, number in reading.shards.items() if shard in self._readers and self._readers[shard][row])
        return (NEARNESS * samples + FAMILIARITY * reading.probed.get(row, 0)) / reading.num_samples

    def choose(self, reading: Reading, avoid: Collection[int], *, keep: bool, without_slot: bool = False) -> int | None:
        """The row of who takes a work that reads this, and whom not to `avoid`; None: nobody can.

        `without_slot`: where no slot is free, one that has none takes it.
        """
        free, rows = self._free[keep], self._open[keep]
        if len(rows) == 1 and not avoid:
            return next(iter(rows))
        if avoid:
            free = free.copy()
            free[list(avoid)] = -np.inf
            rows = rows.difference(avoid)
        if not (rows or without_slot):
            return None
        score = free + self._rank[keep] + self._near_slots(reading)
        if rows:
            score = np.where(free > 0, score, -np.inf)
        best = int(np.argmax(score))
        return best if score[best] > -np.inf else None

    def _near_slots(self, reading: Reading) -> npt.NDArray[np.float64]:
        """`nearness` of each row, in slots."""
        share = np.zeros(len(self._slots))
        for shard, number in reading.shards.items():
            if (readers := self._readers.get(shard)) is not None:
                share += readers * (NEARNESS * number / reading.num_samples)
        for row, number in reading.probed.items():
            share[row] += FAMILIARITY * number / reading.num_samples
        return share * self._slots

    def _grow(self) -> None:
        num_rows = max(8, 2 * len(self._slots))
        more = num_rows - len(self._slots)
        self._vacant = list(range(len(self._slots), num_rows))[::-1]
        self._slots = np.pad(self._slots, (0, more))
        self._rank = {keep: np.pad(rank, (0, more)) for keep, rank in self._rank.items()}
        self._free = {keep: np.pad(free, (0, more), constant_values=-np.inf) for keep, free in self._free.items()}
        self._readers = {shard: np.pad(readers, (0, more)) for shard, readers in self._readers.items()}
