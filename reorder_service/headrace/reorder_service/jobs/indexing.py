"""Counts shards just before the window needs them: the blocks that come next, and some more, so that it need not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.manifest import UNCOUNTED
from headrace.reorder_service.jobs.batches import GlobalBatches
from headrace.reorder_service.jobs.counted_shards import Ask, Manifest
from headrace.reorder_service.jobs.work_orders import WorkKind

BLOCKS_AHEAD = 2  # of each source; with 16 shards of 1,000 samples a block, some 30,000 samples beyond those that are needed


class Indexing:
    """Counts the shards of one job, as tasks in one event loop."""

    def __init__(self, manifest: Manifest, batches: GlobalBatches, ask: Ask, on_counted: Callable[[], None]) -> None:
        """`on_counted`: called whenever a shard has been counted."""
        self._manifest = manifest
        self._batches = batches
        self._ask = ask
        self._on_counted = on_counted
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._first: list[int] | None = None

    def go_on(self, group: asyncio.TaskGroup, step: int, *, ahead: bool = True) -> None:
        """Begin to count the shards that come next on the way to `step`, as tasks of the group; if `ahead`, BLOCKS_AHEAD more.

        The first block of each source is counted alone, and a job without a plan should count none ahead: some shards are
        downloaded to be counted, and a job that begins waits for its first batch. Raises JobFailedError where a source has no
        usable sample; the group raises it where a shard cannot be read.
        """
        if self._first is None:
            self._first = self._batches.to_count(step)
        first = [shard for shard in self._first if self._manifest.num_rows[shard] == UNCOUNTED]
        for place, shard in enumerate(first or self._batches.to_count(step, BLOCKS_AHEAD if ahead else 0)):
            if shard not in self._tasks:
                self._tasks[shard] = group.create_task(self._count(shard, (step, WorkKind.INDEX, place)))

    def stop(self) -> None:
        """Cancel all counting that is under way: its results are needed no more."""
        for task in self._tasks.values():
            task.cancel()

    async def _count(self, shard: int, priority: tuple[int, ...]) -> None:
        await self._manifest.count(self._ask, shard, priority)
        del self._tasks[shard]
        self._on_counted()
