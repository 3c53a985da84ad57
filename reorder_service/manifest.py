"""A job's manifest: its shards and how many rows each has, listed and counted once by preprocessors, then kept in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headrace.codec import rejection_value, shard_value, vocabulary_value
from headrace.errors import JobFailedError
from headrace.manifest import ShardInfo, Vocabulary
from headrace.spec import JobSpec
from headrace.v1.fleet_pb2 import FleetOrder
from reorder_service import messages
from reorder_service.mixture import Weights
from reorder_service.order import GlobalOrder, SourceShards
from reorder_service.state import JobRecord, StateStore

Ask = Callable[[tuple[int, ...], Callable[[str], FleetOrder], Mapping[int, int]], Awaitable[Any]]
"""Has any preprocessor carry out an order, given the priority, the order's maker and the shards it reads; its report."""

_PRIORITY = -1  # before any step's work


class CountedShards:
    """What the global order of a job is made of: its shards, and how many rows each has as far as they are counted."""

    def __init__(self, spec: JobSpec, shards: Sequence[ShardInfo], indexed: Mapping[int, int]) -> None:
        self.shards: list[ShardInfo] = list(shards)
        self.indexed: dict[int, int] = dict(indexed)
        """Shard -> rows."""
        self._spec = spec

    def source_of(self, shard: int) -> str:
        """The name of a shard's source."""
        return self._spec.sources[self.shards[shard].source].name

    def num_samples(self, source: int) -> int:
        """Of a source's shards, as far as they are indexed."""
        return sum(self.indexed.get(number, 0) for number, shard in enumerate(self.shards) if shard.source == source)

    def order(self, changes: Sequence[tuple[int, Weights]] = ()) -> GlobalOrder:
        """`changes`: other weights from a place on. Raises JobFailedError where a source has no usable sample."""
        sources = []
        for s, source in enumerate(self._spec.sources):
            shards = tuple(i for i, shard in enumerate(self.shards) if shard.source == s)
            num_rows = tuple(self.indexed[i] for i in shards)
            sources.append(SourceShards(name=source.name, shards=shards, num_rows=num_rows, weight=source.weight))
        try:
            return GlobalOrder(sources, seed=self._spec.seed, shuffle_shards=self._spec.shuffle_shards, changes=changes)
        except ValueError as err:
            raise JobFailedError(f"{err}; `headrace inspect` shows why its samples are refused") from err


class Manifest(CountedShards):
    """Complete once `list_shards` and `index_shards` are through; what the store has already is not asked for again."""

    def __init__(self, record: JobRecord, spec: JobSpec, store: StateStore) -> None:
        super().__init__(spec, record.shards, record.indexed)
        self.vocabulary: Vocabulary | None = record.vocabulary
        self._job = record.job
        self._store = store

    async def list_shards(self, ask: Ask) -> None:
        """Find the shards. Raises JobFailedError where a data set cannot be read."""
        reply = await ask((_PRIORITY,), lambda lease: messages.list_shards(lease, self._job), {})
        shards = [shard_value(message) for message in reply.shards]
        vocabulary = vocabulary_value(reply.vocabulary)
        await self._store.save_manifest(self._job, shards, vocabulary)
        self.shards, self.vocabulary = shards, vocabulary

    async def index_shards(self, ask: Ask) -> None:
        """Count the rows of every shard."""
        async with asyncio.TaskGroup() as group:
            for shard in range(len(self.shards)):
                if shard not in self.indexed:
                    group.create_task(self._index_shard(ask, shard))

    async def _index_shard(self, ask: Ask, shard: int) -> None:
        reply = await ask((_PRIORITY, shard), lambda lease: messages.index_shard(lease, self._job, shard), {shard: 1})
        rejected = [rejection_value(item) for item in reply.rejections]
        await self._store.save_index(self._job, shard, reply.num_samples, rejected)
        self.indexed[shard] = reply.num_samples
