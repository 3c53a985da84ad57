"""Algorithm 2 of Optimus: microbatches are moved, one after another, from in front of the LLM and behind it into its bubbles.

As long as encoders make the step longer, the pipeline that does so most (the critical one) moves a microbatch, kernel by kernel,
into the bubbles between the LLM's first action and its last. What stays outside closes up.
"""

from __future__ import annotations

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.bubbles.coarse_schedule import coarse, coarse_backwards, coarse_forwards
from headrace.reorder_service.planning.bubbles.kernel_placement import EARLY
from headrace.reorder_service.planning.bubbles.lane_space import LaneSpace, Part
from headrace.reorder_service.planning.bubbles.placed_encoders import PlacedEncoders, Problem

_TOUCH_S = 1e-9


def moved(problem: Problem, partition: Ints | None = None, *, look: int = 0) -> PlacedEncoders:
    """Return the schedule when no more microbatch can be moved, or the first one, should that be faster.

    partition: (m,) microbatches of each pipeline, which then stay in it, and the first move that fails ends the search, as in
    the paper. Without one, a pipeline that fails is left alone and the next one tried, and the microbatches that are still in
    front of the LLM are dealt anew after every move. look: see `LaneSpace`.

    A move of forwards changes which of the LLM's microbatches a pipeline has, so that its backwards may end later than before.

    Activations go to the LLM in the order in which encoders are done with them, so all microbatches have to be equal: raises
    ValueError for loads that differ.
    """
    if np.ptp(problem.loads) > 0:
        raise ValueError("encoders' microbatches are ordered by when they are done, so none may differ from the others")
    inside = LaneSpace(problem, Part.INSIDE, look=look)
    pipeline_of, forward_s = _move_forwards(problem, inside, partition)
    backward_s = _move_backwards(problem, inside, pipeline_of, stop=partition is not None)
    placed = PlacedEncoders(problem=problem, pipeline_of=pipeline_of, forward_s=forward_s, backward_s=backward_s, method="moved")
    return min(placed, coarse(problem, partition), key=lambda one: one.latency_s)


def _move_forwards(problem: Problem, inside: LaneSpace, partition: Ints | None) -> tuple[Ints, Floats]:
    """Return (N,) pipelines and (N, k) starts of the forwards."""
    count = problem.llm.microbatches
    quota = None if partition is None else partition.copy()
    pipeline_of, outside_s, begins = coarse_forwards(problem, count, quota)
    row = np.zeros((count, problem.forward.seconds.size))
    moved_s: list[tuple[float, int, Floats]] = []  # end, pipeline and kernels of those that were moved
    failed = np.zeros(problem.plan.pipelines, np.bool_)
    while count > 0 and begins.min() < 0:
        critical = int(np.where(failed, np.inf, begins).argmin())
        if failed[critical] or not begins[critical] < 0:
            break
        due = problem.due_s[count - 1 :]
        end = inside.place_one(EARLY, problem.forward, 0, critical, 0.0, row, float(due[-1]) + _TOUCH_S)
        ends = np.sort([*(of[0] for of in moved_s), end])
        if not (ends <= due + _TOUCH_S).all():
            if end <= due[-1] + _TOUCH_S:
                inside.take_back()
            failed[critical] = True
            if partition is not None:
                break
            continue
        moved_s.append((end, critical, row[0].copy()))
        count -= 1
        if quota is not None:
            quota[critical] -= 1
        pipeline_of, outside_s, begins = coarse_forwards(problem, count, quota)
    for place, (_, pipeline, starts) in enumerate(sorted(moved_s, key=lambda of: of[:2])):
        pipeline_of[count + place], outside_s[count + place] = pipeline, starts
    return pipeline_of, outside_s


def _move_backwards(problem: Problem, inside: LaneSpace, pipeline_of: Ints, *, stop: bool) -> Floats:
    """Return (N, k) starts of the backwards. stop: at the first that cannot be moved."""
    left = np.arange(problem.llm.microbatches)
    starts, ends = coarse_backwards(problem, left, pipeline_of)
    moved_s = np.zeros_like(starts)
    failed = np.zeros(problem.plan.pipelines, np.bool_)
    while left.size and ends.max() > problem.timeline.end_s:
        critical = int(np.where(failed, -np.inf, ends).argmax())
        if failed[critical] or not ends[critical] > problem.timeline.end_s:
            break
        microbatch = int(left[pipeline_of[left] == critical][0])
        limit_s = problem.timeline.end_s
        release_s = float(problem.ready_s[microbatch])
        if inside.place_one(EARLY, problem.backward, microbatch, critical, release_s, moved_s, limit_s) > limit_s:
            failed[critical] = True
            if stop:
                break
            continue
        left = left[left != microbatch]
        starts, ends = coarse_backwards(problem, left, pipeline_of)
    went = np.isin(np.arange(len(starts)), left, invert=True)
    starts[went] = moved_s[went]
    return starts
