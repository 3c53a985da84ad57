"""The global order: which sample stands at which place, as a pure function of manifest, weights, seed and epoch.

In each epoch the shards of a source are shuffled and cut into blocks of `shuffle_shards`, and the samples of a block are shuffled
together: singly, or in runs of `shuffle_rows` neighbouring rows. Without shuffling, shards and rows stay in the order of the
manifest. order.mixture mixes the sources. Both allow random access, so a resumed job computes nothing twice.

The order of the shards depends on nothing of their content but their number, and a place in the first epoch only on the rows of
the blocks up to its own. So shards are counted block by block as places are asked for: `to_count` says which are needed. What is
counted later changes no place that was told before.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from headrace.manifest import UNCOUNTED
from headrace.reorder_service.order.mixture import Mixture, Weights
from headrace.sample import SampleRef

Int64 = npt.NDArray[np.int64]

_STRETCH = 1024  # blocks that `take_up` looks at together
_TOGETHER = 64  # blocks that are counted at the same time where all of a source must be counted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceShards:
    """The shards of one source, and its weight in the mixture; None: by its size."""

    name: str
    shards: Int64
    """(n,) numbers of the shards in the manifest."""
    weight: float | None = None
    max_epochs: int | None = None
    """How often the source gives its samples at most; None: for ever."""
    repetitions: float = 1
    """How often an epoch of the job has the source's samples, if it has no weight."""


def permutation(n: int, key: int) -> Int64:
    """A permutation of range(n) that depends on `key` alone, not on any library's random stream.

    Sorts by the SplitMix64 hash of (key, i).
    """
    with np.errstate(over="ignore"):
        z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return np.argsort(z, kind="stable").astype(np.int64)


def _key(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()[:8], "little")


