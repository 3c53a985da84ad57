"""A job's manifest: its shards and how many rows each has, listed and counted by preprocessors, then kept in the store."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.errors import JobFailedError
from headrace.manifest import UNCOUNTED, ShardTable, Vocabulary
from headrace.message_codec import rejection_value, shard_message, shard_table, vocabulary_value
from headrace.observability import metrics
from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.jobs import fleet_messages
from headrace.reorder_service.order.global_order import GlobalOrder, Int64, SourceShards
from headrace.reorder_service.order.mixture import Weights
from headrace.reorder_service.store.state import JobRecord, StateStore
from headrace.sample import SampleRef
from headrace.spec import JobSpec
from headrace.v1.common_pb2 import Shard
from headrace.v1.fleet_pb2 import FleetOrder

Ask = Callable[[tuple[int, ...], Callable[[str], FleetOrder], Mapping[int, int]], Awaitable[Any]]
"""Function that has any preprocessor carry out an order, and returns its report.

Its arguments are the priority, a function that makes the order for a lease, and how many samples the order reads of which shards.
"""

_LIST_PRIORITY = (-1,)  # before any step's work
_MESSAGES = 4096  # messages of shards that are cached, a few hundred bytes each


class CountedShards:
    """The input of a job's global order: its shards, and how many rows each has, as far as they are counted."""

    def __init__(self, spec: JobSpec, shards: ShardTable, num_rows: Int64) -> None:
        """`num_rows`: (n,) rows of each shard, UNCOUNTED where they are not known."""
        self.shards = shards
        self.num_rows = num_rows
        self.message = functools.lru_cache(maxsize=_MESSAGES)(self._message)
        """Returns the message of a shard by its number. Cached, since all orders of a step have the same few shards."""
        self.refused: dict[int, tuple[int, Rejected]] = {}
        """Of each source the first shard that was found to have no row, and what is wrong with it, as far as that is known."""
        self._spec = spec

    def _message(self, shard: int) -> Shard:
        return shard_message(shard, self.shards[shard])

    @property
    def num_counted(self) -> int:
        return int(np.count_nonzero(self.num_rows != UNCOUNTED))

    def successor(self, ref: SampleRef, distance: int) -> SampleRef:
        """Return the sample `distance` rows after `ref` in its shard, at the same place; after the last row comes the first."""
        return SampleRef(sample_id=ref.sample_id, shard=ref.shard, row=(ref.row + distance) % int(self.num_rows[ref.shard]))

    def source_of(self, shard: int) -> str:
        """Return the name of a shard's source."""
        return self._spec.sources[self.source_number(shard)].name

    def source_number(self, shard: int) -> int:
        """Return the number of a shard's source in the job."""
        return int(self.shards.sources[shard])

    def num_samples(self) -> Int64:
        """Return how many samples each source has in the shards counted so far: (number of sources,)."""
        counts = np.zeros(len(self._spec.sources), np.int64)
        np.add.at(counts, self.shards.sources, self.num_rows.clip(min=0))
        return counts

    def empty_source(self) -> int | None:
        """Return the number of a source all of whose shards are counted and have no row; None where there is none."""
        numbers = range(len(self._spec.sources))
        return next((number for number in numbers if not self.num_rows[self.shards.sources == number].any()), None)

    def why_empty(self, source: int) -> str:
        """Return why such a source has no row, in words that name a file."""
        shards = np.flatnonzero(self.shards.sources == source)
        first, damage = self.refused.get(source, (int(shards[0]), None))
        what = "has no row" if damage is None else f"is refused ({damage.reason}: {damage.detail})"
        more = f", and {len(shards) - 1} more shards have no row" if len(shards) > 1 else ""
        return f"{self.shards[first].url} {what}{more}"

    def order(self, changes: Sequence[tuple[int, Weights]] = ()) -> GlobalOrder:
        """Return the global order of the shards; it takes in what is counted later.

        `changes`: (place, weights from there on) each. Raises ValueError where a source has no sample, or weights are invalid.
        """
        sources = [
            SourceShards(
                name=source.name,
                shards=np.flatnonzero(self.shards.sources == s),
                weight=source.weight,
                max_epochs=source.max_epochs,
                repetitions=source.repetitions or 1,
            )
            for s, source in enumerate(self._spec.sources)
        ]
        spec = self._spec
        return GlobalOrder(
            sources,
            self.num_rows,
            seed=spec.seed,
            shuffle_shards=spec.shuffle_shards,
            shuffle_rows=spec.shuffle_rows,
            shuffle=spec.shuffle,
            changes=changes,
        )


