"""DistTrain's inter-microbatch reordering (section 6.2, Alg. 3): the order of each replica's microbatches.

On the first stage of 1F1B, *interval* 1 lies between the first forward and the first backward, interval i between backwards
i - 1 and i. The stage is idle in an interval except for the forwards that it runs there: p - 1 of them in the first
interval (p stages), one in each later one, none in the last p - 1. So the smallest microbatch goes first (the pipeline fills
early), the p - 1 smallest of the rest go last (the intervals that nothing fills are short), and between them every interval
gets the microbatches whose forwards fill it best.

Where the listing leaves something open:

* Its loop ends too late; ours ends when no microbatch is left.
* With l <= p microbatches, all but the first form the rear. With l < 2p, the first interval gets what is left, fewer than p - 1.
* The rear is in falling order, so that the step ends with its shortest backward.
* SELECTCLOSEST of several microbatches picks them one by one, each nearest to its share of what is left of the interval.

Interleaved 1F1B (v chunks of the model on every stage) has v intervals per microbatch, filled by its v chunk forwards. The paper
leaves open how these intervals come about:

* A microbatch counts as v pieces, which pass the p stages one behind the other like microbatches of 1F1B, each in 1/v of the
  time. That divides the time to fill and to drain the pipeline by v, as section 5 does. So the first interval takes pieces
  2 to p, the first microbatch's own among them, and every later interval takes one piece.
* When a microbatch is chosen, only the first of its v intervals is known. For the others, the microbatch that fits the first
  interval best stands in for it. It is then chosen for the mean of the v intervals: their sum is what its v pieces fill.
* The rear is p - 1 microbatches, not p - 1 pieces: interleaved 1F1B drains more microbatches at once than 1F1B does.
* v = 1 is plain 1F1B.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints


@kernel
def order_microbatches(forward: Floats, sizes: Floats, backward: Floats, chunks: int = 1) -> Ints:
    """Return the (K,) order in which the K microbatches of one replica should run.

    forward: (K, S) forward seconds per stage. sizes: (K,) encoder and generator seconds, by which the smallest microbatches are
    found; not negative. backward: (S,) ratio of each stage's backward to its forward. chunks: parts of the model on every stage.
    """
    count, num_stages = forward.shape
    position = microbatch_positions(
        forward.reshape(1, count, num_stages), sizes.reshape(1, count), np.ones((1, count), np.bool_), backward, chunks
    )
    order = np.empty(count, np.int64)
    for k in range(count):
        order[position[0, k]] = k
    return order


@kernel
def microbatch_positions(forward: Floats, sizes: Floats, occupied: NDArray[np.bool_], backward: Floats, chunks: int) -> Ints:
    """Return the (D, K) position at which each microbatch of each replica should run.

    Empty ones come last, in their old order. forward: (D, K, S). sizes: (D, K). occupied: (D, K) whether the microbatch has any
    sample. backward, chunks: as for `order_microbatches`. O(D K (K + S chunks)).
    """
    num_replicas, num_microbatches, num_stages = forward.shape
    position = np.empty((num_replicas, num_microbatches), np.int64)
    waiting, order = np.empty(num_microbatches, np.int64), np.empty(num_microbatches, np.int64)
    pieces = np.empty(num_microbatches * chunks, np.int64)
    now, later = np.empty((2, num_stages)), np.empty((2, num_stages))
    for r in range(num_replicas):
        count, last = 0, num_microbatches
        for k in range(num_microbatches - 1, -1, -1):
            if not occupied[r, k]:
                last -= 1
                position[r, k] = last
        for k in range(num_microbatches):
            if occupied[r, k]:
                waiting[count] = k
                count += 1
        _fill(forward[r], sizes[r], waiting, count, backward, chunks, order, pieces, now, later)
        for place in range(count):
            position[r, order[place]] = place
    return position


@kernel
def _fill(
    forward: Floats,
    sizes: Floats,
    waiting: Ints,
    count: int,
    backward: Floats,
    chunks: int,
    order: Ints,
    pieces: Ints,
    now: Floats,
    later: Floats,
) -> None:
    """Run Alg. 3 on one replica: fill order[:count] with the microbatches of waiting[:count].

    `waiting` is used up. pieces, now and later are scratch arrays, see `_advance`.
    """
    if count == 0:
        return
    num_stages = backward.size
    order[0] = _take(sizes, waiting, count, 0.0)
    num_rear = min(num_stages - 1, count - 1)
    for i in range(1, num_rear + 1):
        order[count - i] = _take(sizes, waiting, count - i, 0.0)

    now[:] = 0.0
    _append(forward, pieces, 0, order[0], backward, chunks, now)
    left = -(chunks - 1) * forward[order[0], 0]  # the unhindered way through the later stages and back, less own other pieces
    for s in range(1, num_stages):
        left += (1.0 + backward[s]) * forward[order[0], s]
    for place in range(1, count - num_rear):
        num_waiting = count - num_rear - place
        free_slots = num_stages - place * chunks  # pieces that the first interval still takes
        if free_slots > 0:
            target = left / free_slots
        else:
            target = _mean_interval(forward, pieces, place, waiting, num_waiting, backward, chunks, now, later)
        order[place] = _take(forward[:, 0], waiting, num_waiting, target)
        left -= chunks * forward[order[place], 0]
        _append(forward, pieces, place, order[place], backward, chunks, now)


@kernel
def _mean_interval(
    forward: Floats,
    pieces: Ints,
    place: int,
    waiting: Ints,
    num_waiting: int,
    backward: Floats,
    chunks: int,
    now: Floats,
    later: Floats,
) -> float:
    """Return the mean length of the `chunks` intervals that the microbatch at `place` is going to fill."""
    first = _interval(now)
    if chunks == 1:
        return first
    stand_in = waiting[_closest(forward[:, 0], waiting, num_waiting, first)]
    later[:] = now
    total = first
    for piece in range(place * chunks, (place + 1) * chunks - 1):
        pieces[piece] = stand_in
        _advance(forward, pieces, piece, backward, later)
        total += _interval(later)
    return total / chunks


@kernel
def _interval(pipeline: Floats) -> float:
    """Return the seconds from the end of the first stage's latest action until the next gradient arrives there."""
    return pipeline[1, 1] - pipeline[0, 0] if pipeline.shape[1] > 1 else 0.0


