"""Strategy `random`: samples stay in arrival order, which is the job's seeded shuffle. It is the baseline of all others."""

from __future__ import annotations

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Slots


def plan_slots(batch: Batch) -> Slots:
    """Deal samples like cards: the i-th goes to replica i mod D, and each replica deals its own to its K microbatches in turn.

    Returns (U, n) slots, equal in all units. Microbatches differ by at most one sample; with fewer samples than D * K, the
    last ones of a replica stay empty. Costs are ignored.
    """
    replicas, microbatches = batch.topology.replicas, batch.topology.microbatches
    card = np.arange(batch.sample_ids.size) % batch.num_slots
    slot = (card % replicas) * microbatches + card // replicas
    return np.broadcast_to(slot, batch.costs.shape)
