"""Shards are counted just before the window needs them: the blocks that come next, and some behind, so that it need not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.reorder_service.jobs.batches import Layout
from headrace.reorder_service.jobs.counted_shards import Ask, Manifest

BLOCKS_AHEAD = 2  # of each source; with 16 shards of 1,000 samples a block, some 30,000 samples behind those that are needed
INDEX = (
    -1
)  # among a step's work: before its probing (headrace.reorder_service.jobs.work_orders), and after that of the steps before


class Indexing:
    """What is being counted of one job, in one event loop."""

    def __init__(self, manifest: Manifest, layout: Layout, ask: Ask, on_counted: Callable[[], None]) -> None:
        """`on_counted`: called after each shard."""
        self._manifest = manifest
        self._layout = layout
        self._ask = ask
        self._on_counted = on_counted
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def go_on(self, group: asyncio.TaskGroup, step: int) -> None:
        """Have the shards counted that come next on the way to `step` and behind it, as tasks of the group.

        Raises JobFailedError where a source has no usable sample, and so does the group where a shard cannot be read.
        """
        for place, shard in enumerate(self._layout.to_count(step, BLOCKS_AHEAD)):
            if shard not in self._tasks:
                self._tasks[shard] = group.create_task(self._count(shard, (step, INDEX, place)))

    def stop(self) -> None:
        """Nothing that is under way is needed any more."""
        for task in self._tasks.values():
            task.cancel()

    async def _count(self, shard: int, priority: tuple[int, ...]) -> None:
        await self._manifest.count(self._ask, shard, priority)
        del self._tasks[shard]
        self._on_counted()
