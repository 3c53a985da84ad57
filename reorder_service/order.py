"""The global order: which sample stands at which place, as a pure function of manifest, weights, seed and epoch.

A source's epoch: its shards in shuffled order, cut into blocks of `shuffle_shards`; the samples of a block are shuffled
together. How sources mix is in reorder_service.mixture. Both allow random access, so a resumed job computes nothing twice.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.sample import SampleRef
from reorder_service.mixture import Mixture, Weights

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShards:
    """A source's part of the manifest: indices of its shards and how many samples each holds."""

    name: str
    shards: tuple[int, ...]
    num_rows: tuple[int, ...]
    weight: float | None = None

    @property
    def num_samples(self) -> int:
        return sum(self.num_rows)


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

    def __init__(self, source: SourceShards, *, seed: int, shuffle_shards: int) -> None:
        self._source = source
        self._seed = seed
        self._shuffle_shards = shuffle_shards
        self._shards = np.array(source.shards, dtype=np.int64)
        self._num_rows = np.array(source.num_rows, dtype=np.int64)
        self.num_samples = source.num_samples
        self._blocks = functools.lru_cache(maxsize=1)(self._epoch_blocks)
        self._block = functools.lru_cache(maxsize=2)(self._shuffled_block)

    def at(self, position: int) -> tuple[int, int]:
        """(shard, row) of the source's sample number `position`; epochs follow each other."""
        epoch, within = divmod(position, self.num_samples)
        _, ends = self._blocks(epoch)
        block = int(np.searchsorted(ends, within, side="right"))
        start = int(ends[block - 1]) if block else 0
        shards, rows = self._block(epoch, block)
        return int(shards[within - start]), int(rows[within - start])

    def _epoch_blocks(self, epoch: int) -> tuple[Int64, Int64]:
        """Shuffled positions of the shards, and the end of each block in samples."""
        shuffled = permutation(len(self._shards), _key(self._seed, self._source.name, epoch))
        ends = np.cumsum(self._num_rows[shuffled])
        last_of_block = np.arange(self._shuffle_shards, len(ends) + self._shuffle_shards, self._shuffle_shards) - 1
        return shuffled, ends[np.minimum(last_of_block, len(ends) - 1)]

    def _shuffled_block(self, epoch: int, block: int) -> tuple[Int64, Int64]:
        members = self._blocks(epoch)[0][block * self._shuffle_shards : (block + 1) * self._shuffle_shards]
        counts = self._num_rows[members]
        shards = np.repeat(self._shards[members], counts)
        rows = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        order = permutation(len(shards), _key(self._seed, self._source.name, epoch, block))
        return shards[order], rows[order]


class GlobalOrder:
    """The order of a job: place -> sample. A place is a sample's `sample_id`."""

    def __init__(
        self, sources: list[SourceShards], *, seed: int, shuffle_shards: int, changes: Sequence[tuple[int, Weights]] = ()
    ) -> None:
        """`changes`: other weights from a place on. Raises ValueError where a source has no sample, or weights are none."""
        for source in sources:
            if source.num_samples == 0:
                raise ValueError(f"source {source.name!r} has no usable sample")
        self._orders = [SourceOrder(source, seed=seed, shuffle_shards=shuffle_shards) for source in sources]
        self._sizes = [source.num_samples for source in sources]
        self._mixture = Mixture([source.weight or source.num_samples for source in sources], changes)

    def num_samples(self, epochs: int) -> int:
        """Places until the last of the sources has had all of its samples `epochs` times. With weights, the others repeat.

        A source whose weight has become 0 before is not waited for.
        """
        last = [self._mixture.place(source, epochs * size - 1) for source, size in enumerate(self._sizes)]
        return 1 + max(place for place in last if place is not None)

    def refs(self, start: int, stop: int) -> list[SampleRef]:
        """The samples at places start .. stop - 1."""
        refs = []
        for place, (source, position) in enumerate(self._mixture.positions(start, stop), start):
            shard, row = self._orders[source].at(position)
            refs.append(SampleRef(sample_id=place, shard=shard, row=row))
        return refs
