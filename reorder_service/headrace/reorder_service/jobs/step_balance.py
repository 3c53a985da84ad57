"""How evenly a step's work lies on those who wait for each other, as it was planned and as samples had arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.plan import StepPlan
from headrace.reorder_service.planning.batch import Floats, Ints, slots_of

MOST_SAMPLES = 20_000  # of a step that is judged, which takes some ten milliseconds; a larger one is not


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The cost of the slowest over that of the mean: 1.0 is even, and 2.0 takes twice as long as the same work spread evenly."""

    before: float
    """With samples dealt in arrival order, as strategy `random` does."""
    after: float
    """With samples as planned."""


def balance_of(plan: StepPlan, sample_ids: Ints, costs: Mapping[str, Floats], meet: str) -> Balance | None:
    """Return the balance of a step's plan; None for a step without costs, and for one of more than MOST_SAMPLES.

    In a pipeline, whose stages go on as soon as a microbatch arrives, it is that of each unit's heaviest microbatch. Ranks that
    have all units are compared where they wait for each other.

    sample_ids: (n,) of the step. costs: by unit, their (n,) forward seconds. meet: where ranks that have all units do
    (`Execution.colocated`); empty: a pipeline.
    """
    if not 0 < len(sample_ids) <= MOST_SAMPLES or not costs:
        return None
    slots, most = slots_of(plan, sample_ids), plan.topology.microbatches
    counts = [len(replica) for replica in plan.replicas]
    before, after, mean = [], [], []
    for u, unit in enumerate(plan.topology.stages):
        of_unit = [most] * len(plan.unit_replicas[unit]) if unit in plan.unit_replicas else counts
        cards = np.array([r * most + k for k in range(most) for r, count in enumerate(of_unit) if k < count])
        dealt = cards[np.arange(len(sample_ids)) % cards.size]
        loads = [np.bincount(slot, weights=costs[unit], minlength=len(of_unit) * most) for slot in (dealt, slots[u])]
        before.append(loads[0].reshape(-1, most))
        after.append(loads[1].reshape(-1, most))
        mean.append(float(costs[unit].sum()) / cards.size)
    if meet:
        share = sum(float(costs[unit].sum()) for unit in plan.topology.stages) / len(counts)
        slowest = [_slowest_ranks_s(np.stack(loads, axis=-1), meet) for loads in (before, after)]
    else:
        share = sum(mean)
        slowest = [sum(float(of_unit.max()) for of_unit in loads) for loads in (before, after)]
    return Balance(before=slowest[0] / share, after=slowest[1] / share) if share > 0 else None


def _slowest_ranks_s(loads: Floats, meet: str) -> float:
    """Return what a step takes of which ranks have these (D, K, U) loads and meet at the end of it, or more often."""
    if meet == "phases":
        return float(loads.max(axis=0).sum())
    if meet == "microbatch":
        return float(loads.sum(axis=2).max(axis=0).sum())
    return float(loads.sum(axis=(1, 2)).max())
