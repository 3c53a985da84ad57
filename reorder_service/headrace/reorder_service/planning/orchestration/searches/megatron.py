"""Megatron-LM with encoders and generator as further stages of the LLM's pipelines, as DistTrain's evaluation takes it (8.1).

All units have the LLM's replicas. The LLM is cut into as many slices as a node has GPUs, 8 at most, or fewer where nothing fits
so, and each other unit is one stage of as many GPUs. Where a microbatch has enough samples, those GPUs hold a replica of the unit
each and take samples of their own; else they are its slices.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.plan import LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.searches.grid_choices import best_first, replica_counts, widths
from headrace.reorder_service.planning.orchestration.searches.refusal import no_fit

NAME = "megatron"
WIDEST = 8
"""Slices of a layer in DistTrain's experiments."""


def search(demand: Demand, microbatch: int = 1, *, llm_stages: int | None = None) -> list[Candidate]:
    """Return the fastest numbers of replicas and of the LLM's stages, best first.

    microbatch: samples of a microbatch of an LLM replica. llm_stages: stages of the LLM, if they are not to be chosen. Raises
    ValueError, in a sentence for the user, if nothing fits.
    """
    llm = next(unit for unit in demand.units if unit.name == LLM)
    node = demand.cluster.gpus_per_node
    tried = []
    dividing = [width for width in widths(llm, node) if all(width % widths(unit, node)[0] == 0 for unit in demand.units)]
    if not dividing:
        raise ValueError(f"{NAME}: no number of slices of {LLM} is a multiple of one of every unit: allow some that is")
    for tp in reversed([width for width in dividing if width <= WIDEST]):
        every = _layouts(demand, llm, tp, microbatch)
        candidates = [candidate for candidate in every if llm_stages in (None, candidate.grids[LLM].pp)]
        if found := best_first(demand, candidates):
            return found
        tried += candidates
    raise no_fit(demand, NAME, tried)


def _layouts(demand: Demand, llm: UnitDemand, tp: int, microbatch: int) -> Iterator[Candidate]:
    for dp in replica_counts(demand, microbatch):
        most = demand.cluster.num_gpus // (dp * tp) - (len(demand.units) - 1)
        for pp in range(1, min(llm.layers, most) + 1):
            grids = {unit.name: _one_stage(unit, tp, dp, microbatch, demand.cluster.gpus_per_node) for unit in demand.units}
            grids[LLM] = UnitGrid(dp=dp, tp=tp, pp=pp)
            yield Candidate(search=NAME, grids=grids, microbatches=demand.global_batch // (dp * microbatch))


def _one_stage(unit: UnitDemand, gpus: int, dp: int, microbatch: int, node: int) -> UnitGrid:
    """Return one stage on each replica's `gpus` GPUs: the fewest slices that leave every replica a sample."""
    fitting = [tp for tp in widths(unit, node) if gpus % tp == 0]
    tp = min((tp for tp in fitting if gpus // tp <= microbatch), default=max(fitting))
    return UnitGrid(dp=dp * min(gpus // tp, microbatch), tp=tp, pp=1)
