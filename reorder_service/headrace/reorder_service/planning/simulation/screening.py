"""The simulated time of a plan that only matters if it is short: most plans that are too slow are known by a few replicas."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.simulator import simulate

_SCREENED = 32  # one of so many replicas is simulated first, in a thirtieth of the time


def num_screened(batch: Batch) -> int:
    """Return how many replicas tell by themselves that a plan is too slow; 0 if the batch must be simulated as a whole.

    Under a memory limit, all replicas together decide how deep an eager schedule runs, and whether samples have to move. Units
    with replicas of their own tie the LLM's together.
    """
    alike = math.isinf(batch.execution.memory_limit) and not batch.execution.unit_replicas
    return batch.topology.replicas // _SCREENED if alike else 0


def seconds_within(batch: Batch, slots: Slots, limit_s: float) -> float:
    """Return the simulated seconds of the step, or infinity if they exceed the limit.

    Replicas that exchange no samples wait for each other only at the end of the step. So a plan in which a few of them exceed the
    limit need not be simulated as a whole. Raises ValueError where `simulate` does, except for plans that exceed the limit.
    """
    few = num_screened(batch)
    if few and limit_s < math.inf and not batch.crosses_replicas(slots) and seconds_of_first(batch, slots, few) > limit_s:
        return math.inf
    seconds = simulate(planned_work(batch, slots)).iteration_s
    return seconds if seconds <= limit_s else math.inf


def seconds_of_first(batch: Batch, slots: Slots, count: int) -> float:
    """Return the simulated seconds of replicas 0 .. count - 1 alone. The plan must not cross replicas.

    Samples of other replicas may have any later slot, or -1. Raises ValueError where `simulate` does.
    """
    samples = np.flatnonzero((slots[0] >= 0) & (slots[0] < count * batch.topology.microbatches))
    part = batch.of_rows(samples, replace(batch.topology, replicas=count))
    return simulate(planned_work(part, slots[:, samples])).iteration_s
