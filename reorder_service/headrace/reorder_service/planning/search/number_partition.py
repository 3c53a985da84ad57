"""Number partitioning: spread weights over bins so that the heaviest bin is as light as possible.

LPT (longest processing time first; Graham, 1969) takes weights in descending order and puts each into the lightest bin so
far. With m bins, its heaviest bin is at most 4/3 - 1/(3 m) times that of the optimum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

_DIGIT = 11  # bits of a digit: three digits are a bit more than the upper half of a weight
_SHORT = 32  # longest run of neighbours for which insertion sort is faster than merge sort


def descending(weights: Floats) -> Ints:
    """Return (n,) positions by falling weight; equal weights keep their order, so that plans are reproducible. O(n).

    A radix sort by the upper half of the weights, after which those that agree in the upper 20 bits of their fraction are sorted.
    """
    return _by_weight(np.ascontiguousarray(weights, np.float64))


@kernel
def _by_weight(weights: Floats) -> Ints:
    """Return (n,) positions by falling weight."""
    if weights.size <= _SHORT:
        few = np.arange(weights.size)
        _insert(weights, few, 0, few.size)
        return few
    upper = _rising_as_weights_fall(weights)
    order, other = np.arange(weights.size), np.empty(weights.size, np.int64)
    for shift in range(0, 33, _DIGIT):
        _by_digit(upper, shift, order, other)
        order, other = other, order
    start = 0
    while start < order.size:
        end = start + 1
        while end < order.size and upper[order[end]] == upper[order[start]]:
            end += 1
        if end - start > _SHORT:
            run = order[start:end]
            order[start:end] = run[np.argsort(-weights[run], kind="mergesort")]
        else:
            _insert(weights, order, start, end)
        start = end
    return order


@kernel
def _rising_as_weights_fall(weights: Floats) -> NDArray[np.uint32]:
    """Return the (n,) upper halves of the weights' bits, so changed that their order is the reverse of that of the weights."""
    keys = np.empty(weights.size, np.uint32)
    bits = (weights + 0.0).view(np.int64)  # the sum turns -0.0 into 0.0
    for i in range(weights.size):
        half = bits[i] >> 32
        keys[i] = np.uint32(half & 0xFFFFFFFF if half < 0 else half ^ 0x7FFFFFFF)
    return keys


@kernel
def _by_digit(keys: NDArray[np.uint32], shift: int, order: Ints, into: Ints) -> None:
    """Put positions into the order of one digit of their keys; those of equal digits keep their order."""
    starts = np.zeros((1 << _DIGIT) + 1, np.int64)
    mask = (1 << _DIGIT) - 1
    for i in range(keys.size):
        starts[((keys[i] >> shift) & mask) + 1] += 1
    for digit in range(1 << _DIGIT):
        starts[digit + 1] += starts[digit]
    for i in order:
        digit = (keys[i] >> shift) & mask
        into[starts[digit]] = i
        starts[digit] += 1


@kernel
def _insert(weights: Floats, order: Ints, start: int, end: int) -> None:
    """Stable insertion sort of order[start:end] by falling weight."""
    for i in range(start + 1, end):
        item, hole = order[i], i
        while hole > start and weights[order[hole - 1]] < weights[item]:
            order[hole] = order[hole - 1]
            hole -= 1
        order[hole] = item


def lpt(weights: Floats, order: Ints, num_bins: int) -> Ints:
    """Put each of n weights, taken in the given order, into the lightest bin so far: (n,) bin of each. O(n log bins).

    With the order of `descending` this is LPT. Of equally light bins, the one with fewer items is taken, then the lower number.
    So weights of zero are dealt out evenly, and no bin stays empty while there are items enough.
    """
    bins = np.empty(order.size, np.int64)
    bins[order] = _lightest_bins(weights[order], num_bins)
    return bins


@kernel
def lpt_of_groups(weights: Floats, order: Ints, group: Ints, num_groups: int, num_bins: int) -> Ints:
    """Put the weights of each group into bins of its own as `lpt` does, all of them in the given order: (n,) bin of each."""
    starts, members = _members(order, group, num_groups)
    bins = np.empty(order.size, np.int64)
    for g in range(num_groups):
        of_group = members[starts[g] : starts[g + 1]]
        found = _lightest_bins(weights[of_group], num_bins)
        for i in range(of_group.size):
            bins[of_group[i]] = found[i]
    return bins


