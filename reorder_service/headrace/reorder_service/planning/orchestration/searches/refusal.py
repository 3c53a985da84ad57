"""What to tell the user of a model that a search cannot place: by how much it does not fit, and which knob helps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from headrace.plan import LLM
from headrace.reorder_service.planning.cost_model.stable_batch import divide_stages
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import (
    UnitMemory,
    fullest_bytes,
    kept_bytes_of_sample,
    memory_bytes,
    state_bytes,
    usable_bytes,
)
from headrace.reorder_service.planning.orchestration.searches.grid_choices import allows, grids_within, replica_counts

_GIB = 2.0**30


def no_fit(demand: Demand, search: str, candidates: Iterable[Candidate]) -> ValueError:
    """Return the error of a search none of whose candidates fits the memory of the cluster's GPUs.

    It speaks of the candidate that exceeds it least. Without any candidate, there are too few GPUs for one of each slice.
    """
    every, cluster = list(candidates), demand.cluster
    tried = [candidate for candidate in every if allows(demand, candidate)]
    if every and not tried:
        return ValueError(f"{search}: it has no placement with the numbers of replicas and stages that are allowed: allow others")
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


def smallest_layouts(demand: Demand, search: str, microbatch: int) -> Iterator[Candidate]:
    """Yield layouts that take little memory of a GPU: shares in proportion to what the units hold, cut as finely as possible.

    For a search that found none which fits, so that `no_fit` can say how much is lacking.
    """
    num_gpus, node = demand.cluster.num_gpus, demand.cluster.gpus_per_node
    if num_gpus < len(demand.units):
        return
    held = [float(state_bytes(unit, 1, 1, 1)) + kept_bytes_of_sample(unit, min(unit.forward_s)) for unit in demand.units]
    gpus = dict(zip(demand.unit_names, divide_stages(np.array(held), num_gpus), strict=True))
    units = {unit.name: unit for unit in demand.units}
    every = {name: grids_within(unit, node, gpus[name], (1,)) for name, unit in units.items()}
    if not all(every.values()):
        return
    finest = {name: max(grids, key=lambda grid: grid.gpus) for name, grids in every.items()}
    for grid in grids_within(units[LLM], node, gpus[LLM], replica_counts(demand, microbatch)):
        microbatches = demand.global_batch // (grid.dp * microbatch)
        yield Candidate(search=search, grids={**finest, LLM: grid}, microbatches=microbatches)


def _remedy(unit: str, memory: UnitMemory) -> str:
    if memory.activations > memory.total / 2:
        return f"most of it are activations, so run {unit} with checkpointing, or give it more GPUs"
    if memory.optimizer > memory.weights + memory.gradients:
        return f"most of it is the optimizer's state, so take more GPUs, over which it is spread, or freeze {unit}"
    return f"most of it are weights and gradients, so take more GPUs, or freeze {unit}"
