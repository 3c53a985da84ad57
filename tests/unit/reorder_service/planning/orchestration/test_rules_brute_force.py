"""Megatron's layouts and the ratio-based ones beside all grids of all units on few GPUs.

Both searches fix most of a layout by rules, and choose the fastest of what these leave open. Here the rules are conditions that
the grids of a layout fulfil or not, and every grid is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand, UnitDemand
from headrace.reorder_service.planning.orchestration.estimate import (
    fits,
    in_flight,
    kept_bytes_of_sample,
    state_bytes,
    step_s,
    usable_bytes,
)
from headrace.reorder_service.planning.orchestration.searches import megatron, ratio
from headrace.reorder_service.planning.orchestration.stage_cuts import layer_share
from tests.examples import with_examples
from tests.unit.reorder_service.planning.orchestration.every_layout import NAME, unit_grids
from tests.unit.reorder_service.planning.orchestration.orchestration_world import cluster_of, demands, restricted, unit_of

pytestmark = pytest.mark.timeout(600)  # whichever test comes first may have to compile the kernels
WIDEST, MOST = 8, 10
"""Slices of a layer at most, and layouts that a search returns at most."""
Ranking = list[tuple[float, int]]
"""Seconds of a step and GPUs of layouts, the best first."""

few_gpus = demands(most_gpus=8, most_layers=3)
microbatches = st.integers(1, 3)
allowed_dp, allowed_pp = st.sampled_from([None, (1, 2), (2, 3)]), st.sampled_from([None, (1,), (1, 3)])


def is_allowed(unit: UnitDemand, grid: UnitGrid) -> bool:
    return (unit.only_dp is None or grid.dp in unit.only_dp) and (unit.only_pp is None or grid.pp in unit.only_pp)


def llm_of(demand: Demand) -> UnitDemand:
    return next(unit for unit in demand.units if unit.name == LLM)


def layout_of(demand: Demand, llm: UnitGrid, others: Mapping[str, UnitGrid], samples: int) -> Candidate:
    grids = {unit.name: llm if unit.name == LLM else others[unit.name] for unit in demand.units}
    return Candidate(search=NAME, grids=grids, microbatches=demand.global_batch // samples)


def ranked(demand: Demand, layouts: Iterable[Candidate]) -> Ranking:
    """The best of those that fit, by the formula, and of equally fast ones those of fewer GPUs first."""
    return sorted((step_s(demand, one), one.gpus) for one in layouts if fits(demand, one))[:MOST]


def found_by(search: Callable[[Demand, int], list[Candidate]], demand: Demand, microbatch: int) -> Ranking:
    """What a search returns; nothing where it refuses."""
    try:
        found = search(demand, microbatch)
    except ValueError:
        return []
    return [(step_s(demand, one), one.gpus) for one in found]


def megatron_layouts(demand: Demand, microbatch: int) -> Iterator[Candidate]:
    """All in which every unit but the LLM has one stage on as many GPUs as an LLM's stage has."""
    for llm in unit_grids(demand, llm_of(demand), demand.cluster.num_gpus):
        samples, stage = llm.dp * microbatch, llm.dp * llm.tp
        others = {unit.name: one_stage(demand, unit, llm, microbatch) for unit in demand.units if unit.name != LLM}
        known = {name: grid for name, grid in others.items() if grid is not None}
        is_whole = len(known) == len(others) and all(is_allowed(unit, known.get(unit.name, llm)) for unit in demand.units)
        has_room = llm.gpus + stage * len(others) <= demand.cluster.num_gpus
        if is_whole and has_room and llm.tp <= WIDEST and demand.global_batch % samples == 0:
            yield layout_of(demand, llm, known, samples)


def one_stage(demand: Demand, unit: UnitDemand, llm: UnitGrid, microbatch: int) -> UnitGrid | None:
    """Of all grids that fill each LLM replica's GPUs evenly, with a sample for each of its own: that of most GPUs, and of such
    the one of most replicas."""
    grids = [
        grid
        for grid in unit_grids(demand, unit, llm.dp * llm.tp)
        if grid.pp == 1 and grid.dp % llm.dp == 0 and grid.dp <= llm.dp * microbatch and llm.tp % grid.tp == 0
    ]
    return max(grids, key=lambda grid: (grid.gpus, grid.dp), default=None)


def megatron_ranking(demand: Demand, microbatch: int) -> Ranking:
    """That of the widest slices with which any layout fits."""
    of_width: dict[int, list[Candidate]] = {}
    for one in megatron_layouts(demand, microbatch):
        of_width.setdefault(one.grids[LLM].tp, []).append(one)
    rankings = [ranked(demand, of_width[width]) for width in sorted(of_width, reverse=True)]
    return next((ranking for ranking in rankings if ranking), [])


