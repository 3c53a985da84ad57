"""The makespan of one replica under a schedule, what it holds too much, and searches for orders and sizes that shorten it."""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.schedule import Kind

_STAGE, _KIND, _POSITION, _UNIT, _WAITS = 0, 1, 2, 4, 7  # columns of a schedule's table: see `timed_schedule`
_FORWARD = int(Kind.FORWARD)


@kernel
def makespan(seconds: Floats, order: Ints, table: Ints) -> float:
    """Return the seconds that one replica takes if nothing is deferred and transfers take no time.

    seconds: (K, S, kinds) of one action. order: the microbatches in the order in which they run. table: of their schedule (see
    `timed_schedule`); if it is for fewer microbatches, the last ones of `order` do not run.
    """
    ends = np.empty(table.shape[0])
    free = np.zeros(seconds.shape[1])
    for row in range(table.shape[0]):
        stage, microbatch = table[row, _STAGE], order[table[row, _POSITION]]
        end = free[stage]
        for w in range(_WAITS, table.shape[1]):
            if table[row, w] < 0:
                break
            end = max(end, ends[table[row, w]])
        end += seconds[microbatch, stage, table[row, _KIND]]
        ends[row] = end
        free[stage] = end
    return float(free.max())


@kernel
def excess_over_time(held: Floats, first: int, order: Ints, table: Ints, free_after: Ints, limit: float) -> float:
    """Return the sum, over all forwards of a replica, of what its stages hold then above the limit; 0 if the replica fits.

    held: (slots, U) what one action on a slot keeps. first: the replica's first slot. order: its filled microbatches in the order
    in which they run. table: of their schedule. free_after: (U,) the kind of action after which a unit frees what it keeps.
    Nothing may be deferred.
    """
    holds = np.zeros(table[:, _STAGE].max() + 1)
    excess = 0.0
    for row in range(table.shape[0]):
        stage, kind, unit = table[row, _STAGE], table[row, _KIND], table[row, _UNIT]
        amount = held[first + order[table[row, _POSITION]], unit]
        if kind == _FORWARD:
            holds[stage] += amount
            excess += max(0.0, holds[stage] - limit)
        elif kind == free_after[unit]:
            holds[stage] -= amount
    return excess


@kernel
def slowest_makespan(seconds: Floats, replicas: Ints, table: Ints) -> float:
    """Return the longest makespan of the given replicas, whose microbatches run in the order of their indices.

    seconds: (D, K, S, kinds) of one action. replicas: (R,) indices. table: of the schedule of all of them.
    """
    order = np.arange(seconds.shape[1])
    slowest = 0.0
    for r in replicas:
        slowest = max(slowest, makespan(seconds[r], order, table))
    return slowest


@kernel
def best_simple_order(seconds: Floats, sizes: Floats, filled: Ints, table: Ints) -> Ints:
    """Return the fastest of three simple orders of the (m,) filled microbatches.

    They are: by rising size, by falling size, and the smallest first and the others by falling size. sizes: (K,).
    """
    rising = filled[np.argsort(sizes[filled], kind="mergesort")]
    falling = rising[::-1].copy()
    small_first = falling.copy()
    for i in range(falling.size - 1, 0, -1):
        small_first[i] = falling[i - 1]
    if falling.size:
        small_first[0] = rising[0]
    best, least = rising, makespan(seconds, rising, table)
    for order in (falling, small_first):
        end = makespan(seconds, order, table)
        if end < least:
            best, least = order, end
    return best


@kernel
def start_orders(
    seconds: Floats, sizes: Floats, replicas: Ints, filled: int, table: Ints, keep: bool, orders: Ints, ends: Floats
) -> None:
    """Put the filled microbatches of the given replicas into their best simple order, and fill in how long that takes.

    seconds: (D, K, S, kinds). sizes: (D, K). replicas: (R,), all of which have so many filled microbatches. table: of their
    schedule. keep: leave the order as it is. orders: (D, K), changed in place; the filled microbatches come first. ends: (D,).
    """
    for r in replicas:
        if not keep:
            orders[r, :filled] = best_simple_order(seconds[r], sizes[r], orders[r, :filled].copy(), table)
        ends[r] = makespan(seconds[r], orders[r, :filled], table)


@kernel
def improve_order(seconds: Floats, order: Ints, table: Ints, tries: int, state: np.uint64) -> float:
    """Improve `order` in place by `tries` random swaps and moves of microbatches, and return its makespan then.

    A change is kept unless the replica takes longer with it. state: of the random generator.
    """
    count = np.uint64(order.size)
    least = makespan(seconds, order, table)
    if order.size < 2:
        return least
    kept = order.copy()
    for _ in range(tries):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        source = np.int64((state >> np.uint64(40)) * count >> np.uint64(24))
        target = np.int64((state & np.uint64(0xFFFFFF)) * count >> np.uint64(24))
        if source == target:
            continue
        moved = order[source]
        if state & np.uint64(1 << 30) == np.uint64(0):
            order[source] = order[target]
        elif source < target:
            order[source:target] = kept[source + 1 : target + 1]
        else:
            order[target + 1 : source + 1] = kept[target:source]
        order[target] = moved
        end = makespan(seconds, order, table)
        if end <= least:
            least = end
            kept[:] = order
        else:
            order[:] = kept
    return least


@kernel
def best_grades(
    work: Floats, table: Ints, count: int, first: Floats, growth: Floats, held: Floats, free_after: Ints, limit: float
) -> Floats:
    """Find the (count,) relative sizes of microbatches with which a replica is fastest, among those that keep a memory limit.

    Sizes rise geometrically at the front, from one of `first` by one of `growth`, up to 1, and fall likewise at the rear; all
    combinations are tried. If none of them fits, all sizes are 1. work: (S, kinds) seconds of all that the replica has to do.
    table: of the schedule of `count` microbatches. held: (U,) what one action on all samples of the replica at once would keep.
    free_after, limit: see `excess_over_time`.
    """
    best, least = np.ones(count), np.inf
    kept = np.empty((count, held.size))
    grades = np.empty(count)
    order = np.arange(count)
    seconds = np.empty((count, *work.shape))
    for front in first:
        for rising in growth:
            for rear in first:
                for falling in growth:
                    total = 0.0
                    for k in range(count):
                        grades[k] = min(1.0, front * rising**k, rear * falling ** (count - 1 - k))
                        total += grades[k]
                    for k in range(count):
                        seconds[k] = work * grades[k] / total
                        kept[k] = held * grades[k] / total
                    if limit < np.inf and excess_over_time(kept, 0, order, table, free_after, limit) > 0.0:
                        continue
                    end = makespan(seconds, order, table)
                    if end < least:
                        least = end
                        best[:] = grades
    return best
