"""The search simulates every batch once, and sorts out none that judging all of them would have kept in front."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.plan import LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import fullest_bytes, fullest_of_layouts
from headrace.reorder_service.planning.orchestration.headrace_search import candidates_of, search
from headrace.reorder_service.planning.orchestration.judge import draw_batches, judge
from headrace.reorder_service.planning.orchestration.layout_space import layouts
from headrace.reorder_service.planning.orchestration.simulated_steps import SimulatedSteps, sorted_out
from tests.unit.reorder_service.planning.orchestration.orchestration_world import GIB, cluster_of, unit_of

EVERY = ("disaggregated", "colocated", "encoders-first", "nested")


def demand_of(seed: int, gpus: int = 8, *, kept: float = 0.0, global_batch: int = 32) -> Demand:
    rng = np.random.default_rng(seed)
    sizes = [rng.lognormal(0, 0.6, 96) for _ in range(2)]
    units = tuple(
        unit_of(name, seconds, layers=4, parameters=1e8, kept=kept, widths=(1, 2), samples=size / size.mean())
        for name, seconds, size in zip(("vision", LLM), (0.3 + 0.4 * seed, 1.0), sizes, strict=True)
    )
    return Demand(units=units, cluster=cluster_of(gpus // 4), global_batch=global_batch)


@pytest.mark.parametrize("kept", [0.0, 8.0])
def test_judgements_are_those_of_the_judge(kept: float) -> None:
    """Where activations are too many, a quick plan is made anew with more care when it is asked for."""
    demand = demand_of(0, kept=kept * GIB)
    batches = draw_batches(demand, 3, 0)
    steps = SimulatedSteps(demand, batches, 0)
    for candidate in [one for placement in EVERY for one in candidates_of(demand, 3, [placement])[0][:2]]:
        for quick, indices in ((True, [0]), (True, [0, 1]), (False, [0, 1, 2])):
            found = steps.judged(candidate, indices, "orchmllm", quick=quick)
            expected = judge(demand, candidate, batches[indices], "orchmllm", quick=quick)
            assert found.steps_s.tolist() == expected.steps_s.tolist()
            assert found.ranks == expected.ranks
            assert found.parts == pytest.approx(expected.parts)


def test_threads_change_nothing() -> None:
    demand = demand_of(1, 4, global_batch=16)
    with ThreadPoolExecutor(4) as threads:
        found, alone = (
            search(demand, {}, strategy="entrain", num_batches=3, shortlist=6, mapped=mapped) for mapped in (threads.map, map)
        )
    assert found.best.candidate == alone.best.candidate
    assert found.best.steps_s.tolist() == alone.best.steps_s.tolist()
    assert found.num_simulated == alone.num_simulated
    assert [one.key for one in found.alternatives] == [one.key for one in alone.alternatives]


def test_a_step_is_simulated_once_and_forgotten_with_its_candidate() -> None:
    demand = demand_of(0)
    steps = SimulatedSteps(demand, draw_batches(demand, 4, 0), 0)
    one = candidates_of(demand, 1, ["disaggregated"])[0][0]
    for indices, quick, number in (([0], True, 1), ([0, 1], True, 2), ([0, 1, 2, 3], False, 4)):
        steps.judged(one, indices, "entrain", quick=quick)
        assert steps.num_simulated == number
    steps.judged(one, [0], "auto", quick=True)
    assert steps.num_simulated == 5
    steps.forget_all_but([])
    steps.judged(one, [0], "entrain", quick=True)
    assert steps.num_simulated == 6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_first_of_all_are_the_first_of_those_that_are_judged(seed: int) -> None:
    demand = demand_of(seed)
    batches = draw_batches(demand, 2, 0)
    pool, _ = candidates_of(demand, 30, EVERY)
    steps = SimulatedSteps(demand, batches, 0)
    judged = sorted_out(steps, pool, "orchmllm", count=2, left=6)
    every = sorted((judge(demand, one, batches, "orchmllm", quick=True) for one in pool), key=lambda one: one.key)
    assert [one.key for one in judged[:6]] == [one.key for one in every[:6]]
    assert steps.num_simulated < 2 * len(pool), "the others were not judged to the end"
    assert {one.candidate.placement for one in judged} == {one.placement for one in pool}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_best_of_a_placement_is_found_whatever_others_answer_there(seed: int) -> None:
    """Two candidates are left in all. Three slow answers of other searches are judged in any case, and before all."""
    demand = demand_of(seed)
    batches = draw_batches(demand, 2, 0)
    pool, _ = candidates_of(demand, 30, EVERY)
    one_gpu = dict.fromkeys(demand.unit_names, UnitGrid(dp=1, tp=1, pp=1))
    answers = [Candidate(search="slow", grids=one_gpu, microbatches=count) for count in (8, 16, 32)]
    certain = {one.layout for one in answers}
    judged = sorted_out(SimulatedSteps(demand, batches, 0), [*pool, *answers], "orchmllm", count=2, left=2, certain=certain)
    assert certain <= {one.candidate.layout for one in judged}
    for placement in EVERY:
        alike = [one for one in pool if one.placement == placement]
        best_s = min(judge(demand, one, batches, "orchmllm", quick=True).step_s for one in alike)
        assert min(one.step_s for one in judged if one.candidate.placement == placement) == best_s


@pytest.mark.parametrize("seed", [0, 1])
def test_no_candidate_of_the_shortlist_is_better_on_the_judges_batches(seed: int) -> None:
    """As by judging all of them on all batches."""
    demand = demand_of(seed, global_batch=16)
    found = search(demand, {}, strategy="orchmllm", num_batches=4, shortlist=20)
    pool, _ = candidates_of(demand, 20, EVERY)
    every = [judge(demand, one, found.batches, "orchmllm" if one.placement != "colocated" else "auto") for one in pool]
    assert found.best.step_s <= min(one.step_s for one in every if one.fits) * (1 + 1e-9)


def test_what_cannot_be_run_is_left_out() -> None:
    demand = demand_of(0)
    steps = SimulatedSteps(demand, draw_batches(demand, 1, 0), 0)
    [one] = candidates_of(demand, 1, ["disaggregated"])[0]
    advanced: list[int] = []
    assert sorted_out(steps, [one], "no such strategy", count=1, left=1, advance=advanced.append) == []
    assert advanced == [1]


def test_the_memory_of_a_whole_part_of_the_space_is_that_of_each_candidate() -> None:
    demand = demand_of(0, kept=2 * GIB)
    for part in layouts(demand):
        memories = fullest_of_layouts(demand, part.microbatches, part.dp, part.tp, part.pp)
        candidates: list[Candidate] = [part.candidate(row, "test") for row in range(part.step_s.size)]
        assert memories.tolist() == pytest.approx([fullest_bytes(demand, one) for one in candidates])
        assert [one.estimated_s for one in candidates] == part.of_means_s.tolist()
        assert (part.of_means_s <= part.step_s).all()
