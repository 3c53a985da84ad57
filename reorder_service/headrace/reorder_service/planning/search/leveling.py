"""Leveling: exchange items between the heaviest bin of a group and lighter ones, until none makes the heaviest lighter."""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

_PARTNERS = 8  # lighter bins that the heaviest one tries before its group counts as level
_ROUNDS = 4  # most exchanges a group makes, per bin
_LEVEL = 5e-4  # a group is level whose heaviest bin exceeds the mean by no more than this share


@kernel
def level_bins(bins: Ints, weights: Floats, tokens: Ints, limit: int, group_size: int, num_groups: int) -> None:
    """Exchange items in place such that the heaviest bin of each group gets lighter. No bin comes to exceed `limit` tokens.

    bins: (n,) bin of each item, group * group_size + place. In each round the heaviest bin of a group gives an item to one of the
    `_PARTNERS` lightest, or swaps one for a lighter item there: the exchange that leaves the heavier of the two the lightest.
    """
    num_bins = group_size * num_groups
    first = np.full(num_bins, -1, np.int64)  # of the items of each bin, as a list that goes on in `following`
    following = np.full(bins.size, -1, np.int64)
    loads, filled = np.zeros(num_bins), np.zeros(num_bins, np.int64)
    for item in range(bins.size - 1, -1, -1):
        following[item] = first[bins[item]]
        first[bins[item]] = item
        loads[bins[item]] += weights[item]
        filled[bins[item]] += tokens[item]
    for group in range(num_groups):
        start = group * group_size
        level = loads[start : start + group_size].mean() * (1.0 + _LEVEL)
        for _ in range(_ROUNDS * group_size):
            heavy = start + int(np.argmax(loads[start : start + group_size]))
            if loads[heavy] <= level or not _relieve(
                heavy, start, group_size, bins, weights, tokens, limit, first, following, loads, filled
            ):
                break


@kernel
def _relieve(
    heavy: int,
    start: int,
    group_size: int,
    bins: Ints,
    weights: Floats,
    tokens: Ints,
    limit: int,
    first: Ints,
    following: Ints,
    loads: Floats,
    filled: Ints,
) -> bool:
    """Exchange items between `heavy` and one of the lightest bins of its group. Returns whether `heavy` got lighter."""
    tried = np.zeros(group_size, np.bool_)
    for _ in range(min(_PARTNERS, group_size - 1)):
        light = -1
        for b in range(group_size):
            if start + b != heavy and not tried[b] and (light < 0 or loads[start + b] < loads[light]):
                light = start + b
        tried[light - start] = True
        gap = loads[heavy] - loads[light]
        if gap <= 1e-9 * loads[heavy]:
            return False
        best, given, taken = 0.0, -1, -1  # best: by how much the exchange changes the gap's half, at most
        item = first[heavy]
        while item >= 0:
            if filled[light] + tokens[item] <= limit:
                gain = min(weights[item], gap - weights[item])
                if gain > best:
                    best, given, taken = gain, item, -1
            other = first[light]
            while other >= 0:
                more = weights[item] - weights[other]
                gain = min(more, gap - more)
                if (
                    gain > best
                    and filled[light] + tokens[item] - tokens[other] <= limit
                    and filled[heavy] + tokens[other] - tokens[item] <= limit
                ):
                    best, given, taken = gain, item, other
                other = following[other]
            item = following[item]
        if given >= 0 and best > 1e-9 * loads[heavy]:
            _move(given, heavy, light, bins, weights, tokens, first, following, loads, filled)
            if taken >= 0:
                _move(taken, light, heavy, bins, weights, tokens, first, following, loads, filled)
            return True
    return False


@kernel
def _move(
    item: int,
    source: int,
    target: int,
    bins: Ints,
    weights: Floats,
    tokens: Ints,
    first: Ints,
    following: Ints,
    loads: Floats,
    filled: Ints,
) -> None:
    """Take an item out of the source's list and put it in front of the target's."""
    before = -1
    at = first[source]
    while at != item:
        before = at
        at = following[at]
    if before < 0:
        first[source] = following[item]
    else:
        following[before] = following[item]
    following[item] = first[target]
    first[target] = item
    bins[item] = target
    loads[source] -= weights[item]
    loads[target] += weights[item]
    filled[source] -= tokens[item]
    filled[target] += tokens[item]
