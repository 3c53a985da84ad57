"""Load sharing for replicas of unequal speeds: each gets work in proportion to its speed, so that all end together.

This use is Headrace's own. The algorithm is LPT for machines of different speeds: samples are taken by falling cost, each into
the microbatch that would finish it first (Gonzalez, Ibarra and Sahni, SIAM J. Comput. 6(1), 1977: the latest finish is less than
twice the optimum). Then the microbatches of every replica are put into the order that fills its pipeline.
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.search.arrangement import arrange
from headrace.reorder_service.planning.search.number_partition import descending


def share_by_speed(batch: Batch, speeds: Floats) -> Slots:
    """Share a batch among replicas in proportion to their speeds: (U, n) slots, equal in all units.

    speeds: (D,) positive speed of each replica, on any scale.
    """
    cost = batch.costs.sum(axis=0)
    slots = _earliest(cost, descending(cost), np.ascontiguousarray(speeds, np.float64), batch.topology.microbatches)
    return np.broadcast_to(arrange(batch, slots), batch.costs.shape)


@kernel
def _earliest(cost: Floats, order: Ints, speeds: Floats, num_microbatches: int) -> Ints:
    """Put each sample, in the given order, into the microbatch that would finish it first: (n,) slots.

    Of microbatches that would finish at the same time, the one with the fewest samples is taken.
    """
    loads = np.zeros(speeds.size * num_microbatches)
    samples = np.zeros(loads.size, np.int64)
    slots = np.empty(cost.size, np.int64)
    for i in order:
        best, earliest = -1, np.inf
        for slot in range(loads.size):
            end = (loads[slot] + cost[i]) / speeds[slot // num_microbatches]
            if end < earliest or (end == earliest and samples[slot] < samples[best]):
                best, earliest = slot, end
        slots[i] = best
        samples[best] += 1
        loads[best] += cost[i]
    return slots
