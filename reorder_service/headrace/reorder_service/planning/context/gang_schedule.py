"""Which ranks take which sequences, and when, if each sequence takes a number of ranks at once.

Sequences are taken one after the other, and each begins as soon as enough ranks are free (list scheduling of rigid parallel
tasks; Garey and Graham, 1975). One that fits into a node gets ranks of one node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GangSchedule:
    """When n sequences begin, and on which ranks."""

    degrees: Ints
    """(n,) number of ranks of each."""
    starts_s: Floats
    """(n,) seconds from the beginning of the step."""
    ends_s: Floats
    """(n,)."""
    offsets: Ints
    """(n + 1,): sequence i has members[offsets[i]:offsets[i + 1]]."""
    members: Ints
    """Ranks, rising for each sequence."""

    @property
    def step_s(self) -> float:
        """When the last sequence ends."""
        return float(self.ends_s.max(initial=0.0))

    def ranks_of(self, sequence: int) -> Ints:
        """Return the ranks of one sequence, rising."""
        return self.members[self.offsets[sequence] : self.offsets[sequence + 1]]


def schedule(order: Ints, degrees: Ints, seconds: Floats, num_ranks: int, ranks_per_node: int) -> GangSchedule:
    """Take n sequences in the given order; `seconds` (n,) are those that each takes on its number of ranks.

    The last node has what is left of the ranks. Raises ValueError where a sequence is to have more ranks than there are.
    """
    if degrees.size and not 1 <= degrees.min() <= degrees.max() <= num_ranks:
        raise ValueError(f"a sequence has 1 to {num_ranks} ranks, got {degrees.min()} to {degrees.max()}")
    offsets = np.concatenate([[0], np.cumsum(degrees)])
    starts, members = _schedule(order, degrees, seconds, offsets, num_ranks, ranks_per_node)
    return GangSchedule(degrees=degrees, starts_s=starts, ends_s=starts + seconds, offsets=offsets, members=members)


@kernel
def step_time(order: Ints, degrees: Ints, seconds: Floats, num_ranks: int, ranks_per_node: int) -> float:
    """Return when the last sequence ends if they are taken in the given order, as `schedule` does."""
    offsets = np.zeros(degrees.size + 1, np.int64)
    offsets[1:] = np.cumsum(degrees)
    return float((_schedule(order, degrees, seconds, offsets, num_ranks, ranks_per_node)[0] + seconds).max())


@kernel
def _schedule(
    order: Ints, degrees: Ints, seconds: Floats, offsets: Ints, num_ranks: int, ranks_per_node: int
) -> tuple[Floats, Ints]:
    """Return the (n,) starts of the sequences and the ranks of all of them.

    `free` has when the ranks are free, and `ranks` which they are: those of each node by rising time.
    """
    starts, members = np.empty(degrees.size), np.empty(offsets[-1], np.int64)
    free, ranks = np.zeros(num_ranks), np.arange(num_ranks)
    for i in order:
        degree, chosen = degrees[i], members[offsets[i] : offsets[i + 1]]
        best, start, idle = -1, np.inf, np.inf
        if degree <= ranks_per_node:
            for first in range(0, num_ranks - degree + 1, ranks_per_node):
                if first + degree > min(num_ranks, first + ranks_per_node):
                    continue
                begins = free[first + degree - 1]
                if begins > start:
                    continue
                waits = degree * begins - free[first : first + degree].sum()
                if begins < start or waits < idle:
                    start, idle, best = begins, waits, first
        if best >= 0:
            chosen[:] = ranks[best : best + degree]
            starts[i] = start
            free[best : best + degree] = start + seconds[i]
            _sort(free, ranks, best, min(num_ranks, best + ranks_per_node))
        else:
            earliest = np.argsort(free, kind="mergesort")[:degree]
            starts[i] = free[earliest[-1]]
            chosen[:] = ranks[earliest]
            free[earliest] = starts[i] + seconds[i]
            for first in range(0, num_ranks, ranks_per_node):
                _sort(free, ranks, first, min(num_ranks, first + ranks_per_node))
        chosen.sort()
    return starts, members


@kernel
def _sort(free: Floats, ranks: Ints, first: int, end: int) -> None:
    """Sort the ranks of one node by when they are free, and equal ones by number."""
    for i in range(first + 1, end):
        time, rank, hole = free[i], ranks[i], i
        while hole > first and (free[hole - 1] > time or (free[hole - 1] == time and ranks[hole - 1] > rank)):
            free[hole], ranks[hole] = free[hole - 1], ranks[hole - 1]
            hole -= 1
        free[hole], ranks[hole] = time, rank
