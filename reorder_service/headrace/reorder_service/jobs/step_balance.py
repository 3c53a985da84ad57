"""How evenly a step's work lies on those who wait for each other, as it was planned and as samples had arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.plan import LLM, StepPlan
from headrace.reorder_service.planning.batch import Floats, Ints, slots_of
from headrace.reorder_service.planning.sequence_degrees import degrees_of, in_parts

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
    before, after = list[Floats](), list[Floats]()
    mean_s = 0.0
    for u, unit in enumerate(plan.topology.stages):
        of_unit = [most] * len(plan.unit_replicas[unit]) if unit in plan.unit_replicas else counts
        cards = np.array([r * most + k for k in range(most) for r, count in enumerate(of_unit) if k < count])
        dealt = cards[np.arange(len(sample_ids)) % cards.size]
        planned = in_parts(costs[unit], slots[u], degrees_of(plan, sample_ids) if unit == LLM else None, most)
        for (seconds, slot), loads in (((costs[unit], dealt), before), (planned, after)):
            of_slots = np.bincount(slot, weights=seconds, minlength=len(of_unit) * most)
            loads.append(of_slots.astype(np.float64, copy=False).reshape(-1, most))
        mean_s += float(costs[unit].sum()) / (len(counts) if meet else cards.size)
    if mean_s <= 0:
        return None
    return Balance(before=_slowest_s(before, meet) / mean_s, after=_slowest_s(after, meet) / mean_s)


def _slowest_s(of_units: Sequence[Floats], meet: str) -> float:
    """Return the seconds of the slowest where each unit has these (D, K) loads: over the units, those of the heaviest microbatch,
    and of ranks that meet, those of the slowest rank over all times that they do."""
    if not meet:
        return sum(float(loads.max()) for loads in of_units)
    loads = np.stack(of_units, axis=-1)
    if meet == "phases":
        return float(loads.max(axis=0).sum())
    if meet == "microbatch":
        return float(loads.sum(axis=2).max(axis=0).sum())
    return float(loads.sum(axis=(1, 2)).max())
