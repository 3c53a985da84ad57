"""Every layout of a small model on a few GPUs, in every placement, by trying all numbers: what searches are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate, Placement, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand

NAME = "all"


def every_layout(demand: Demand, placement: Placement, *, nests_generator: bool = False) -> Iterator[Candidate]:
    """Yield all layouts in which slices lie in one node and every replica has a sample in a microbatch.

    nests_generator: with the generator on the LLM's GPUs as well.
    """
    if placement == "disaggregated":
        yield from _apart(demand)
    elif placement == "colocated":
        for ranks in range(1, demand.cluster.num_gpus + 1):
            grids = dict.fromkeys(demand.unit_names, UnitGrid(dp=ranks, tp=1, pp=1))
            yield from _of_counts(demand, grids, placement)
    else:
        yield from _shared(demand, placement, nests_generator=nests_generator)


def _apart(demand: Demand) -> Iterator[Candidate]:
    most = demand.cluster.num_gpus - len(demand.units) + 1
    for grids in itertools.product(*(unit_grids(demand, unit, most) for unit in demand.units)):
        if sum(grid.gpus for grid in grids) <= demand.cluster.num_gpus and _in_nodes(grids):
            yield from _of_counts(demand, dict(zip(demand.unit_names, grids, strict=True)), "disaggregated")


def _shared(demand: Demand, placement: Placement, *, nests_generator: bool) -> Iterator[Candidate]:
    units = {unit.name: unit for unit in demand.units}
    guests = [name for name in units if name != LLM and (name != GENERATOR or nests_generator)]
    apart = [name for name in units if name == GENERATOR and not nests_generator]
    for llm in unit_grids(demand, units[LLM], demand.cluster.num_gpus - len(apart)):
        of_guests = [[one for one in unit_grids(demand, units[name], llm.gpus) if one.gpus == llm.gpus] for name in guests]
        others = [unit_grids(demand, units[name], demand.cluster.num_gpus - llm.gpus) for name in apart]
        for grids in itertools.product(*of_guests, *others):
            if _in_nodes([llm, *grids[len(guests) :]]):
                by_name = {LLM: llm, **dict(zip([*guests, *apart], grids, strict=True))}
                ordered = {name: by_name[name] for name in units}
                yield from _of_counts(demand, ordered, placement, has_generator=nests_generator)


def unit_grids(demand: Demand, unit: UnitDemand, most_gpus: int) -> list[UnitGrid]:
    """Return all grids of a unit on at most so many GPUs, each slice of a layer in a node that slices fill evenly."""
    return [
        UnitGrid(dp=dp, tp=tp, pp=pp)
        for tp in unit.forward_s
        if demand.cluster.gpus_per_node % tp == 0
        for pp in range(1, unit.layers + 1)
        for dp in range(1, most_gpus // (tp * pp) + 1)
    ]


def _in_nodes(grids: Sequence[UnitGrid]) -> bool:
    """Whether the slices of all layers lie in one node each, where grids follow each other from the first GPU on."""
    starts = itertools.accumulate((grid.gpus for grid in grids), initial=0)
    return all(start % grid.tp == 0 for start, grid in zip(starts, grids, strict=False))


def _of_counts(
    demand: Demand, grids: dict[str, UnitGrid], placement: Placement, *, has_generator: bool = False
) -> Iterator[Candidate]:
    """Yield the layout with every number of microbatches that leaves each replica of the LLM and of what is apart a sample."""
    shared = placement in ("encoders-first", "nested")
    apart = [grid.dp for name, grid in grids.items() if not shared or name == LLM or (name == GENERATOR and not has_generator)]
    for count in range(1, demand.global_batch // max(apart) + 1):
        yield Candidate(search=NAME, grids=grids, microbatches=count, placement=placement, has_generator=has_generator)
