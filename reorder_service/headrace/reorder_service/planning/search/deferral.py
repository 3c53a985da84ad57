"""Pairwise deferral: even out LLM work by passing samples from a heavy microbatch on to the next one.

This is Entrain's algorithm (dissertation, section 4.5.2 and Alg. 4, lines 7-15), for all replicas at once. A replica's
microbatches are sorted by LLM load; the top half is *overloaded*, the bottom half *underloaded*. For every pair of an overloaded
and an underloaded microbatch, a subset sum finds the samples of the overloaded one that are best deferred; a bottleneck matching
then chooses the pairs. What the paper leaves open:

* The subset sum divides the largest sum that can help any pair of the overloaded microbatch into CELLS cells, not its whole
  load, so that a table of the same size is finer. Only the first MOST_ITEMS samples that matter enter it. Afterwards samples
  are flipped one by one if that brings the true sum nearer, which repairs what rounding lost.
* With an odd number of microbatches the middle one is in neither half: it neither defers nor receives.
* Pairs (and the middle one, counted double) run in a hill by LLM load: light ones first and last, where the pipeline fills
  and drains, heavy ones in the middle. In simulated 1F1B steps that took 3 % less time than pairs by rising encoder load.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

Bools = NDArray[np.bool_]

CELLS = 1024  # a cell is 0.1 % of the largest useful transfer
MOST_ITEMS = 128  # bounds the table to 132 KB; more samples than that are fine-grained enough for the flips


@kernel
def reachable_sums(weights: Floats, span: float, table: Bools) -> Ints:
    """Find by dynamic programming which sums, rounded to cells, subsets of the weights can have. O(N CELLS).

    weights: (N,). span: the largest useful sum, which falls into the last cell; a weight that reaches it is left out.
    table: (MOST_ITEMS + 1, CELLS), filled in place: row t tells which sums the first t weights that are not left out can have.
    Returns the weights in cells (N,), 0 where left out.
    """
    cells = np.zeros(weights.size, np.int64)
    num_items = 0
    table[0] = False
    table[0, 0] = True
    for t in range(weights.size):
        if num_items < MOST_ITEMS and weights[t] < span:
            cells[t] = int(weights[t] / span * (CELLS - 1) + 0.5)
        cell = cells[t]
        if cell > 0:
            before, after = table[num_items], table[num_items + 1]
            after[:cell] = before[:cell]
            np.logical_or(before[cell:], before[: CELLS - cell], after[cell:])
            num_items += 1
    return cells


@kernel
def closest_subset(weights: Floats, span: float, cells: Ints, table: Bools, target: float) -> tuple[Bools, float]:
    """Return the subset of `weights` whose sum is nearest to the target, up to rounding: its (N,) mask and its sum.

    `cells` and `table` come from `reachable_sums`; the target is at most span / 2. The sum lies strictly between 0 and twice the
    target, or the subset is empty. Of equally near cells the lower one is taken.
    """
    taken = np.zeros(weights.size, np.bool_)
    if target <= 0.0:
        return taken, 0.0
    num_items = np.count_nonzero(cells)
    cell = _closest_cell(table[num_items], target / span * (CELLS - 1))
    total = 0.0
    for t in range(weights.size - 1, -1, -1):
        if cells[t] > 0:
            num_items -= 1
            if not table[num_items, cell]:
                taken[t] = True
                total += weights[t]
                cell -= cells[t]
    for t in range(weights.size):
        flipped = total - weights[t] if taken[t] else total + weights[t]
        if abs(target - flipped) < abs(target - total):
            taken[t] = not taken[t]
            total = flipped
    if abs(target - total) >= target:
        taken[:] = False
        total = 0.0
    return taken, total


@kernel
def _closest_cell(reachable: Bools, aim: float) -> int:
    below = int(aim)
    while not reachable[below]:
        below -= 1
    above = int(aim) + 1
    while above < CELLS and not reachable[above]:
        above += 1
    return above if above < CELLS and above - aim < aim - below else below


@kernel
def bottleneck_match(values: Floats, alone: Floats) -> tuple[float, Ints]:
    """Pair H overloaded microbatches with H underloaded ones so that the slowest is as fast as possible.

    values: (H, H), the greater load of a pair after deferral (eq. 4.3). alone: (H,), the load of each overloaded microbatch if it
    defers nothing. Returns the least threshold T of `values` and `alone` such that all microbatches with alone > T can be matched
    within T, and the (H,) partners. The others get the partners that are left and need not defer. T is found by binary search.
    """
    size = alone.size
    partner, owner = np.empty(size, np.int64), np.empty(size, np.int64)
    candidates = np.sort(np.concatenate((values.ravel(), alone)))
    low, high = 0, candidates.size - 1  # the greatest T always works: no microbatch needs a partner, or any partner will do
    while low < high:
        middle = (low + high) // 2
        if _match_within(candidates[middle], values, alone, partner, owner):
            high = middle
        else:
            low = middle + 1
    threshold = candidates[low]
    _match_within(threshold, values, alone, partner, owner)
    left = 0
    for i in range(size):
        if partner[i] < 0:
            while owner[left] >= 0:
                left += 1
            partner[i], owner[left] = left, i
    return threshold, partner


@kernel
def _match_within(threshold: float, values: Floats, alone: Floats, partner: Ints, owner: Ints) -> bool:
    """Return whether all microbatches that exceed the threshold alone can be matched within it.

    partner, owner: (H,) filled with the matching of overloaded and of underloaded microbatches, -1 where there is none.
    """
    partner[:] = -1
    owner[:] = -1
    matched = True
    for i in range(alone.size):
        if alone[i] > threshold:
            matched = matched and _augment(threshold, values, i, partner, owner)
    return matched


@kernel
def _augment(threshold: float, values: Floats, start: int, partner: Ints, owner: Ints) -> bool:
    """Add `start` to the matching along a shortest alternating path; return False, with nothing changed, if there is none."""
    reached_from = np.full(owner.size, -1)
    queue = np.empty(owner.size, np.int64)
    queue[0] = start
    head, tail = 0, 1
    while head < tail:
        i = queue[head]
        head += 1
        for j in range(owner.size):
            if reached_from[j] >= 0 or values[i, j] > threshold:
                continue
            reached_from[j] = i
            if owner[j] < 0:
                free = j
                while free >= 0:
                    i = reached_from[free]
                    owner[free] = i
                    given_up = partner[i]
                    partner[i] = free
                    free = given_up
                return True
            queue[tail] = owner[j]
            tail += 1
    return False


@kernel
def defer_all(llm: Floats, starts: Ints, microbatch: Ints, used: Ints) -> Ints:
    """Choose which samples each replica defers and the order of its microbatches: (2, n) places of the samples in that order.

    The first row is the place of the microbatch that encodes a sample, the second the place of the one that does its LLM work:
    the same or, if the sample is deferred, the next. llm: (n,) costs, samples sorted by replica. starts: (D + 1,), replica r has
    the samples starts[r] .. starts[r + 1] - 1. microbatch: (n,) microbatch of each sample in its replica. used: (D,) number of
    microbatches of each replica, none of them empty.
    """
    places = np.empty((2, llm.size), np.int64)
    table = np.empty((MOST_ITEMS + 1, CELLS), np.bool_)
    for r in range(used.size):
        first, last = starts[r], starts[r + 1]
        own = microbatch[first:last]
        loads = _sums(llm[first:last], own, used[r])
        deferred, follower = _defer(llm[first:last], own, loads, table)
        places[0, first:last] = interleave(loads, follower)[own]
        places[1, first:last] = places[0, first:last] + deferred
    return places


@kernel
def _sums(weights: Floats, group: Ints, num_groups: int) -> Floats:
    sums = np.zeros(num_groups)
    for t in range(group.size):
        sums[group[t]] += weights[t]
    return sums


@kernel
def _defer(llm: Floats, microbatch: Ints, loads: Floats, table: Bools) -> tuple[Bools, Ints]:
    """Choose the samples that one replica defers, (n,), and the microbatch that must follow each microbatch, (K,).

    A microbatch that any other may follow is given as its own follower.
    """
    deferred, follower = np.zeros(llm.size, np.bool_), np.arange(loads.size)
    half = loads.size // 2
    if half == 0:
        return deferred, follower
    members = np.argsort(microbatch, kind="mergesort")
    weights = llm[members]
    starts = np.searchsorted(microbatch[members], np.arange(loads.size + 1))
    by_load = np.argsort(-loads, kind="mergesort")
    heavy, light = by_load[:half], by_load[loads.size - half :]
    alone, lightest = loads[heavy], loads[by_load[-1]]

    values = np.empty((half, half))
    for i in range(half):
        items = weights[starts[heavy[i]] : starts[heavy[i] + 1]]
        cells = reachable_sums(items, alone[i] - lightest, table)
        for j in range(half):
            target = (alone[i] - loads[light[j]]) / 2
            _, moved = closest_subset(items, alone[i] - lightest, cells, table, target)
            values[i, j] = max(alone[i] - moved, loads[light[j]] + moved)

    threshold, partner = bottleneck_match(values, alone)
    for i in range(half):
        follower[heavy[i]] = light[partner[i]]
        if alone[i] > threshold:
            first, last = starts[heavy[i]], starts[heavy[i] + 1]
            cells = reachable_sums(weights[first:last], alone[i] - lightest, table)
            target = (alone[i] - loads[light[partner[i]]]) / 2
            taken, _ = closest_subset(weights[first:last], alone[i] - lightest, cells, table, target)
            deferred[members[first:last]] = taken
    return deferred, follower


@kernel
def interleave(loads: Floats, follower: Ints) -> Ints:
    """Order the microbatches of a replica: pairs in a hill by load, light ones outside, a follower right after its leader.

    Returns the (K,) place of each microbatch. follower: (K,) its follower, or itself if it has none.
    """
    leads = np.ones(loads.size, np.bool_)
    leads[follower[follower != np.arange(loads.size)]] = False
    leaders = np.flatnonzero(leads)
    partner = follower[leaders]
    rising = np.argsort(loads[leaders] + loads[partner], kind="mergesort")
    place = np.empty(loads.size, np.int64)
    position = 0
    for p in np.concatenate((rising[::2], rising[1::2][::-1])):
        place[leaders[p]] = position
        position += 1
        if partner[p] != leaders[p]:
            place[partner[p]] = position
            position += 1
    return place
