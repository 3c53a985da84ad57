"""Headrace's search, and Cornstarch's, beside every layout of models of two to four units on four to eight GPUs.

Cornstarch's is exact by definition: it divides a number of stages so that no division is faster. Headrace's is exact in its
estimate only. It judges those layouts by simulation that are the best by the estimate, and several in their neighbourhood, and it
leaves out what its space holds better: GPUs without a unit that another replica has room on, encoders that share the LLM's GPUs
in unlike grids. So that the best by the judge is among them is no theorem, but holds for all instances below. The one exception
are colocated ranks, all of which have samples where the search has its way: fewer of them wait a latency less for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate, Placement, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import step_s
from headrace.reorder_service.planning.orchestration.headrace_search import PLACEMENTS, search
from headrace.reorder_service.planning.orchestration.judge import judge
from headrace.reorder_service.planning.orchestration.searches import cornstarch
from tests.unit.reorder_service.planning.orchestration.every_layout import every_layout
from tests.unit.reorder_service.planning.orchestration.orchestration_world import GIB, cluster_of, unit_of

STRATEGY = "entrain"
EXACT, COLOCATED = 1 + 1e-9, 1 + 1e-4
"""How many times as long as the shortest of all a step may be."""
SECONDS = {"vision": 0.5, "audio": 0.25, LLM: 1.0, GENERATOR: 0.4}


def demand_of(
    units: Sequence[str], gpus: int, *, global_batch: int = 6, layers: int = 2, parameters: float = 1e6, kept: float = 0.0
) -> Demand:
    """Units of samples of unlike sizes, on nodes of two GPUs."""
    rng = np.random.default_rng(0)
    sizes = {name: rng.lognormal(0, 0.6, 24) for name in units}
    made = tuple(
        unit_of(name, SECONDS[name], layers=layers, parameters=parameters, widths=(1, 2), kept=kept, samples=size / size.mean())
        for name, size in sizes.items()
    )
    return Demand(units=made, cluster=cluster_of(gpus // 2, 2), global_batch=global_batch)


@pytest.mark.parametrize(
    ("units", "gpus", "placement"),
    [
        (("vision", LLM), 8, "disaggregated"),
        (("vision", "audio", LLM), 6, "disaggregated"),
        (("vision", LLM, GENERATOR), 6, "disaggregated"),
        (("vision", "audio", LLM, GENERATOR), 6, "disaggregated"),
        (("vision", LLM), 8, "encoders-first"),
        (("vision", LLM), 8, "nested"),
        (("vision", "audio", LLM), 4, "encoders-first"),
        (("vision", "audio", LLM), 4, "nested"),
        (("vision", LLM, GENERATOR), 4, "encoders-first"),
        (("vision", LLM, GENERATOR), 4, "nested"),
        (("vision", "audio", LLM, GENERATOR), 8, "colocated"),
    ],
)
def test_the_answer_is_as_good_as_the_best_of_all_layouts(units: Sequence[str], gpus: int, placement: Placement) -> None:
    demand = demand_of(units, gpus)
    found = search(demand, {}, strategy=STRATEGY, num_batches=1, shortlist=1000, placements=[placement])
    nests = (False, True) if GENERATOR in units and placement == "nested" else (False,)
    every = [one for nests_generator in nests for one in every_layout(demand, placement, nests_generator=nests_generator)]
    brute = min(judge(demand, one, found.batches, STRATEGY, quick=True).step_s for one in every)
    assert found.best.candidate.placement == placement
    assert found.best.step_s <= brute * (COLOCATED if placement == "colocated" else EXACT)


@pytest.mark.parametrize("units", [("vision", LLM), ("vision", "audio", LLM)])
def test_the_answer_is_as_good_as_the_best_of_all_placements_where_memory_is_tight(units: Sequence[str]) -> None:
    """All weights on one GPU, with their gradients and the optimizer's state, are as much as it has, or more."""
    demand = demand_of(units, 4, global_batch=4, parameters=1.3e9, kept=4 * GIB)
    found = search(demand, {}, strategy=STRATEGY, num_batches=1, shortlist=1000)
    judged = [judge(demand, one, found.batches, STRATEGY) for name in PLACEMENTS for one in every_layout(demand, name)]
    fitting = [one for one in judged if one.fits]
    assert 0 < len(fitting) < len(judged)
    assert found.best.fits
    assert found.best.step_s <= min(one.step_s for one in fitting) * EXACT


@pytest.mark.parametrize("units", [("vision", LLM), ("vision", "audio", LLM), ("vision", "audio", LLM, GENERATOR)])
def test_no_division_of_stages_is_faster_than_cornstarchs(units: Sequence[str]) -> None:
    """By the formula: all units have the same replicas and slices, and every stage a layer at least."""
    demand = demand_of(units, 8, global_batch=8, layers=4)
    brute = min(
        step_s(demand, Candidate(search="all", grids=grids, microbatches=8 // dp))
        for dp, tp in itertools.product((1, 2, 4, 8), (1, 2))
        for stages in itertools.product(range(1, 5), repeat=len(units))
        if dp * tp * sum(stages) <= 8
        for grids in [{name: UnitGrid(dp=dp, tp=tp, pp=pp) for name, pp in zip(units, stages, strict=True)}]
    )
    assert step_s(demand, cornstarch.search(demand)[0]) <= brute * EXACT
