"""Placement of encoders' kernels into free time, one microbatch after another, as early or as late as possible.

A lane is what one stage of one encoder pipeline runs on: a group of GPUs that do the same. It has two streams, one that computes
and one that communicates, each with a list of free intervals. A kernel lies in one interval of its stream and starts when the one
before it has ended. Placing as late as possible is placing as early as possible in time that runs backwards, so both are the same
code: `sign` is 1 or -1, and what is called mirrored time is time times `sign`.

Intervals are the nodes of doubly linked lists in arrays, so that a kernel in the middle of an interval leaves two.
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

EARLY, LATE = 1, -1
NO_LIMIT = np.iinfo(np.int64).max
_TOUCH_S = 1e-11  # what sums in different orders may differ by, and intervals that are no use
_NODES, _CHANGES = 0, 1  # places in `used`


@kernel
def place_all(
    sign: int, order: Ints, pipeline_of: Ints, release: Floats, loads: Floats,
    seconds: Floats, streams: Ints, segments: Ints, stage_of: Ints, send_s: float, look: int, long_s: float,
    begin: Floats, end: Floats, after: Ints, before: Ints, first: Ints, num_intervals: int, used: Ints,
    starts: Floats, reached: Floats,
) -> None:  # fmt: skip
    """Place microbatches in the given order into the pipelines that they have.

    order: (n,) microbatches. pipeline_of: (N,). release: (N,) when a microbatch may start, or has to be over if `sign` is LATE.
    loads: (N,) how many times as long as given its kernels take. seconds, streams: (k,) kernels of one microbatch, branch after
    branch, and in a branch segment after segment. segments: (branches, P + 1) where those of each begin. stage_of: (P,) stage of
    a segment. send_s: from one stage to the next. look, long_s: see `_take`. begin, end, after, before, first, num_intervals,
    used: the free time, see `free_lists`. starts: (N, k) filled in. reached: (m,) latest mirrored time of each pipeline, raised.
    """
    saved = np.empty((0, 5))
    for m in order:
        j = pipeline_of[m]
        over = place_one(
            sign, m, j, release[m], loads[m], seconds, streams, segments, stage_of, send_s, look, long_s,
            begin, end, after, before, first, num_intervals, used, saved, starts,
        )  # fmt: skip
        reached[j] = max(reached[j], over)


@kernel
def deal_all(
    sign: int, order: Ints, quota: Ints, group_of: Ints, release: Floats, loads: Floats,
    seconds: Floats, streams: Ints, segments: Ints, stage_of: Ints, send_s: float, look: int, long_s: float,
    begin: Floats, end: Floats, after: Ints, before: Ints, first: Ints, num_intervals: int, used: Ints,
    starts: Floats, reached: Floats, pipeline_of: Ints,
) -> None:  # fmt: skip
    """Place microbatches in the given order, each into the pipeline whose own end it moves out to the earliest mirrored time.

    quota: (m,) most microbatches of each pipeline, changed in place; together at least as many as there are. group_of: (m,)
    pipelines with equal numbers see equal bubbles, so of each group only the one that has reached least is tried. pipeline_of:
    (N,) filled in. The other arguments are those of `place_all`.
    """
    saved = np.empty((4 * seconds.size + 4, 5))
    num_groups = group_of.max() + 1
    best_of = np.empty(num_groups, np.int64)
    for m in order:
        best_of[:] = -1
        for j in range(quota.size):
            g = group_of[j]
            if quota[j] > 0 and (best_of[g] < 0 or reached[j] < reached[best_of[g]]):
                best_of[g] = j
        chosen, least, tried = -1, np.inf, -1
        for g in range(num_groups):
            j = best_of[g]
            if j < 0:
                continue
            tried += 1
            used[_CHANGES] = 0
            nodes = used[_NODES]
            over = place_one(
                sign, m, j, release[m], loads[m], seconds, streams, segments, stage_of, send_s, look, long_s,
                begin, end, after, before, first, num_intervals, used, saved, starts,
            )  # fmt: skip
            over = max(over, reached[j])
            if chosen < 0 or over < least - _TOUCH_S:
                chosen, least = j, over
            undo(begin, end, after, before, used, saved, nodes)
        used[_CHANGES] = 0
        over = place_one(
            sign, m, chosen, release[m], loads[m], seconds, streams, segments, stage_of, send_s, look, long_s,
            begin, end, after, before, first, num_intervals, used, saved[:0], starts,
        )  # fmt: skip
        reached[chosen] = max(reached[chosen], over)
        quota[chosen] -= 1
        pipeline_of[m] = chosen


@kernel
def free_lists(
    of_begin: Floats, of_end: Floats, num_first: Ints, num_last: Ints, capacity: int
) -> tuple[Floats, Floats, Ints, Ints, Ints, int, Ints]:
    """Make the lists of free intervals of all streams.

    of_begin, of_end: intervals of all sorts, those of one sort disjoint and in order. num_first, num_last: (L * 2,) where the
    intervals of the computing and of the communicating stream of each lane begin and end among them. capacity: how many more
    intervals there may be later. Returns begin, end, after, before (next and previous of the list, -1 for none), first (where the
    original intervals of each stream begin), their number, and the counts in use.
    """
    first = np.zeros(num_first.size + 1, np.int64)
    first[1:] = np.cumsum(num_last - num_first)
    total = first[-1]
    begin, end = np.empty(total + capacity), np.empty(total + capacity)
    after, before = np.full(total + capacity, -1), np.full(total + capacity, -1)
    for s in range(num_first.size):
        low, high = first[s], first[s + 1]
        begin[low:high] = of_begin[num_first[s] : num_last[s]]
        end[low:high] = of_end[num_first[s] : num_last[s]]
        for node in range(low, high):
            after[node] = node + 1 if node + 1 < high else -1
            before[node] = node - 1 if node > low else -1
    used = np.zeros(2, np.int64)
    used[_NODES] = total
    return begin, end, after, before, first, total, used


@kernel
def place_one(
    sign: int, m: int, j: int, release: float, load: float,
    seconds: Floats, streams: Ints, segments: Ints, stage_of: Ints, send_s: float, look: int, long_s: float,
    begin: Floats, end: Floats, after: Ints, before: Ints, first: Ints, num_intervals: int, used: Ints, saved: Floats,
    starts: Floats,
) -> float:  # fmt: skip
    """Place one microbatch into one pipeline; return the mirrored time at which the last of its branches is over."""
    num_segments = stage_of.size
    latest = sign * release
    nodes = np.empty(2, np.int64)
    for branch in range(segments.shape[0]):
        ready = sign * release
        for q in range(num_segments):
            segment = q if sign > 0 else num_segments - 1 - q
            lane = j * num_segments + stage_of[segment]
            low, high = segments[branch, segment], segments[branch, segment + 1]
            nodes[:] = -1
            for place in range(high - low):
                k = low + place if sign > 0 else high - 1 - place
                stream = streams[k]
                if nodes[stream] < 0:
                    nodes[stream] = _find(sign, ready, 2 * lane + stream, begin, end, after, first, num_intervals)
                length = seconds[k] * load
                node, at = _take(
                    sign, nodes[stream], ready, length, look if length >= long_s else 0, begin, end, after, before, used, saved
                )
                nodes[stream] = node
                starts[m, k] = at if sign > 0 else -(at + length)
                ready = at + length
            if q + 1 < num_segments:
                ready += send_s
        latest = max(latest, ready)
    return latest


@kernel
def _find(sign: int, ready: float, stream: int, begin: Floats, end: Floats, after: Ints, first: Ints, num_intervals: int) -> int:
    """Return an interval of the stream from which on those follow that end after a mirrored time; -1 if it has no interval."""
    low, high = first[stream], first[stream + 1]
    if low == high:
        return -1
    bottom, top = low, high - 1
    if sign > 0:  # the last original interval that began before
        while bottom < top:
            middle = (bottom + top + 1) // 2
            if begin[middle] <= ready:
                bottom = middle
            else:
                top = middle - 1
        return int(bottom)
    while bottom < top:  # the first original interval that ends behind it, and what was split off it
        middle = (bottom + top) // 2
        if end[middle] >= -ready:
            top = middle
        else:
            bottom = middle + 1
    node = bottom
    while after[node] >= num_intervals and begin[after[node]] < -ready:
        node = after[node]
    return int(node)


@kernel
def _take(
    sign: int, node: int, ready: float, length: float, look: int,
    begin: Floats, end: Floats, after: Ints, before: Ints, used: Ints, saved: Floats,
) -> tuple[int, float]:  # fmt: skip
    """Take `length` seconds of the first interval that has room for them, and return it and the mirrored start.

    look: of so many more intervals with room behind the first, the one that would have least left is taken.
    """
    chosen, start, left = -1, 0.0, np.inf
    while node >= 0:
        low, high = (begin[node], end[node]) if sign > 0 else (-end[node], -begin[node])
        at = max(low, ready)
        if high - at >= length - _TOUCH_S:
            rest = high - at - length
            if chosen < 0 or rest < left - _TOUCH_S:
                chosen, start, left = node, at, rest
            if look == 0:
                break
            look -= 1
        node = after[node] if sign > 0 else before[node]
    if chosen < 0:
        return -1, np.inf
    from_, to = (start, start + length) if sign > 0 else (-start - length, -start)
    _cut(chosen, from_, to, begin, end, after, before, used, saved)
    return chosen, start


@kernel
def _cut(
    node: int, from_: float, to: float, begin: Floats, end: Floats, after: Ints, before: Ints, used: Ints, saved: Floats
) -> None:
    """Take a part out of an interval. With room in `saved`, what changes is kept there for `undo`."""
    has_left, has_right = from_ - begin[node] > _TOUCH_S, end[node] - to > _TOUCH_S
    _save(node, begin, end, after, before, used, saved)
    if has_left and has_right:
        new, behind = used[_NODES], after[node]
        used[_NODES] += 1
        begin[new], end[new], after[new], before[new] = to, end[node], behind, node
        end[node], after[node] = from_, new
        if behind >= 0:
            _save(behind, begin, end, after, before, used, saved)
            before[behind] = new
    elif has_left:
        end[node] = from_
    elif has_right:
        begin[node] = to
    else:
        end[node] = begin[node]


@kernel
def _save(node: int, begin: Floats, end: Floats, after: Ints, before: Ints, used: Ints, saved: Floats) -> None:
    if saved.shape[0] > 0:
        row = saved[used[_CHANGES]]
        row[0], row[1], row[2], row[3], row[4] = node, begin[node], end[node], after[node], before[node]
        used[_CHANGES] += 1


@kernel
def undo(begin: Floats, end: Floats, after: Ints, before: Ints, used: Ints, saved: Floats, nodes: int) -> None:
    """Take back the changes that were saved, and the intervals that were added since there were so many."""
    for place in range(used[_CHANGES] - 1, -1, -1):
        node = int(saved[place, 0])
        begin[node], end[node] = saved[place, 1], saved[place, 2]
        after[node], before[node] = int(saved[place, 3]), int(saved[place, 4])
    used[_CHANGES] = 0
    used[_NODES] = nodes
