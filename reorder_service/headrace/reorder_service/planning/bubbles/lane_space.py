"""The free time of all lanes of one pipeline of the LLM, from which kernels take theirs; see `kernel_placement`."""

from __future__ import annotations

import enum

import numpy as np

from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.bubbles.idle_time import IdleTime
from headrace.reorder_service.planning.bubbles.kernel_placement import deal_all, free_lists, place_all, place_one, undo
from headrace.reorder_service.planning.bubbles.placed_encoders import KernelTable, Problem


class Part(enum.Enum):
    """Which free time there is."""

    ALL = "all"
    OUTSIDE = "outside"
    """In front of a stage's first action and behind its last one: the coarse bubbles, and what is outside of the step."""
    INSIDE = "inside"
    """Between a stage's first action and its last one."""


class LaneSpace:
    """Free time of every lane, which gets less with every kernel that is placed."""

    def __init__(self, problem: Problem, part: Part = Part.ALL, *, look: int = 0) -> None:
        """look: for long kernels, so many intervals with room are looked at behind the first one (best fit); 0: first fit."""
        self._problem = problem
        self._look = look
        begins, ends, firsts, total = [], [], [], 0
        for idle in (problem.compute, problem.communication):
            begin, end, first = _clipped(idle, problem.timeline.first_s, problem.timeline.last_s, part)
            begins.append(begin)
            ends.append(end)
            firsts.append(first + total)
            total += begin.size
        stage_of_lane = problem.plan.llm_stages(problem.llm).ravel()
        low = np.stack([first[:-1][stage_of_lane] for first in firsts], axis=1).ravel()
        high = np.stack([first[1:][stage_of_lane] for first in firsts], axis=1).ravel()
        kernels = sum(table.seconds.size for table in problem.tables())
        capacity = (problem.llm.microbatches + 2) * kernels
        self._lists = free_lists(np.concatenate(begins), np.concatenate(ends), low, high, capacity)
        self._saved = np.empty((4 * kernels + 4, 5))
        self._nodes = 0

    def place(self, sign: int, table: KernelTable, order: Ints, pipeline_of: Ints, release_s: Floats) -> tuple[Floats, Floats]:
        """Place microbatches in order into their pipelines. Returns (N, k) starts and (m,) the mirrored time each has reached.

        See `place_all`; a pipeline without a microbatch has reached -inf, and what found no place starts at infinity.
        """
        starts, reached = self._results(sign, table)
        place_all(
            sign, order, pipeline_of, release_s, self._problem.loads, *self._kernels(table), *self._lists, starts, reached
        )  # fmt: skip
        return starts, reached

    def deal(self, sign: int, table: KernelTable, order: Ints, quota: Ints, release_s: Floats) -> tuple[Floats, Floats, Ints]:
        """Place microbatches in order, each into the pipeline that then ends first; see `deal_all`.

        Returns what `place` does, and (N,) the pipeline of each microbatch, 0 where it is not in `order`.
        """
        starts, reached = self._results(sign, table)
        pipeline_of = np.zeros(self._problem.llm.microbatches, np.int64)
        groups = self._problem.plan.groups(self._problem.llm)
        deal_all(
            sign, order, quota.copy(), groups, release_s, self._problem.loads, *self._kernels(table), *self._lists, starts,
            reached, pipeline_of,
        )  # fmt: skip
        return starts, reached, pipeline_of

    def place_one(
        self, sign: int, table: KernelTable, microbatch: int, pipeline: int, release_s: float, starts: Floats, limit_s: float
    ) -> float:
        """Place one microbatch, unless its mirrored end would be above the limit; return that end.

        starts: (N, k), of which the microbatch's row is filled in; where it was not placed, with what does not hold.
        """
        begin, end, after, before, first, num_intervals, used = self._lists
        self._nodes = int(used[0])
        used[1] = 0
        over = place_one(
            sign, microbatch, pipeline, release_s, float(self._problem.loads[microbatch]), *self._kernels(table),
            begin, end, after, before, first, num_intervals, used, self._saved, starts,
        )  # fmt: skip
        if over > limit_s:
            self.take_back()
        return over

    def take_back(self) -> None:
        """Make room again where the last `place_one` placed a microbatch."""
        begin, end, after, before, _, _, used = self._lists
        undo(begin, end, after, before, used, self._saved, self._nodes)

    def _kernels(self, table: KernelTable) -> tuple[Floats, Ints, Ints, Ints, float, int, float]:
        long_s = 0.5 * float(table.seconds.max(initial=0.0))
        return table.seconds, table.streams, table.segments, table.stage_of, self._problem.send_s, self._look, long_s

    def _results(self, sign: int, table: KernelTable) -> tuple[Floats, Floats]:
        starts = np.full((self._problem.llm.microbatches, table.seconds.size), sign * np.inf)
        return starts, np.full(self._problem.plan.pipelines, -np.inf)


def _clipped(idle: IdleTime, first_s: Floats, last_s: Floats, part: Part) -> tuple[Floats, Floats, Ints]:
    """Return the intervals in a part of the time: begin, end, and (S + 1,) where those of a stage begin."""
    stage = np.repeat(np.arange(idle.num_stages), np.diff(idle.first))
    if part == Part.INSIDE:
        begin, end = np.maximum(idle.begin_s, first_s[stage]), np.minimum(idle.end_s, last_s[stage])
    elif part == Part.OUTSIDE:
        heads, tails = idle.first[:-1], idle.first[1:] - 1
        begin = np.stack([idle.begin_s[heads], np.maximum(idle.begin_s[tails], last_s)], axis=1).ravel()
        end = np.stack([np.minimum(idle.end_s[heads], first_s), idle.end_s[tails]], axis=1).ravel()
        stage = np.repeat(np.arange(idle.num_stages), 2)
    else:
        begin, end = idle.begin_s, idle.end_s
    room = end > begin
    first = np.concatenate([[0], np.cumsum(np.bincount(stage[room], minlength=idle.num_stages))])
    return begin[room], end[room], first.astype(np.int64)
