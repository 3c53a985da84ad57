"""What replicas send each other: gradients and weights of pipelines, and the weights that colocated ranks gather."""

from __future__ import annotations

import math

from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.cluster import Cluster
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.estimate import UnitMemory, stage_share

FULL, HALF = 4.0, 2.0
"""Bytes of a number in float32 and in bfloat16."""
_MOMENTS = 2


def replicas_s(unit: UnitDemand, grid: UnitGrid, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds in which a unit's replicas gather weights before a step, and sum gradients behind it (ZeRO-1).

    Both are float32, as in the trainer, and nothing of it is hidden by computing.
    """
    trained = unit.parameters * unit.trained_share * float(stage_share(unit.layers, grid.pp)) / grid.tp
    one_s = collective_s(FULL * trained, grid.dp, cluster.gpus_per_node // (grid.tp * grid.pp), cluster)
    return one_s, one_s


def gathering_s(demand: Demand, candidate: Candidate) -> tuple[float, float]:
    """Return the seconds that colocated ranks send for one microbatch in its forward and in its backward.

    Weights are gathered in bfloat16 for each, and in the backward sums of gradients are scattered in float32 (FSDP with mixed
    precision), over all ranks.
    """
    forward_s, backward_s, cluster = 0.0, 0.0, demand.cluster
    for unit in demand.units:
        among = candidate.grids[unit.name].dp, cluster.gpus_per_node, cluster
        gathered_s = collective_s(HALF * unit.parameters, *among)
        forward_s += gathered_s
        backward_s += gathered_s * (unit.backward_factor > 0)
        backward_s += collective_s(FULL * unit.parameters * unit.trained_share, *among)
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


def collective_s(num_bytes: float, size: int, per_node: int, cluster: Cluster) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of so many bytes in all among `size` GPUs.

    per_node: how many GPUs of the group share a node, where it has so many; groups of its other GPUs exchange at the same time.
    A node receives what the others have, by the share of its links that belongs to the group, while its own GPUs pass it on to
    each other.
    """
    if size <= 1 or num_bytes <= 0:
        return 0.0
    inside = max(1, min(size, per_node))
    nodes = math.ceil(size / inside)
    between_s = num_bytes * (nodes - 1) / nodes / (cluster.inter_node_bytes_per_s * inside)
    within_s = num_bytes * (inside - 1) / inside / cluster.intra_node_bytes_per_s
    return max(between_s, within_s) + cluster.latency_s * math.ceil(math.log2(size))
