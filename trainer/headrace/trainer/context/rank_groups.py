"""Process groups of some of all ranks, made when they are first asked for: of the ranks that share a sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from headrace.errors import UserError

MOST_GROUPS = 32
"""Groups that a rank is in at a time. Each has its connections, and on GPUs some buffers."""


class RankGroups:
    """Groups of some of all ranks, each made when it is first asked for, by all ranks together.

    Torch numbers groups by how many each process has made: were they made by their own ranks alone, these would miss each other.
    They are kept for later microbatches, as long as no rank is in more than `most`: of a rank that would be, the one that was
    asked for least recently is given up. So choose from few sets of ranks, such as neighbours.
    """

    def __init__(self, group: dist.ProcessGroup, *, most: int = MOST_GROUPS) -> None:
        """group: of all ranks. most: groups that are kept of each rank.

        Raises UserError for a group that some processes are not in.
        """
        if (size := dist.get_world_size(group)) != dist.get_world_size():
            raise UserError(
                f"sequences of different degrees are shared by all {dist.get_world_size()} ranks, but the group has {size}: give "
                "the group of all ranks, or leave out degrees"
            )
        self.group = group
        self._most = most
        self._kept: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """By ranks, those that were asked for last at the end."""

    def of_sets(self, sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
        """Return the group of each set of rising ranks; None: of one alone. A collective call of all ranks, with the same sets.

        They last until `most` others of a rank were asked for later: run the backward of what attends with them before that.
        """
        wanted = dict.fromkeys(sets)
        found: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        new = []
        for ranks in wanted:
            if len(ranks) == 1 or len(ranks) == dist.get_world_size(self.group):
                found[ranks] = None if len(ranks) == 1 else self.group
            elif ranks in self._kept:
                found[ranks] = self._kept[ranks] = self._kept.pop(ranks)
            else:
                new.append(ranks)
        surplus = self._surplus(new, wanted)
        if surplus and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # nothing runs any more on a group once all ranks meet in a new one
        for ranks in new:
            found[ranks] = self._kept[ranks] = dist.new_group(list(ranks))
        for ranks in surplus:
            dist.destroy_process_group(self._kept.pop(ranks))
        return found

    def _surplus(self, new: Iterable[tuple[int, ...]], wanted: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the kept sets that are given up for new ones, but none of those wanted now."""
        counts = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64)
        for ranks in (*self._kept, *new):
            counts[list(ranks)] += 1
        surplus = []
        for ranks in self._kept:
            if ranks not in wanted and bool((counts[list(ranks)] > self._most).any()):
                counts[list(ranks)] -= 1
                surplus.append(ranks)
        return surplus
