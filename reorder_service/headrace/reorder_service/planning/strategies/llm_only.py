"""Strategy `llm-only`: samples are balanced by what they take in the LLM alone, over replicas and over their microbatches.

This is what OrchMLLM calls pre-balancing (section 3.2), and compares with (section 8.3): what the other units take of a sample
goes where the LLM's share is wanted. It is a baseline, so `auto` does not consider it.
"""

from __future__ import annotations

import numpy as np

from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.search.number_partition import descending, lpt


def plan_slots(batch: Batch) -> Slots:
    """Plan a batch by LPT on the LLM's costs: (U, n) slots, equal in all units, with empty microbatches last."""
    costs, count = batch.costs[batch.units.index(LLM)], batch.topology.microbatches
    falling = descending(costs)
    replica = lpt(costs, falling, batch.topology.replicas)
    slot = replica * count
    for r in range(batch.topology.replicas):
        mine = np.flatnonzero(replica == r)
        if mine.size:
            slot[mine] += lpt(costs[mine], descending(costs[mine]), count)
    return np.broadcast_to(slot, batch.costs.shape)