@kernel
def _closest(times: Floats, waiting: Ints, num_waiting: int, target: float) -> int:
    """Return the index into `waiting` of the microbatch whose time is nearest to the target, the first of equals."""
    best, best_gap = 0, abs(times[waiting[0]] - target)
    for i in range(1, num_waiting):
        gap = abs(times[waiting[i]] - target)
        if gap < best_gap:
            best, best_gap = i, gap
    return best


@kernel
def _take(times: Floats, waiting: Ints, num_waiting: int, target: float) -> int:
    """Take the microbatch whose time is nearest to the target out of waiting[:num_waiting], and return it.

    This is the paper's SELECTCLOSEST and, with the target 0, its SELECTMIN.
    """
    best = _closest(times, waiting, num_waiting, target)
    chosen = int(waiting[best])
    for i in range(best + 1, num_waiting):
        waiting[i - 1] = waiting[i]
    return chosen


@kernel
def _append(forward: Floats, pieces: Ints, place: int, microbatch: int, backward: Floats, chunks: int, pipeline: Floats) -> None:
    """Put `microbatch` at `place` in the order and add its pieces to the pipeline."""
    for piece in range(place * chunks, (place + 1) * chunks):
        pieces[piece] = microbatch
        _advance(forward, pieces, piece, backward, pipeline)


@kernel
def _advance(forward: Floats, pieces: Ints, piece: int, backward: Floats, pipeline: Floats) -> None:
    """Add a piece to the times of every stage in `pipeline`, by the recurrence of the paper's GETINTERVAL. O(S).

    Stage s runs the forward of `piece` and then the backward of `piece - (S - 1 - s)`, which stage s + 1 finished as its
    latest one. pieces: the microbatch of every piece; the clock runs `chunks` times as fast, so a piece takes as long as its
    microbatch. pipeline: (2, S) when each stage is free, and when its latest backward ended.
    """
    num_stages = backward.size
    microbatch = pieces[piece]
    forward_end = 0.0
    for s in range(num_stages):
        forward_end = max(pipeline[0, s], forward_end) + forward[microbatch, s]
        free = forward_end
        returning = piece - (num_stages - 1 - s)
        if returning >= 0:
            ready = pipeline[1, s + 1] if s + 1 < num_stages else forward_end
            free = max(free, ready) + backward[s] * forward[pieces[returning], s]
            pipeline[1, s] = free
        pipeline[0, s] = free
