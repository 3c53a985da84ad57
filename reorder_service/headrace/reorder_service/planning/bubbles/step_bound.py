"""The least that a step can take under a plan, whatever the schedule."""

from __future__ import annotations

import numpy as np

from headrace.reorder_service.planning.bubbles.idle_time import Bubble
from headrace.reorder_service.planning.bubbles.placed_encoders import COMPUTE, Problem

_TOUCH_S = 1e-9


def least_step_s(problem: Problem) -> float:
    """Return seconds that no schedule can beat: the LLM's step, and what finds no room in it.

    For every length of a kernel: those that compute for at least so long have to lie in bubbles that are at least so long, or in
    front of the step or behind it. Bubbles at the ends of the step count as long, because kernels may reach out of it.
    """
    timeline, idle = problem.timeline, problem.compute
    begin, end = np.maximum(idle.begin_s, 0.0), np.minimum(idle.end_s, timeline.end_s)
    room = np.maximum(end - begin, 0.0)
    length = np.where(np.isin(idle.kind, (Bubble.START, Bubble.END)), np.inf, room)
    order = np.argsort(-length, kind="stable")
    rooms = np.append(0.0, np.cumsum(room[order]))
    kernels = np.concatenate(
        [np.multiply.outer(problem.loads, table.seconds[table.streams == COMPUTE]).ravel() for table in problem.tables()]
    )
    kernels = np.sort(kernels)[::-1]
    lanes_per_stage = problem.llm.tensor // problem.plan.tensor
    has_room = rooms[np.searchsorted(-length[order], -kernels + _TOUCH_S, side="right")] * lanes_per_stage
    lacking = np.cumsum(kernels) - has_room
    lanes = problem.plan.pipelines * problem.plan.stages
    return timeline.end_s + max(0.0, float(lacking.max(initial=0.0))) / lanes
