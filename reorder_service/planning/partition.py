"""Number partitioning: spread weights over bins so that the heaviest bin is as light as possible.

LPT (longest processing time first; Graham, 1969) takes weights in descending order and puts each into the lightest bin so
far. Its heaviest bin is at most 4/3 - 1/(3 m) times the optimum of m bins.
"""

from __future__ import annotations

import numpy as np

from reorder_service.planning.batch import Floats, Ints
from reorder_service.planning.kernel import kernel


def descending(weights: Floats) -> Ints:
    """(n,) positions by falling weight; equal weights keep their order, so that plans are reproducible."""
    return np.argsort(-weights, kind="stable")


@kernel
def _precedes(loads: Floats, counts: Ints, a: int, b: int) -> bool:
    """Whether bin a is to be filled before bin b: lighter, else fewer items, else the lower number."""
    if loads[a] != loads[b]:
        return bool(loads[a] < loads[b])
    if counts[a] != counts[b]:
        return bool(counts[a] < counts[b])
    return a < b


@kernel
def lpt(weights: Floats, order: Ints, num_bins: int) -> Ints:
    """(n,) bin of each of n weights, taken in the given order (see `descending`). O(n log bins): the bins form a heap.

    Equally light bins: the one with fewer items, then the lower number. So weights of zero are dealt out evenly, and no
    bin stays empty while there are items enough.
    """
    bins = np.empty(weights.size, np.int64)
    loads = np.zeros(num_bins)
    counts = np.zeros(num_bins, np.int64)
    heap = np.arange(num_bins)
    for item in order:
        top = heap[0]
        bins[item] = top
        loads[top] += weights[item]
        counts[top] += 1
        hole = 0
        while 2 * hole + 1 < num_bins:
            child = 2 * hole + 1
            if child + 1 < num_bins and _precedes(loads, counts, heap[child + 1], heap[child]):
                child += 1
            if not _precedes(loads, counts, heap[child], top):
                break
            heap[hole] = heap[child]
            hole = child
        heap[hole] = top
    return bins


def rank_in_bin(order: Ints, bins: Ints) -> Ints:
    """(n,) place of each item among its bin's items, counted along `order`."""
    by_bin = order[np.argsort(bins[order], kind="stable")]
    counts = np.bincount(bins)
    first = np.cumsum(counts) - counts
    rank = np.empty_like(by_bin)
    rank[by_bin] = np.arange(bins.size) - np.repeat(first, counts)
    return rank
