"""Placement of kernels by its definition, slowly: free time as lists of spans. It shares no code with the planner's."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

from headrace.reorder_service.planning.bubbles.placed_encoders import KernelTable, Problem

TOUCH = 1e-11


class TwinSpace:
    """Free time of every stream of every stage of every encoder pipeline."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.free: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        llm_stages = problem.plan.llm_stages(problem.llm)
        for pipeline in range(problem.plan.pipelines):
            for stage in range(problem.plan.stages):
                for stream, idle in enumerate((problem.compute, problem.communication)):
                    here = idle.of_stage(int(llm_stages[pipeline, stage]))
                    spans = zip(idle.begin_s[here].tolist(), idle.end_s[here].tolist(), strict=True)
                    self.free[pipeline, stage, stream] = list(spans)

    def copied(self) -> TwinSpace:
        other = copy.copy(self)
        other.free = {lane: list(spans) for lane, spans in self.free.items()}
        return other

    def take(self, lane: tuple[int, int, int], sign: int, ready: float, length: float, look: int = 0) -> float:
        """Take room for a kernel as early as it can after a mirrored time; of 1 + look places, that with the least left."""
        rooms = []
        for low, high in self.free[lane]:
            mirrored = (low, high) if sign > 0 else (-high, -low)
            at = max(mirrored[0], ready)
            if mirrored[1] - at >= length - TOUCH:
                rooms.append((at, mirrored[1] - at - length, (low, high)))
        rooms = sorted(rooms)[: 1 + look]
        at, left, span = rooms[0]
        for room in rooms[1:]:
            if room[1] < left - TOUCH:
                at, left, span = room
        begin, end = (at, at + length) if sign > 0 else (-at - length, -at)
        place = self.free[lane].index(span)
        pieces = [(low, high) for low, high in ((span[0], begin), (end, span[1])) if high - low > TOUCH]
        self.free[lane][place : place + 1] = pieces
        return at

    def place(
        self, table: KernelTable, sign: int, microbatch: int, pipeline: int, release_s: float, look: int = 0
    ) -> tuple[float, dict[int, float]]:
        """Place one microbatch; return its mirrored end and the start of each kernel."""
        starts: dict[int, float] = {}
        latest = sign * release_s
        load = float(self.problem.loads[microbatch])
        longest = max(table.seconds, default=0.0)
        for of_branch in table.segments:
            ready = sign * release_s
            segments = list(range(len(table.stage_of)))[::sign]
            for segment in segments:
                for kernel in list(range(of_branch[segment], of_branch[segment + 1]))[::sign]:
                    lane = pipeline, int(table.stage_of[segment]), int(table.streams[kernel])
                    length = float(table.seconds[kernel]) * load
                    at = self.take(lane, sign, ready, length, look if length >= 0.5 * longest else 0)
                    starts[kernel] = at if sign > 0 else -(at + length)
                    ready = at + length
                if segment != segments[-1]:
                    ready += self.problem.send_s
            latest = max(latest, ready)
        return latest, starts


def least_by_any_order(
    problem: Problem, table: KernelTable, sign: int, release_s: Sequence[float], pipeline_of: Sequence[int]
) -> float:
    """Return the least mirrored time at which all is over, of all orders in which kernels could be placed one by one.

    If nothing else is to be placed, this is the optimum: shifting the kernels of any schedule towards their release, one after
    another in the order of that schedule, makes none of them later.
    """
    chains = [chain for m in range(len(release_s)) for chain in _chains(table, sign, m)]
    places = [0] * len(chains)

    def best(space: TwinSpace, ready: list[float], reached: float, least: float) -> float:
        if reached >= least - TOUCH:
            return least
        left = [c for c, chain in enumerate(chains) if places[c] < len(chain)]
        if not left:
            return reached
        for c in left:
            microbatch, kernel, stage, after = chains[c][places[c]]
            inner = space.copied()
            lane = pipeline_of[microbatch], stage, int(table.streams[kernel])
            length = float(table.seconds[kernel] * problem.loads[microbatch])
            at = inner.take(lane, sign, ready[c] + (problem.send_s if after else 0.0), length)
            places[c] += 1
            least = best(inner, [*ready[:c], at + length, *ready[c + 1 :]], max(reached, at + length), least)
            places[c] -= 1
        return least

    ready = [sign * release_s[chain[0][0]] for chain in chains]
    return best(TwinSpace(problem), ready, -math.inf, math.inf)


def _chains(table: KernelTable, sign: int, microbatch: int) -> Iterable[list[tuple[int, int, int, bool]]]:
    """A microbatch's kernels in the order in which they are placed, one list a branch: its number, the kernel, its stage, and
    whether it comes from another stage."""
    for of_branch in table.segments:
        chain: list[tuple[int, int, int, bool]] = []
        for segment in list(range(len(table.stage_of)))[::sign]:
            stage = int(table.stage_of[segment])
            for kernel in list(range(of_branch[segment], of_branch[segment + 1]))[::sign]:
                chain.append((microbatch, kernel, stage, bool(chain) and chain[-1][2] != stage))
        if chain:
            yield chain