def shares_of(demand: Demand) -> list[dict[str, int]]:
    """All divisions of the GPUs, one for each unit at least, that are nearest to the units' shares of the work."""
    work = [demand.step_s(unit, min(unit.forward_s)) for unit in demand.units]
    gpus = demand.cluster.num_gpus
    divisions = [one for one in itertools.product(range(1, gpus + 1), repeat=len(work)) if sum(one) == gpus]
    wrong = [sum((number - gpus * each / sum(work)) ** 2 for number, each in zip(one, work, strict=True)) for one in divisions]
    return [
        dict(zip(demand.unit_names, one, strict=True))
        for one, how_wrong in zip(divisions, wrong, strict=True)
        if how_wrong <= min(wrong) + 1e-9
    ]


def ratio_layouts(demand: Demand, shares: Mapping[str, int], microbatch: int) -> Iterator[Candidate]:
    """All whose LLM has its widest slices, and as many stages as its share and what the others leave of the GPUs hold."""
    llm, gpus = llm_of(demand), demand.cluster.num_gpus
    every = [one for one in unit_grids(demand, llm, shares[LLM]) if one.tp <= WIDEST]
    widest = max((one.tp for one in every), default=0)
    for dp in range(1, demand.global_batch // microbatch + 1):
        depth = max((one.pp for one in every if one.tp == widest and one.dp == dp), default=0)
        if depth == 0 or demand.global_batch % (dp * microbatch) or not (llm.only_dp is None or dp in llm.only_dp):
            continue
        behind = {name: 0 if name == GENERATOR else depth + (GENERATOR in shares) for name in shares}
        found = {
            unit.name: beside(demand, unit, shares[unit.name], dp * microbatch, behind[unit.name])
            for unit in demand.units
            if unit.name != LLM
        }
        others = {name: grid for name, grid in found.items() if grid is not None}
        left = min(shares[LLM], gpus - sum(grid.gpus for grid in others.values()))
        fitting = [one for one in every if (one.dp, one.tp) == (dp, widest) and one.gpus <= left and is_allowed(llm, one)]
        if len(others) == len(found) and fitting:
            yield layout_of(demand, max(fitting, key=lambda one: one.pp), others, dp * microbatch)


def beside(demand: Demand, unit: UnitDemand, share: int, samples: int, behind: int) -> UnitGrid | None:
    """The grid of a unit beside the LLM, none of whose replicas is without a sample.

    It is on the fewest GPUs from its share on that hold it, leaves the fewest of them idle, and has the smallest replicas, of
    such the ones of fewest stages. Where none holds it, it has the largest replicas of its share, and as many as there is room
    for.
    """
    grids = [one for one in unit_grids(demand, unit, demand.cluster.num_gpus - 1) if one.dp <= samples and is_allowed(unit, one)]
    if holding := [one for one in grids if holds(demand, unit, one, samples, behind)]:
        gpus = max(share, min(one.gpus for one in holding))
        return min((one for one in holding if one.gpus <= gpus), key=lambda one: (-one.gpus, one.tp * one.pp, one.pp))
    return max((one for one in grids if one.gpus <= share), key=lambda one: (one.tp * one.pp, one.pp, one.dp), default=None)


def holds(demand: Demand, unit: UnitDemand, grid: UnitGrid, samples: int, behind: int) -> bool:
    """Whether a GPU holds the unit's state, and what it keeps of the microbatches that are on their way."""
    after, count = grid.pp - 1 + behind, demand.global_batch // samples
    held = float(in_flight(demand, count, after, grid.pp, after)) * samples / grid.dp
    kept = held * kept_bytes_of_sample(unit, grid.tp) * float(layer_share(unit, grid.pp))
    return float(state_bytes(unit, grid.dp, grid.tp, grid.pp)) + kept <= usable_bytes(demand.cluster)


def ratio_rankings(demand: Demand, microbatch: int) -> list[Ranking]:
    """That of each division of the GPUs that is as near as any to the shares of the work."""
    return [ranked(demand, ratio_layouts(demand, shares, microbatch)) for shares in shares_of(demand)] or [[]]


@with_examples(100)
@given(demand=few_gpus, microbatch=microbatches, dp=allowed_dp, pp=allowed_pp)
def test_no_layout_by_megatrons_rules_is_faster(
    demand: Demand, microbatch: int, dp: Sequence[int] | None, pp: Sequence[int] | None
) -> None:
    demand = restricted(demand, dp=dp, pp=pp)
    assert found_by(megatron.search, demand, microbatch) == megatron_ranking(demand, microbatch)


@with_examples(100)
@given(demand=few_gpus, microbatch=microbatches, dp=allowed_dp, pp=allowed_pp)
def test_no_layout_by_the_ratio_of_work_is_faster(
    demand: Demand, microbatch: int, dp: Sequence[int] | None, pp: Sequence[int] | None
) -> None:
    demand = restricted(demand, dp=dp, pp=pp)
    assert found_by(ratio.search, demand, microbatch) in ratio_rankings(demand, microbatch)


def test_the_rules_leave_something_open() -> None:
    """So that the properties above compare layouts, and not refusals only."""
    demand = Demand(
        units=(unit_of("encoder", 1.0, parameters=1e8), unit_of(LLM, 3.0, parameters=1e8)), cluster=cluster_of(4), global_batch=12
    )
    assert len(megatron_ranking(demand, 1)) > 1
    assert [len(ranking) > 1 for ranking in ratio_rankings(demand, 1)] == [True]