class Manifest(CountedShards):
    """A job's manifest, kept in the store. It is empty until `load`, or, where the store has none, until `list_shards`."""

    def __init__(self, record: JobRecord, spec: JobSpec, store: StateStore) -> None:
        super().__init__(spec, ShardTable(), np.empty(0, np.int64))
        self.vocabulary: Vocabulary | None = record.vocabulary
        self.damaged: Counter[Reason] = Counter()
        """Samples and shards that were found damaged while shards were counted since the job was loaded."""
        self._job = record.job
        self._store = store

    async def load(self) -> None:
        """Load the manifest from the store, if it has one. A list of shards that was not saved to its end is not used."""
        if self.vocabulary is not None:
            self.shards, self.num_rows = await self._store.load_manifest(self._job)

    async def list_shards(self, ask: Ask) -> None:
        """Have a preprocessor list the shards, and save the list.

        Raises JobFailedError where a data set cannot be read, or the list does not fit the job.
        """
        reply = await ask(_LIST_PRIORITY, lambda lease: fleet_messages.list_shards(lease, self._job), {})
        shards = await asyncio.to_thread(self._checked, reply.shards)
        vocabulary = vocabulary_value(reply.vocabulary)
        await self._store.save_manifest(self._job, shards, vocabulary)
        self.shards, self.num_rows = shards, np.full(len(shards), UNCOUNTED, np.int64)
        self.vocabulary = vocabulary

    @property
    def is_unusable(self) -> bool:
        """Whether a source is known to have no row."""
        return self.vocabulary is not None and self.empty_source() is not None

    async def forget(self) -> None:
        """Set the job to INDEXING without the list of shards, so that they are listed anew. It must not have committed a step."""
        await self._store.list_anew(self._job)
        self.vocabulary = None
        self.refused.clear()
        self.damaged.clear()
        self.message.cache_clear()

    def _checked(self, listed: Sequence[Shard]) -> ShardTable:
        """Return the shards that a preprocessor has listed as a table.

        Raises JobFailedError for an impossible source or number: what is once in the store stays there for good.
        """
        num_sources = len(self._spec.sources)
        for place, shard in enumerate(listed):
            if shard.source not in range(num_sources) or shard.number != place:
                raise JobFailedError(
                    f"a preprocessor listed shard {shard.number} of source {shard.source} of job {self._job!r} at place {place}: "
                    f"shards are numbered by their places, and sources from 0 to {num_sources - 1}; "
                    "run the same release on both sides and submit the job again"
                )
        return shard_table(listed)

    async def count(self, ask: Ask, shard: int, priority: tuple[int, ...]) -> None:
        """Have a preprocessor count the rows of a shard, and save the number. Raises JobFailedError where it cannot be read."""
        reply = await ask(priority, lambda lease: fleet_messages.index_shard(lease, self._job, self.message(shard)), {shard: 1})
        rejected = [rejection_value(item) for item in reply.rejections]
        await self._store.save_index(self._job, shard, reply.num_samples, rejected)
        self.num_rows[shard] = reply.num_samples
        if rejected and not reply.num_samples:
            self.refused.setdefault(self.source_number(shard), (shard, rejected[0]))
        for item in rejected:
            self.damaged[item.reason] += 1
            metrics.QUARANTINED_SAMPLES.labels(item.reason).inc()
