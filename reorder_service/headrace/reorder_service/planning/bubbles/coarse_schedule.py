"""The first schedule of Optimus: encoders in front of all that the LLM does on a GPU and behind it (section 4.2, figure 9).

A microbatch's kernels on one stage of an encoder are a block here, in which one runs after the other. A stage's forward blocks
lie as late as they can in front of the LLM's first action there, each in time for the LLM to use its output; its backward blocks
follow the LLM's last action.
"""

from __future__ import annotations

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.bubbles.kernel_placement import EARLY, LATE, NO_LIMIT
from headrace.reorder_service.planning.bubbles.lane_space import LaneSpace, Part
from headrace.reorder_service.planning.bubbles.placed_encoders import COMPUTE, KernelTable, PlacedEncoders, Problem


def coarse(problem: Problem, partition: Ints | None = None) -> PlacedEncoders:
    """Return the first schedule. partition: (m,) microbatches of each encoder pipeline; by marginal assignment without."""
    count = problem.llm.microbatches
    pipeline_of, forward_s, _ = coarse_forwards(problem, count, partition)
    backward_s, _ = coarse_backwards(problem, np.arange(count), pipeline_of)
    return PlacedEncoders(problem=problem, pipeline_of=pipeline_of, forward_s=forward_s, backward_s=backward_s, method="coarse")


def coarse_forwards(problem: Problem, count: int, quota: Ints | None = None) -> tuple[Ints, Floats, Floats]:
    """Put the forwards of the first `count` microbatches in front of the LLM.

    The last one goes first, each to the pipeline that then begins latest, of which none takes more than its quota. Returns (N,)
    pipelines and (N, k) starts, of which only those of the first `count` count, and (m,) when each pipeline begins, inf if never.
    """
    blocks = _blocks(problem.forward)
    order = np.arange(count)[::-1].copy()
    limits = np.full(problem.plan.pipelines, NO_LIMIT) if quota is None else quota
    starts, reached, pipeline_of = LaneSpace(problem, Part.OUTSIDE).deal(LATE, blocks, order, limits, problem.due_s)
    return pipeline_of, _spread(problem, problem.forward, starts), -reached


def coarse_backwards(problem: Problem, order: Ints, pipeline_of: Ints) -> tuple[Floats, Floats]:
    """Put the backwards of some microbatches behind the LLM, in order: (N, k) starts and (m,) when each pipeline is done."""
    blocks = _blocks(problem.backward)
    starts, reached = LaneSpace(problem, Part.OUTSIDE).place(EARLY, blocks, order, pipeline_of, _behind(problem, pipeline_of))
    return _spread(problem, problem.backward, starts), reached


def _behind(problem: Problem, pipeline_of: Ints) -> Floats:
    """Return (N,) when a microbatch may start its backward: not before the LLM is done on its encoder's last stage."""
    last_stage = problem.plan.llm_stages(problem.llm)[pipeline_of, -1]
    behind: Floats = np.maximum(problem.ready_s, problem.timeline.last_s[last_stage])
    return behind


def _blocks(table: KernelTable) -> KernelTable:
    """Return one kernel per stage, as long as all of them."""
    parts = table.stage_of.size
    seconds = np.zeros(parts)
    for of_branch in table.segments:
        for segment in range(parts):
            seconds[segment] += table.seconds[of_branch[segment] : of_branch[segment + 1]].sum()
    segments = np.concatenate([[0], np.cumsum(seconds > 0)])[None]
    return KernelTable(
        seconds=seconds[seconds > 0],
        streams=np.full(int(segments[0, -1]), COMPUTE, np.int64),
        segments=segments,
        stage_of=table.stage_of,
    )


def _spread(problem: Problem, table: KernelTable, block_s: Floats) -> Floats:
    """Return (N, k) starts of the kernels in blocks that start at (N, stages)."""
    block_of = np.empty(table.seconds.size, np.int64)
    offsets = np.empty(table.seconds.size)
    block = 0
    for segment in range(table.stage_of.size):
        kernels = np.concatenate([np.arange(of_branch[segment], of_branch[segment + 1]) for of_branch in table.segments])
        block_of[kernels] = block
        offsets[kernels] = np.cumsum(table.seconds[kernels]) - table.seconds[kernels]
        block += kernels.size > 0
    starts: Floats = block_s[:, block_of] + np.multiply.outer(problem.loads, offsets)
    return starts
