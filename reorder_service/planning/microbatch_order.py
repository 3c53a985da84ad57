"""Order of one replica's microbatches: DistTrain's inter-microbatch reordering (section 6.2, Alg. 3) for 1F1B.

On the first stage, *interval* 1 lies between the first forward and the first backward, interval i between backwards i - 1
and i. The stage is idle in an interval except for the forwards that it runs there: p - 1 of them in the first interval, one
in each later one, none in the last p - 1 (p stages). So the smallest microbatch goes first (the pipeline fills early), the
p - 1 smallest of the rest go last (the intervals that nothing fills are short), and between them every interval gets the
microbatches whose forwards fill it best.

Where the listing leaves something open:

* Its loop ends too late; ours ends when no microbatch is left.
* l <= p microbatches: all but the first are the rear. l < 2p: the first interval gets what is left, fewer than p - 1.
* The rear stands in falling order, so that the step ends with its shortest backward.
* SELECTCLOSEST of several microbatches picks them one by one, each nearest to its share of what is left of the interval.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reorder_service.planning.batch import Floats, Ints
from reorder_service.planning.kernel import kernel


@kernel
def fill_intervals(forward: Floats, sizes: Floats, backward_factor: float) -> Ints:
    """(K,) order in which K microbatches should run.

    forward: (K, S) forward seconds per stage. sizes: (K,) what "smallest" means, encoder and generator seconds.
    backward_factor: how much longer a backward takes than its forward.
    """
    count, num_stages = forward.shape
    order = np.empty(count, np.int64)
    if count == 0:
        return order
    ascending = np.argsort(sizes, kind="mergesort")
    num_rear = min(num_stages - 1, count - 1)
    waiting = np.ones(count, np.bool_)
    for i in range(num_rear + 1):
        waiting[ascending[i]] = False
    free = np.zeros(num_stages)
    backward_end = np.zeros(num_stages)

    order[0] = ascending[0]
    _advance(forward, order, 0, backward_factor, free, backward_end)
    placed, num_middle = 1, count - 1 - num_rear
    first_interval = (1.0 + backward_factor) * forward[order[0], 1:].sum()  # there and back, with nothing in the way
    while placed < 1 + min(num_stages - 1, num_middle):
        share = first_interval / (num_stages - placed)
        order[placed] = _closest(forward[:, 0], waiting, share)
        first_interval -= forward[order[placed], 0]
        _advance(forward, order, placed, backward_factor, free, backward_end)
        placed += 1
    while placed < 1 + num_middle:
        interval = backward_end[1] - free[0] if num_stages > 1 else 0.0
        order[placed] = _closest(forward[:, 0], waiting, interval)
        _advance(forward, order, placed, backward_factor, free, backward_end)
        placed += 1
    for i in range(num_rear):
        order[placed + i] = ascending[num_rear - i]
    return order


@kernel
def fill_intervals_of_all(forward: Floats, sizes: Floats, occupied: NDArray[np.bool_], backward_factor: float) -> Ints:
    """(D, K) position at which each microbatch of each replica should run; empty ones come last, in their old order."""
    num_replicas, num_microbatches = sizes.shape
    position = np.empty((num_replicas, num_microbatches), np.int64)
    for r in range(num_replicas):
        filled = np.flatnonzero(occupied[r])
        order = fill_intervals(forward[r][filled], sizes[r][filled], backward_factor)
        for place in range(filled.size):
            position[r, filled[order[place]]] = place
        place = filled.size
        for k in range(num_microbatches):
            if not occupied[r, k]:
                position[r, k] = place
                place += 1
    return position


@kernel
def _closest(times: Floats, waiting: NDArray[np.bool_], target: float) -> int:
    """SELECTCLOSEST: takes the waiting microbatch whose time is nearest to the target, the first of equals."""
    best = -1
    for m in range(times.size):
        if waiting[m] and (best < 0 or abs(times[m] - target) < abs(times[best] - target)):
            best = m
    waiting[best] = False
    return best


@kernel
def _advance(forward: Floats, order: Ints, place: int, backward_factor: float, free: Floats, backward_end: Floats) -> None:
    """GETINTERVAL's recurrence: what the microbatch at `place` adds to every stage, O(S).

    Stage s runs the forward of `place` and then the backward of `place - (S - 1 - s)`, which stage s + 1 finished as its
    latest one. Updates, per stage, when it is free and when its latest backward ended.
    """
    num_stages = free.size
    forward_end = 0.0
    for s in range(num_stages):
        forward_end = max(free[s], forward_end) + forward[order[place], s]
        free[s] = forward_end
        returning = place - (num_stages - 1 - s)
        if returning >= 0:
            ready = backward_end[s + 1] if s + 1 < num_stages else forward_end
            free[s] = max(free[s], ready) + backward_factor * forward[order[returning], s]
            backward_end[s] = free[s]
