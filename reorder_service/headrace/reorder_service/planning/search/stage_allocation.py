"""Allocation of pipeline stages to units (Cornstarch: dissertation, section 3.5.3).

How heavy a unit's stages are depends on forward and backward together. A frozen unit has a shorter backward or none, so an
allocation by forward times alone gives it stages that the trainable units need.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.execution import BACKWARD_FACTOR
from headrace.reorder_service.planning.simulation.simulator import peak_memory, simulate
from headrace.reorder_service.planning.simulation.work import Work, lower_bound

Stages = dict[str, int]
"""Number of pipeline stages of each unit, at least one."""


def level_stages(
    forward_s: Mapping[str, float],
    num_stages: int,
    *,
    backward_factors: Mapping[str, float] | None = None,
    most: Mapping[str, int] | None = None,
) -> Stages:
    """Divide stages among units so that the heaviest stage, forward and backward, is as light as possible.

    forward_s: forward seconds of each unit. backward_factors: ratio of backward to forward time by unit, as from
    `headrace.backward_factors`; BACKWARD_FACTOR for a unit that is not named. most: most stages that a unit can have, for the
    units that have such a bound. One by one, a stage goes to the unit whose stages are the heaviest so far, among those that can
    have more: since every split with a lighter heaviest stage has at least as many stages in that unit, no split is better.

    Raises ValueError if there are fewer stages than units, or more than the bounds allow.
    """
    if num_stages < len(forward_s):
        raise ValueError(f"must be at least 1 per unit ({', '.join(forward_s)}), got {num_stages}")
    factors, most = backward_factors or {}, most or {}
    seconds = {unit: forward * (1 + factors.get(unit, BACKWARD_FACTOR)) for unit, forward in forward_s.items()}
    stages = dict.fromkeys(seconds, 1)
    for _ in range(num_stages - len(seconds)):
        free = [unit for unit in seconds if stages[unit] < most.get(unit, num_stages)]
        if not free:
            raise ValueError(f"{num_stages} is more than the layers of {', '.join(seconds)} can be cut into; give fewer")
        stages[max(free, key=lambda unit: seconds[unit] / stages[unit])] += 1
    return stages


def fastest_stages(batch: Batch, plan_slots: Callable[[Batch], Slots], most: Mapping[str, int] | None = None) -> Stages:
    """Divide the stages of a batch's topology among its units so that the batch's simulated step is as short as possible.

    The lightest heaviest stage (`level_stages`) is not always the fastest split: where samples differ, a unit with few stages
    waits less for its neighbours. So, from the batch's own split on, one stage at a time moves to another unit while that
    shortens the step. A split is not simulated if its `lower_bound` alone is longer than the shortest step so far. As long as a
    plan exceeds the execution's memory limit, stages move to lower the excess instead.

    plan_slots: the strategy that plans the step; a split that it raises ValueError for cannot be run. most: most stages that a
    unit can have, for the units that have such a bound.
    """
    stages = dict(batch.topology.stages)
    least = _step(batch, stages, plan_slots)
    seen = {tuple(stages.values())}
    while True:
        better = None
        for split in _moves(stages, most or {}):
            if tuple(split.values()) in seen:
                continue
            seen.add(tuple(split.values()))
            if least[0] > 0 or lower_bound(_with_stages(batch, split)) < least[1]:
                least, better = min((least, better), (_step(batch, split, plan_slots), split), key=lambda pair: pair[0])
        if better is None:
            return stages
        stages = better


def _moves(stages: Stages, most: Mapping[str, int]) -> Iterator[Stages]:
    """Yield every split that differs from `stages` in one stage that moved from one unit to another."""
    for source, target in itertools.permutations(stages, 2):
        if stages[source] > 1 and stages[target] < most.get(target, math.inf):
            yield {**stages, source: stages[source] - 1, target: stages[target] + 1}


def _step(batch: Batch, stages: Stages, plan_slots: Callable[[Batch], Slots]) -> tuple[float, float]:
    """Return by how much the planned step exceeds the memory limit, and its seconds; both infinite if it cannot run at all."""
    batch = _with_stages(batch, stages)
    try:
        work = Work.of(batch, plan_slots(batch))
        seconds = simulate(work).iteration_s
    except ValueError:  # the plan defers more than the schedule can wait for
        return math.inf, math.inf
    limit = batch.execution.memory_limit
    return (max(0.0, float(peak_memory(work).max()) - limit) if limit < math.inf else 0.0), seconds


def _with_stages(batch: Batch, stages: Stages) -> Batch:
    return replace(batch, topology=replace(batch.topology, stages=stages))
