"""What colocated ranks, which share all weights (FSDP), send each other and hold."""

from __future__ import annotations

from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.estimate import UnitMemory
from headrace.reorder_service.planning.orchestration.links import collective_s

FULL, HALF = 4.0, 2.0
"""Bytes of a number in float32 and in bfloat16."""
_MOMENTS = 2


def gathering_s(demand: Demand, candidate: Candidate) -> tuple[float, float]:
    """Return the seconds that colocated ranks send for one microbatch in its forward and in its backward.

    Weights are gathered in bfloat16 for each, and in the backward sums of gradients are scattered in float32 (FSDP with mixed
    precision), over all ranks.
    """
    forward_s, backward_s, cluster = 0.0, 0.0, demand.cluster
    for unit in demand.units:
        among = candidate.grids[unit.name].dp, cluster.gpus_per_node, cluster
        gathered_s = float(collective_s(HALF * unit.parameters, *among))
        forward_s += gathered_s
        backward_s += gathered_s * (unit.backward_factor > 0)
        backward_s += float(collective_s(FULL * unit.parameters * unit.trained_share, *among))
    return forward_s, backward_s


def sharded_state(unit: UnitDemand, ranks: int) -> UnitMemory:
    """Return the state of a unit on one of so many colocated ranks, which share all of it (FSDP), without activations.

    Two layers at a time are gathered in bfloat16.
    """
    weights = unit.parameters / ranks
    trained = weights * unit.trained_share
    return UnitMemory(
        weights=FULL * weights + 2 * HALF * unit.parameters / unit.layers,
        gradients=FULL * trained,
        optimizer=_MOMENTS * FULL * trained,
        activations=0.0,
    )
