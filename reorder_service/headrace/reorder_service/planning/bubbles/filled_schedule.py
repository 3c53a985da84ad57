"""Encoders' kernels in all free time at once: forwards as late as the LLM allows, backwards as early as it does.

The paper's algorithm first puts whole microbatches in front of the LLM and behind it, and then moves one after another between
the LLM's kernels (`moved_schedule`). Here a microbatch may lie in both: its kernels go, one by one, wherever there is room next
to the time at which the LLM needs it, which fills a bubble that is shorter than a microbatch. What then lies in front of the step
is what no bubble could take.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.bubbles.kernel_placement import EARLY, LATE, NO_LIMIT
from headrace.reorder_service.planning.bubbles.lane_space import LaneSpace
from headrace.reorder_service.planning.bubbles.placed_encoders import PlacedEncoders, Problem

_TOUCH_S = 1e-9
BEST_FIT = 3
"""Intervals that best fit looks at behind the first one."""


def mappings(problem: Problem) -> Iterator[Ints]:
    """Yield (N,) encoder pipelines of the microbatches: by marginal assignment of the forwards, and of the backwards.

    The next microbatch goes to the pipeline whose critical end, its first forward or its last backward, moves out least.
    """
    quota = np.full(problem.plan.pipelines, NO_LIMIT)
    falling = np.arange(problem.llm.microbatches)[::-1].copy()
    by_forward = LaneSpace(problem).deal(LATE, problem.forward, falling, quota, problem.due_s)[2]
    yield by_forward
    if problem.backward.seconds.size:
        by_backward = LaneSpace(problem).deal(EARLY, problem.backward, falling[::-1].copy(), quota, problem.ready_s)[2]
        if not np.array_equal(by_backward, by_forward):
            yield by_backward


def filled(problem: Problem, pipeline_of: Ints, *, look: int = 0) -> PlacedEncoders:
    """Return the faster of two schedules: with forwards placed first, and with backwards placed first.

    Forwards that are placed first as late as possible are then placed as early as possible, from the start of the first of them
    on, which leaves later bubbles to backwards; unless one of them would come too late for the LLM.
    """
    rising = np.arange(problem.llm.microbatches)
    falling = rising[::-1].copy()
    space = LaneSpace(problem, look=look)
    late, reached = space.place(LATE, problem.forward, falling, pipeline_of, problem.due_s)
    candidates = [(late, space.place(EARLY, problem.backward, rising, pipeline_of, problem.ready_s)[0])]
    space = LaneSpace(problem, look=look)
    from_s = np.full(rising.size, min(0.0, -float(reached.max(initial=0.0))))
    early, _ = space.place(EARLY, problem.forward, rising, pipeline_of, from_s)
    if (_ends(problem, early) <= problem.due_s + _TOUCH_S).all():
        candidates.append((early, space.place(EARLY, problem.backward, rising, pipeline_of, problem.ready_s)[0]))
    space = LaneSpace(problem, look=look)
    back, _ = space.place(EARLY, problem.backward, rising, pipeline_of, problem.ready_s)
    candidates.append((space.place(LATE, problem.forward, falling, pipeline_of, problem.due_s)[0], back))
    placed = [
        PlacedEncoders(problem=problem, pipeline_of=pipeline_of, forward_s=forward, backward_s=backward, method="filled")
        for forward, backward in candidates
    ]
    return min(placed, key=lambda one: (one.latency_s, -one.efficiency))


def reassigned(placed: PlacedEncoders, tries: int) -> PlacedEncoders:
    """Improve a filled schedule: as long as that makes the step shorter, a critical pipeline gives a microbatch to another one.

    Critical are the pipelines with the first forward and with the last backward, as far as these lie outside of the LLM's step.
    They give, or exchange, those microbatches first that are nearest to that end. At most so many schedules are tried.
    """
    while tries > 0:
        better = None
        for pipeline_of in _reassignments(placed):
            if tries == 0:
                break
            tries -= 1
            other = filled(placed.problem, pipeline_of)
            if other.latency_s < placed.latency_s - _TOUCH_S:
                better = other
                break
        if better is None:
            break
        placed = better
    return placed


def _reassignments(placed: PlacedEncoders) -> Iterator[Ints]:
    """Yield (N,) pipelines of microbatches that differ in one of a critical pipeline, from the most promising on."""
    problem, pipeline_of = placed.problem, placed.pipeline_of
    begins = placed.forward_s.min(axis=1, initial=np.inf)
    ends = (placed.backward_s + problem.loads[:, None] * problem.backward.seconds).max(axis=1, initial=-np.inf)
    for outside, times, sign in ((placed.prefix_s, begins, 1), (placed.suffix_s, -ends, -1)):
        if outside <= 0:
            continue
        critical = int(pipeline_of[times.argmin()])
        own = np.flatnonzero(pipeline_of == critical)[::sign]
        first = np.full(problem.plan.pipelines, np.inf)
        np.minimum.at(first, pipeline_of, times)
        others = [int(pipeline) for pipeline in np.argsort(-first, kind="stable") if pipeline != critical]
        for microbatch in own:
            for other in others:
                changed = pipeline_of.copy()
                changed[microbatch] = other
                yield changed
                theirs = np.flatnonzero(pipeline_of == other)
                if theirs.size:
                    changed = changed.copy()
                    changed[theirs[np.abs(theirs - microbatch).argmin()]] = critical
                    yield changed


def _ends(problem: Problem, forward_s: Floats) -> Floats:
    """Return (N,) when the last forward kernel of each microbatch is over; -inf if it has none."""
    ends: Floats = (forward_s + problem.loads[:, None] * problem.forward.seconds).max(axis=1, initial=-np.inf)
    return ends