@kernel
def lpt_of_rounds(weights: Floats, order: Ints, group: Ints, is_open: NDArray[np.bool_], share: float) -> Ints:
    """Put the weights of each group by LPT into as many lots as bins are open to it, and each lot into a bin: (n,) bin of each.

    The groups come in turn, that with the heaviest weight first. The heaviest lot of a group goes to the bin that is the lightest
    so far, and so on; of equal ones the first. A bin that has its share takes no more, unless all bins that are open to the group
    have theirs.

    order: (n,) as `descending` has it. group: (n,) group of each weight. is_open: (groups, bins), whether a bin may take of a
    group; one at least may of each group that has a weight. share: weight of one bin.
    """
    num_groups, num_bins = is_open.shape
    starts, falling = _members(order, group, num_groups)
    _, rising = _members(np.arange(order.size), group, num_groups)
    heaviest = np.full(num_groups, -1.0)
    for g in range(num_groups):
        if starts[g] < starts[g + 1]:
            heaviest[g] = weights[falling[starts[g]]]
    total, bins = np.zeros(num_bins), np.empty(order.size, np.int64)
    for g in _by_weight(heaviest):
        if starts[g] == starts[g + 1]:
            continue
        free = np.flatnonzero(is_open[g] & (total < share))
        if free.size == 0:
            free = np.flatnonzero(is_open[g])
        of_group = falling[starts[g] : starts[g + 1]]
        lots = _lightest_bins(weights[of_group], free.size)
        for i in range(of_group.size):
            bins[of_group[i]] = lots[i]
        loads = np.zeros(free.size)
        for item in rising[starts[g] : starts[g + 1]]:
            loads[bins[item]] += weights[item]
        bin_of_lot = np.empty(free.size, np.int64)
        bin_of_lot[_by_weight(loads)] = free[_by_weight(-total[free])]
        for item in of_group:
            bins[item] = bin_of_lot[bins[item]]
        total[bin_of_lot] += loads
    return bins


@kernel
def _members(order: Ints, group: Ints, num_groups: int) -> tuple[Ints, Ints]:
    """Return (num_groups + 1,) where the items of each group begin in (n,) items by group, and these, in the given order each."""
    starts = np.zeros(num_groups + 1, np.int64)
    for item in order:
        starts[group[item] + 1] += 1
    starts = np.cumsum(starts)
    following = starts[:-1].copy()
    members = np.empty(order.size, np.int64)
    for item in order:
        members[following[group[item]]] = item
        following[group[item]] += 1
    return starts, members


@kernel
def _lightest_bins(weights: Floats, num_bins: int) -> Ints:
    """Put each of (n,) weights, one after the other, into the lightest bin so far, as `lpt` says: (n,) bin of each.

    The bins form a tournament (loser tree): a node keeps the loser of its match, so that only the path from the winner's leaf to
    the root is replayed after the winner grew heavier. Ties of load are decided by a bin's `turn`: its number of items times the
    tree's width, plus its own number.
    """
    bins = np.empty(weights.size, np.int64)
    width = 1
    while width < num_bins:
        width *= 2
    loads, turns = _opening_losers(width, num_bins)
    load, turn = 0.0, 0
    for i in range(weights.size):
        bins[i] = turn & (width - 1)
        node = (bins[i] + width) >> 1
        load += weights[i]
        turn += width
        while node > 0:
            other_load, other_turn = loads[node], turns[node]
            loses = (other_load < load) | ((other_load == load) & (other_turn < turn))
            loads[node] = load if loses else other_load
            turns[node] = turn if loses else other_turn
            load = other_load if loses else load
            turn = other_turn if loses else turn
            node >>= 1
    return bins


@kernel
def _opening_losers(width: int, num_bins: int) -> tuple[Floats, Ints]:
    """Return the (width,) loads and turns of the losers in a loser tree whose bins are all empty.

    The loser of a node is the first bin of its right half. Node i has the children 2 i and 2 i + 1, and bin b is leaf width + b.
    Bins that do not exist are infinitely heavy.
    """
    loads, turns = np.zeros(width), np.zeros(width, np.int64)
    level, span = 1, width  # nodes of a level, and leaves below each of them
    while level < width:
        for i in range(level):
            turns[level + i] = i * span + span // 2
            loads[level + i] = 0.0 if turns[level + i] < num_bins else np.inf
        level, span = 2 * level, span // 2
    return loads, turns


@kernel
def rank_in_bin(order: Ints, bins: Ints) -> Ints:
    """Return the (n,) place of each item among the items of its bin, counted along `order`."""
    rank = np.empty(order.size, np.int64)
    if order.size == 0:
        return rank
    seen = np.zeros(bins.max() + 1, np.int64)
    for item in order:
        rank[item] = seen[bins[item]]
        seen[bins[item]] += 1
    return rank