class SourceOrder:
    """The order of one source's samples over its endless epochs."""

    def __init__(
        self, source: SourceShards, num_rows: Int64, *, seed: int, shuffle_shards: int, shuffle_rows: int, shuffle: bool
    ) -> None:
        """`num_rows`: (N,) rows of every shard of the manifest, UNCOUNTED until it is known, as for GlobalOrder."""
        self._source = source
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._shuffle_shards = shuffle_shards
        self._shuffle_rows = shuffle_rows
        self._first = self._shuffled(0)
        self._ends = np.zeros(-(-len(self._first) // shuffle_shards), np.int64)  # end of each block of epoch 0, in samples
        self._num_known = 0  # how many leading blocks have all their shards counted
        self.num_samples = 0
        """Samples in the leading blocks that are counted; of the whole source once `is_counted`."""
        self._blocks = functools.lru_cache(maxsize=1)(self._epoch_blocks)
        self._block = functools.lru_cache(maxsize=2)(self._shuffled_block)
        self.take_up()

    @property
    def is_counted(self) -> bool:
        """Whether every shard of the source is counted, as far as `take_up` has seen."""
        return self._num_known == len(self._ends)

    def to_count(self, position: int, ahead: int = 0) -> list[int]:
        """Return the shards to count next on the way to sample number `position`, and those of `ahead` blocks after its own.

        Without `ahead`, an empty list means that `at` can find the sample.
        """
        block = int(np.searchsorted(self._ends[: self._num_known], position, side="right"))
        members = self._first[self._num_known * self._shuffle_shards : (block + 1 + ahead) * self._shuffle_shards]
        uncounted: list[int] = members[self._num_rows[members] == UNCOUNTED].tolist()
        return uncounted

    def at(self, positions: Int64) -> tuple[Int64, Int64]:
        """Return the shards and the rows of the samples at `positions`, which rise and count through all epochs.

        `to_count` says when they are known.
        """
        all_shards, all_rows = np.empty_like(positions), np.empty_like(positions)
        begun = 0
        while begun < len(positions):
            position = int(positions[begun])
            epoch, within = divmod(position, self.num_samples) if self.is_counted else (0, position)
            ends = self._ends[: self._num_known] if epoch == 0 else self._blocks(epoch)[1]
            block = int(np.searchsorted(ends, within, side="right"))
            first = position - within + (int(ends[block - 1]) if block else 0)
            shards, rows = self._block(epoch, block)
            end = int(np.searchsorted(positions, first + len(shards)))
            of_block = positions[begun:end] - first
            all_shards[begun:end], all_rows[begun:end] = shards[of_block], rows[of_block]
            begun = end
        return all_shards, all_rows

    def take_up(self) -> None:
        """Take in the leading blocks that have been counted meanwhile. Other threads may be in `at` at the same time.

        Raises ValueError where every shard is counted, and none has a sample.
        """
        size = self._shuffle_shards
        while self._num_known < len(self._ends):
            rows = self._num_rows[self._first[self._num_known * size : (self._num_known + _STRETCH) * size]]
            uncounted = np.flatnonzero(rows == UNCOUNTED)
            blocks = int(uncounted[0]) // size if len(uncounted) else -(-len(rows) // size)
            if blocks == 0:
                return
            ends = self.num_samples + np.cumsum(np.add.reduceat(rows, np.arange(0, len(rows), size))[:blocks])
            self._ends[self._num_known : self._num_known + blocks] = ends
            self.num_samples = int(ends[-1])
            self._num_known += blocks
        if self.num_samples == 0:
            raise ValueError(f"source {self._source.name!r} has no usable sample")

    def _shuffled(self, epoch: int) -> Int64:
        """Return the source's shards in the order of an epoch."""
        if not self._shuffle:
            return self._source.shards
        order = permutation(len(self._source.shards), _key(self._seed, self._source.name, epoch))
        return self._source.shards[order]

    def _epoch_blocks(self, epoch: int) -> tuple[Int64, Int64]:
        """Return the source's shards in the order of an epoch, and the end of each block in samples."""
        shuffled = self._shuffled(epoch)
        ends = np.cumsum(self._num_rows[shuffled])
        last_of_block = np.arange(self._shuffle_shards, len(ends) + self._shuffle_shards, self._shuffle_shards) - 1
        return shuffled, ends[np.minimum(last_of_block, len(ends) - 1)]

    def _shuffled_block(self, epoch: int, block: int) -> tuple[Int64, Int64]:
        order = self._first if epoch == 0 else self._blocks(epoch)[0]
        members = order[block * self._shuffle_shards : (block + 1) * self._shuffle_shards]
        counts = self._num_rows[members]
        shards = np.repeat(members, counts)
        rows = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        if not self._shuffle:
            return shards, rows
        key = _key(self._seed, self._source.name, epoch, block)
        begins = np.flatnonzero(rows % self._shuffle_rows == 0)  # of the runs of rows that stay together
        lengths = np.diff(begins, append=len(rows))
        runs = permutation(len(begins), key)
        ends = np.cumsum(lengths[runs])
        order = np.repeat(begins[runs] - ends + lengths[runs], lengths[runs]) + np.arange(len(rows))
        return shards[order], rows[order]


class GlobalOrder:
    """The order of all samples of a job: maps each place to a sample. The place is the `sample_id`."""

    def __init__(
        self,
        sources: Sequence[SourceShards],
        num_rows: Int64,
        *,
        seed: int,
        shuffle_shards: int,
        shuffle_rows: int = 1,
        shuffle: bool = True,
        changes: Sequence[tuple[int, Weights]] = (),
    ) -> None:
        """`num_rows`: (N,) rows of every shard of the manifest, UNCOUNTED until it is known; its owner fills it in over time.
        `shuffle_rows`: neighbouring rows of a shard that stay together. `shuffle`: False keeps shards and rows in order.
        `changes`: (place, weights of all sources from there on) each.

        Raises ValueError where a source has no sample, or weights are invalid.
        """
        self._orders = [
            SourceOrder(source, num_rows, seed=seed, shuffle_shards=shuffle_shards, shuffle_rows=shuffle_rows, shuffle=shuffle)
            for source in sources
        ]
        self._max_epochs = [source.max_epochs for source in sources]
        self._repetitions = [Fraction(str(source.repetitions)) for source in sources]  # as it is written: 0.29 * 100 are 29
        self._changes = changes
        self._most: dict[int, int] = {}  # source -> samples that it gives in all, of those whose end is known
        self._mixture: Mixture | None = None
        self._weights: Weights | None = None
        if len(sources) == 1 or all(source.weight for source in sources):
            self._weights = [source.weight or 1.0 for source in sources]
        self._mix()

    @property
    def is_counted(self) -> bool:
        """Whether every shard of the job is counted, as far as `to_count` has seen."""
        return all(order.is_counted for order in self._orders)

    def to_count(self, stop: int, epochs: int | None = None, ahead: int = 0) -> list[int]:
        """Return the shards to count next on the way to the places before `stop`, and of `ahead` further blocks of each source.

        Without `ahead`, an empty list means that `refs` can return the samples at these places. `epochs`: the job ends after
        these, so they must be known to have as many places. Sources that mix by their sizes are counted as a whole.

        Raises ValueError where a source has no sample.
        """
        for order in self._orders:
            order.take_up()
        self._mix()
        if self._mixture is None:
            return [shard for order in self._orders for shard in order.to_count(order.num_samples, _TOGETHER)]
        given = self._mixture.given(stop)
        further = epochs is not None and not self.reaches(stop, epochs)
        positions = [
            order.num_samples
            if further
            else max(0, int(n) - (most is None))  # whether the source ends at `stop` changes what follows
            for order, n, most in zip(self._orders, given, self._max_epochs, strict=True)
        ]
        return [
            shard for order, position in zip(self._orders, positions, strict=True) for shard in order.to_count(position, ahead)
        ]

    def reaches(self, stop: int, epochs: int) -> bool:
        """Return whether so many epochs are known to have `stop` places or more."""
        if self._mixture is None:
            return False
        if self.is_counted:
            return self.num_samples(epochs) >= stop
        given = self._mixture.given(stop)
        return any(self._mixture.is_endless(s) and self._num_given(s, epochs) > given[s] for s in range(len(self._orders)))

    def num_samples(self, epochs: int) -> int:
        """Return the number of places until every source has given all of its samples `epochs` times, or by its repetitions.

        With weights, the other sources repeat more often than the last. A source whose weight becomes 0 before that is not waited
        for, and one that may not give its samples as often only until it has given its last. Every shard must be counted.
        """
        assert self._mixture is not None
        given = [self._num_given(s, epochs) for s in range(len(self._orders))]
        if not any(given):  # repetitions that leave no whole sample
            given = [1] * len(given)
        last = [self._mixture.place(s, number - 1) for s, number in enumerate(given) if number]
        return 1 + max(place for place in last if place is not None)

    def shares(self, place: int) -> npt.NDArray[np.float64] | None:
        """Return the share of each source in the samples from a place on: (number of sources,). None while it is not known."""
        return None if self._mixture is None else self._mixture.shares(place)

    def _num_given(self, source: int, epochs: int) -> int:
        """Return how many samples a source gives until the end of so many epochs, of those that are counted; rounded down."""
        times = epochs * self._repetitions[source]
        return int(min(times, self._max_epochs[source] or times) * self._orders[source].num_samples)

    def _mix(self) -> None:
        """Mix the sources as soon as that is possible, and again when it is known where one of them ends.

        Places told before stay as they are, since `to_count` has looked further than them for sources that end.
        """
        most = {
            s: n * order.num_samples for s, order in enumerate(self._orders) if (n := self._max_epochs[s]) and order.is_counted
        }
        if self._mixture is None or most != self._most:
            weights = self._weights or (self._sizes() if self.is_counted else None)
            if weights is not None:
                self._most, self._mixture = most, Mixture(weights, self._changes, most)

    def _sizes(self) -> Weights:
        """Return how many samples an epoch has of each source, which need not be whole numbers."""
        return [float(order.num_samples * times) for order, times in zip(self._orders, self._repetitions, strict=True)]

    def refs(self, start: int, stop: int) -> list[SampleRef]:
        """Return the samples at places start .. stop - 1. Their shards must be counted, see `to_count`."""
        assert self._mixture is not None
        sources, positions = self._mixture.positions(start, stop).T
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        by_source = np.argsort(sources, kind="stable")
        giving, begins = np.unique(sources[by_source], return_index=True)
        for source, of_source in zip(giving.tolist(), np.split(by_source, begins)[1:], strict=True):
            shards[of_source], rows[of_source] = self._orders[source].at(positions[of_source])
        return [
            SampleRef(sample_id=place, shard=shard, row=row)
            for place, shard, row in zip(range(start, stop), shards.tolist(), rows.tolist(), strict=True)
        ]
