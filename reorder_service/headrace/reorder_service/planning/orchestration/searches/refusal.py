"""What to tell the user of a model that a search cannot place: by how much it does not fit, and which knob helps."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import UnitMemory, fullest_bytes, memory_bytes, usable_bytes

_GIB = 2.0**30


def no_fit(demand: Demand, search: str, candidates: Iterable[Candidate]) -> ValueError:
    """Return the error of a search none of whose candidates fits the memory of the cluster's GPUs.

    It speaks of the candidate that exceeds it least. Without any candidate, there are too few GPUs for one of each slice.
    """
    tried = list(candidates)
    cluster = demand.cluster
    if not tried:
        return ValueError(
            f"{search}: {cluster.num_gpus} GPUs are too few for a replica of {', '.join(demand.unit_names)}: take more GPUs"
        )
    nearest = min(tried, key=lambda candidate: fullest_bytes(demand, candidate))
    memories = memory_bytes(demand, nearest)
    name = max(memories, key=lambda unit: memories[unit].total)
    grid, memory = nearest.grids[name], memories[name]
    taken, usable = fullest_bytes(demand, nearest), usable_bytes(cluster)
    of_unit = f"{name} as dp {grid.dp}, tp {grid.tp}, pp {grid.pp}"
    return ValueError(
        f"{search}: the model does not fit {cluster.num_gpus} GPUs of {cluster.memory_gib:.4g} GiB: {of_unit} takes "
        f"{taken / _GIB:.4g} GiB of the {usable / _GIB:.4g} that a step may take, {(taken - usable) / _GIB:.3g} GiB too many; "
        f"{_remedy(name, memory)}"
    )


def _remedy(unit: str, memory: UnitMemory) -> str:
    if memory.activations > memory.total / 2:
        return f"most of it are activations, so run {unit} with checkpointing, or give it more GPUs"
    if memory.optimizer > memory.weights + memory.gradients:
        return f"most of it is the optimizer's state, so take more GPUs, over which it is spread, or freeze {unit}"
    return f"most of it are weights and gradients, so take more GPUs, or freeze {unit}"
