"""GPUs in proportion to work: the ratio-based strategy that DistTrain is compared with (8.2.1).

Each unit gets the share of the GPUs that it has of the operations. Within its share it is laid out as Megatron-LM would do it:
the LLM in as many slices as a node has GPUs, and in as many stages as its GPUs give; the others in replicas of one GPU, of more
only where one does not hold them. A share that is too small for a unit's memory grows until it is not. The proportions hold for
the work, but not for what a stage takes once it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.cost_model.stable_batch import divide_stages
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.estimate import (
    in_flight,
    kept_bytes_of_sample,
    state_bytes,
    usable_bytes,
)
from headrace.reorder_service.planning.orchestration.searches.grid_choices import best_first, replica_counts, widths
from headrace.reorder_service.planning.orchestration.searches.megatron import WIDEST
from headrace.reorder_service.planning.orchestration.searches.refusal import no_fit
from headrace.reorder_service.planning.orchestration.stage_cuts import layer_share

NAME = "ratio"


def search(demand: Demand, microbatch: int = 1) -> list[Candidate]:
    """Return the fastest numbers of replicas for the shares that the units' work gives, best first.

    microbatch: samples of a microbatch of an LLM replica. Raises ValueError, in a sentence for the user, if nothing fits.
    """
    if demand.cluster.num_gpus < len(demand.units):
        raise no_fit(demand, NAME, ())
    work = np.array([demand.step_s(unit, min(unit.forward_s)) for unit in demand.units])
    gpus = dict(zip(demand.unit_names, divide_stages(work, demand.cluster.num_gpus), strict=True))
    candidates = list(_layouts(demand, gpus, microbatch))
    if found := best_first(demand, candidates):
        return found
    raise no_fit(demand, NAME, candidates)


def _layouts(demand: Demand, gpus: dict[str, int], microbatch: int) -> Iterator[Candidate]:
    llm = next(unit for unit in demand.units if unit.name == LLM)
    node, num_gpus = demand.cluster.gpus_per_node, demand.cluster.num_gpus
    tp = max((tp for tp in widths(llm, node) if tp <= min(WIDEST, gpus[LLM])), default=0)
    if tp == 0:
        return
    for dp in replica_counts(demand, microbatch):
        depth = min(llm.layers, gpus[LLM] // (dp * tp))
        microbatches = demand.global_batch // (dp * microbatch)
        grids: dict[str, UnitGrid] = {}
        for unit in demand.units:
            if unit.name != LLM:
                after = 0 if unit.name == GENERATOR else depth + (GENERATOR in gpus)
                shares = range(gpus[unit.name], num_gpus)
                held = (_replicated(demand, unit, share, microbatches, after, must_hold=True) for share in shares)
                one = next((grid for grid in held if grid is not None), None)
                one = one or _replicated(demand, unit, gpus[unit.name], microbatches, after, must_hold=False)
                if one is not None:
                    grids[unit.name] = one
        left = min(gpus[LLM], num_gpus - sum(grid.gpus for grid in grids.values()))
        if len(grids) == len(demand.units) - 1 and depth >= 1 and left >= dp * tp:
            grids[LLM] = UnitGrid(dp=dp, tp=tp, pp=llm.most_stages(left // (dp * tp)))
            grids = {name: grids[name] for name in demand.unit_names}
            yield Candidate(search=NAME, grids=grids, microbatches=microbatches)


def _replicated(
    demand: Demand, unit: UnitDemand, gpus: int, microbatches: int, after: int, *, must_hold: bool
) -> UnitGrid | None:
    """Return the replicas that leave the fewest GPUs idle, and of such those of the fewest GPUs; all that hold their memory.

    after: stages of the units behind, so far as they are known. A microbatch has a sample for each replica. Where no GPUs hold
    the memory, there are none if they must, and else those of most GPUs.
    """
    samples, limit = demand.global_batch // microbatches, usable_bytes(demand.cluster)
    grids = [
        UnitGrid(dp=replicas, tp=tp, pp=pp)
        for tp in widths(unit, demand.cluster.gpus_per_node)
        for pp in range(1, min(unit.layers, gpus // tp) + 1)
        if unit.allows(replicas := unit.most_replicas(min(gpus // (tp * pp), samples)), pp)
    ]
    if not grids:
        return None
    dp, tp, pp = np.array([(grid.dp, grid.tp, grid.pp) for grid in grids]).T
    behind = pp - 1 + after
    of_width = {width: kept_bytes_of_sample(unit, width) for width in unit.kept_bytes}
    of_sample = np.array([of_width[grid.tp] for grid in grids])
    kept = in_flight(demand, microbatches, behind, pp, behind) * samples / dp * of_sample
    fitting = state_bytes(unit, dp, tp, pp) + kept * layer_share(unit, pp) <= limit
    holding = [grid for grid, holds in zip(grids, fitting.tolist(), strict=True) if holds]
    if must_hold or holding:
        return min(holding, key=lambda grid: (-grid.gpus, grid.tp * grid.pp, grid.pp), default=None)
    return max(grids, key=lambda grid: grid.tp * grid.pp)
