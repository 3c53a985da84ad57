"""Number partitioning with a limit: weights are spread evenly over bins, and no bin takes more than so many tokens.

Bins may have head starts, so that they end at different loads. Without head starts and limit, `fill` is LPT (`number_partition`).
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

NOWHERE = -1
"""Stands for the bin of an item that has none."""
_TRIES = 4  # bins that `deal` looks at for one item


@kernel
def deal(weights: Floats, order: Ints, heads: Floats, tokens: Ints, limit: int) -> Ints:
    """Deal n weights in the given order to B bins in turn, like cards: (n,) bin of each, or NOWHERE.

    A bin is passed over if it would grow heavier than the mean of all bins, or get more tokens than the limit. Items that a few
    bins in a row cannot take are left for `fill`. heads, tokens: as for `fill`. O(n + B), a fraction of what `fill` takes.
    """
    num_bins = heads.size
    bins = np.full(weights.size, NOWHERE)
    level = (weights.sum() + heads.sum()) / num_bins
    loads, used = heads.copy(), np.zeros(num_bins, np.int64)
    b = num_bins - 1
    for item in order:
        for _ in range(_TRIES):
            b = b + 1 if b + 1 < num_bins else 0
            if loads[b] + weights[item] <= level and used[b] + tokens[item] <= limit:
                bins[item] = b
                loads[b] += weights[item]
                used[b] += tokens[item]
                break
    return bins


@kernel
def fill(weights: Floats, order: Ints, heads: Floats, tokens: Ints, limit: int, bins: Ints) -> None:
    """Put each item that is NOWHERE, taken in the given order, into the lightest bin that has room for its tokens.

    weights: (n,). order: (n,) items. heads: (B,) loads that the bins have without any item. tokens: (n,) not negative, of which a
    bin takes at most `limit`. bins: (n,) changed in place; an item for which there is no room stays NOWHERE. Of equally light
    bins, the one with fewer items is taken, then the lower number. O(n log B), and O(B) for an item if the lightest has no room.
    """
    num_bins = heads.size
    loads, used, counts = heads.copy(), np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
    for item in range(bins.size):
        if bins[item] != NOWHERE:
            loads[bins[item]] += weights[item]
            used[bins[item]] += tokens[item]
            counts[bins[item]] += 1
    heap = np.arange(num_bins)
    for hole in range(num_bins // 2 - 1, -1, -1):
        _sink(heap, hole, loads, counts)
    for item in order:
        if bins[item] != NOWHERE:
            continue
        place = 0
        if used[heap[0]] + tokens[item] > limit:
            place = _lightest_with_room(heap, loads, counts, used, limit - tokens[item])
            if place == NOWHERE:
                continue
        b = heap[place]
        bins[item] = b
        loads[b] += weights[item]
        used[b] += tokens[item]
        counts[b] += 1
        _sink(heap, place, loads, counts)


@kernel
def _lightest_with_room(heap: Ints, loads: Floats, counts: Ints, used: Ints, most: int) -> int:
    """Return the place in the heap of the first bin to fill of those that hold at most so many tokens; NOWHERE if none does."""
    best = NOWHERE
    for place in range(heap.size):
        if used[heap[place]] <= most and (best == NOWHERE or _precedes(heap[place], heap[best], loads, counts)):
            best = place
    return best


@kernel
def _sink(heap: Ints, hole: int, loads: Floats, counts: Ints) -> None:
    """Restore the order of the heap below `hole`, whose bin may have become too heavy for its place."""
    moving = heap[hole]
    while 2 * hole + 1 < heap.size:
        child = 2 * hole + 1
        if child + 1 < heap.size and _precedes(heap[child + 1], heap[child], loads, counts):
            child += 1
        if not _precedes(heap[child], moving, loads, counts):
            break
        heap[hole] = heap[child]
        hole = child
    heap[hole] = moving


@kernel
def _precedes(a: int, b: int, loads: Floats, counts: Ints) -> bool:
    """Return whether bin a is to be filled before bin b."""
    if loads[a] != loads[b]:
        return bool(loads[a] < loads[b])
    if counts[a] != counts[b]:
        return bool(counts[a] < counts[b])
    return a < b


@kernel
def first_fit(tokens: Ints, order: Ints, num_bins: int, limit: int) -> Ints:
    """Put each item, taken in the given order, into the first bin that has room for its tokens: (n,) bin of each, or NOWHERE.

    With items by falling tokens this is first-fit decreasing, which finds room for more than `fill` does: it needs at most 11/9
    of the least number of bins, and less than one more (Dosa, 2007). O(n log B): the bins are the leaves of a tree whose nodes
    know the most room below them.
    """
    width = 1
    while width < num_bins:
        width *= 2
    room = np.full(2 * width, -1)
    room[width : width + num_bins] = limit
    for node in range(width - 1, 0, -1):
        room[node] = max(room[2 * node], room[2 * node + 1])
    bins = np.full(tokens.size, NOWHERE)
    for item in order:
        if room[1] < tokens[item]:
            continue
        node = 1
        while node < width:
            node = 2 * node if room[2 * node] >= tokens[item] else 2 * node + 1
        bins[item] = node - width
        room[node] -= tokens[item]
        while node > 1:
            node >>= 1
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins
