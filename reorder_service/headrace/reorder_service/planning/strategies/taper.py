"""Strategy `taper`: microbatches of graded sizes, balanced in all units. It is Headrace's own.

While the pipeline fills and drains, stages wait until the first and the last microbatches have passed all the other stages.
Equal microbatches, the aim of every published algorithm, leave each stage idle for (S - 1) / K of its work (S stages, K
microbatches). Here the first and the last microbatches are light, and those between are heavier in return: that reduces the
idle time by a third to a half. A stage holds up to a third more activations at once; where the memory limit does not allow that,
the sizes differ less.
"""

from __future__ import annotations

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Floats, Slots
from headrace.reorder_service.planning.search.arrangement import arrange
from headrace.reorder_service.planning.search.balance import balance_units
from headrace.reorder_service.planning.simulation.eager_depth import shallowest
from headrace.reorder_service.planning.simulation.makespan import best_grades
from headrace.reorder_service.planning.simulation.memory_limit import held_by_stage, kinds_that_free
from headrace.reorder_service.planning.simulation.timed_schedule import schedule_table

_FIRST = np.array([0.1, 0.2, 0.3, 0.4, 0.6, 1.0])  # sizes tried for the first and the last microbatch, relative to the heaviest
_UNEVEN = 0.02  # share of the memory limit that is left for microbatches that come out heavier than they should
_GROWTH = np.array([1.1, 1.2, 1.3, 1.5])  # growth factors tried from one microbatch to the next


def plan_slots(batch: Batch) -> Slots:
    """Plan a batch with strategy `taper`: (U, n) slots, equal in all units."""
    slot = balance_units(batch.costs, _grades(batch), batch.topology.replicas, batch.seed)
    return np.broadcast_to(arrange(batch, slot, keep=True), batch.costs.shape)


def _grades(batch: Batch) -> Floats:
    """Choose the (K,) relative sizes of a replica's microbatches with the shortest step."""
    count = batch.topology.microbatches
    stages = np.array(list(batch.topology.stages.values()))
    forward = np.repeat(batch.costs.sum(axis=1) / (stages * batch.execution.chunks), stages)
    factors = np.repeat([batch.execution.factors(unit) for unit in batch.units], stages, axis=0)
    table = schedule_table(batch.topology.stages, shallowest(batch.execution), count)
    held = held_by_stage(batch).sum(axis=1) / (batch.topology.replicas * batch.execution.chunks)
    limit = batch.execution.memory_limit * (1 - _UNEVEN)
    return best_grades(forward[:, None] * factors, table, count, _FIRST, _GROWTH, held, kinds_that_free(batch), limit)
