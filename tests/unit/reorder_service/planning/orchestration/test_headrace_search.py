"""Headrace's search finds what brute force finds on small clusters, and nothing worse than any other search."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import step_s
from headrace.reorder_service.planning.orchestration.headrace_search import PLACEMENTS, candidates_of, num_judgements, search
from headrace.reorder_service.planning.orchestration.judge import judge
from headrace.reorder_service.planning.orchestration.judgement import seconds_beside
from headrace.reorder_service.planning.orchestration.layout_space import layouts, stage_counts
from headrace.reorder_service.planning.orchestration.searches import SEARCHES
from headrace.reorder_service.planning.orchestration.searches.grid_choices import allows
from headrace.reorder_service.planning.orchestration.searches.megatron import search as megatron
from tests.examples import with_examples
from tests.unit.reorder_service.planning.orchestration.orchestration_world import cluster_of, demands, restricted, unit_of


def uneven(gpus: int, seed: int = 0, *, parameters: float = 1e6, global_batch: int = 12) -> Demand:
    """An encoder and an LLM on samples of unlike sizes, on nodes of two GPUs."""
    rng = np.random.default_rng(seed)
    sizes = [rng.lognormal(0, 0.7, 40) for _ in range(2)]
    units = tuple(
        unit_of(name, seconds, layers=3, parameters=parameters, widths=(1, 2), samples=size / size.mean())
        for name, seconds, size in zip(("vision", "llm"), (0.4, 1.0), sizes, strict=True)
    )
    return Demand(units=units, cluster=cluster_of(-(-gpus // 2), 2), global_batch=global_batch)


def all_candidates(demand: Demand) -> Iterator[Candidate]:
    """Every placement of two units on GPUs of their own, in which slices lie in one node."""
    most = demand.cluster.num_gpus
    grids = [UnitGrid(dp=dp, tp=tp, pp=pp) for tp in (1, 2) for pp in range(1, 4) for dp in range(1, most // (tp * pp) + 1)]
    for vision, llm in itertools.product(grids, repeat=2):
        if vision.gpus + llm.gpus <= most and vision.gpus % llm.tp == 0:
            for count in range(1, demand.global_batch // llm.dp + 1):
                if vision.dp * count <= demand.global_batch:
                    yield Candidate(search="all", grids={"vision": vision, "llm": llm}, microbatches=count)


@with_examples(25)
@given(demands())
def test_a_layout_s_estimate_is_that_of_its_candidate(demand: Demand) -> None:
    """With samples that are alike the largest is a mean one, unless a microbatch has less than a sample."""
    for part in layouts(demand):
        for row in range(0, part.step_s.size, 7):
            candidate = part.candidate(row, "test")
            assert candidate.gpus <= demand.cluster.num_gpus
            if all(grid.dp * part.microbatches <= demand.global_batch for grid in candidate.grids.values()):
                assert part.step_s[row] == pytest.approx(step_s(demand, candidate, overlapped=True))


def test_more_stages_are_worth_while_only_with_fewer_layers_on_the_longest() -> None:
    assert stage_counts(12) == [1, 2, 3, 4, 6, 12]
    assert stage_counts(7) == [1, 2, 3, 4, 7]
    assert stage_counts(12, chunks=2) == [1, 2, 3, 6]
    assert stage_counts(12, most=4) == [1, 2, 3, 4]


def test_the_llm_s_layouts_leave_no_gpu_idle_and_no_small_unit_without_one() -> None:
    """Two of three units beside an LLM have a hundredth of a GPU's work each; few enough microbatches have a sample for all."""
    seconds = {"vision": 1.0, "audio": 1e-4, LLM: 1.0, GENERATOR: 1e-4}
    units = tuple(unit_of(name, s, layers=1, parameters=1e6, widths=(1,)) for name, s in seconds.items())
    demand = Demand(units=units, cluster=cluster_of(16), global_batch=256)
    found = {part.microbatches: part for part in layouts(demand) if part.microbatches <= 4}
    assert list(found) == [1, 2, 3, 4]
    for part in found.values():
        assert sorted(part.dp[LLM]) == list(range(1, 62))
        assert (np.sum(list(part.dp.values()), axis=0) == 64).all()


@pytest.mark.parametrize("gpus", [2, 4, 6])
def test_no_placement_is_estimated_faster_than_the_fastest_of_the_space(gpus: int) -> None:
    demand = uneven(gpus)
    alike = replace(demand, units=tuple(unit_of(u.name, s, layers=3, parameters=1e6, widths=(1, 2)) for u, s in
                                        zip(demand.units, (0.4, 1.0), strict=True)))  # fmt: skip
    brute = min(step_s(alike, candidate, overlapped=True) for candidate in all_candidates(alike))
    assert min(part.step_s.min() for part in layouts(alike)) <= brute * (1 + 1e-9)


@pytest.mark.parametrize(("dp", "pp"), [(None, None), ([1], None), (None, [2]), ([2], [1])])
def test_the_answer_is_as_good_as_the_best_of_all_placements(dp: list[int] | None, pp: list[int] | None) -> None:
    demand = restricted(uneven(4, global_batch=8), dp=dp, pp=pp)
    found = search(demand, {}, strategy="entrain", num_batches=2, shortlist=1000, placements=["disaggregated"])
    every = [one for one in all_candidates(demand) if allows(demand, one)]
    assert allows(demand, found.best.candidate)
    brute = min(judge(demand, one, found.batches, "entrain").step_s for one in every)
    assert found.best.step_s <= brute * (1 + 1e-9)


@with_examples(20)
@given(demand=demands(), dp=st.sampled_from([None, (1, 3), (2,)]), pp=st.sampled_from([None, (1, 2), (3,)]))
def test_no_search_takes_what_is_not_allowed(demand: Demand, dp: tuple[int, ...] | None, pp: tuple[int, ...] | None) -> None:
    demand = restricted(demand, dp=dp, pp=pp)
    try:
        found, _ = candidates_of(demand, 20, PLACEMENTS)
    except ValueError:
        found = []
    for run in SEARCHES.values():
        with contextlib.suppress(ValueError):
            found += run(demand)
    assert all(allows(demand, one) for one in found)


def test_what_others_answer_in_another_placement_is_compared_only() -> None:
    demand = uneven(4)
    others = {"megatron": megatron(demand)[0]}
    found = search(demand, others, num_batches=2, placements=["colocated"])
    assert found.best.candidate.placement == "colocated"
    assert found.answers["megatron"].candidate.placement == "disaggregated"
    assert list(found.of_placements) == ["colocated"]
    with pytest.raises(ValueError, match="4 GPUs are too few for vision, llm with the dp, tp and pp that are allowed"):
        search(restricted(demand, pp=[2]), others, num_batches=1, placements=["colocated"])


def test_no_search_has_a_better_answer() -> None:
    demand = uneven(6)
    others = {"megatron": megatron(demand)[0]}
    steps: list[int] = []
    found = search(demand, others, num_batches=3, shortlist=6, advance=steps.append)
    assert found.best.step_s <= found.answers["megatron"].step_s
    assert found.answers["megatron"].candidate == others["megatron"]
    assert found.best.candidate.search == "headrace"
    assert all(found.best.key <= one.key for one in found.alternatives)
    assert 0 < sum(steps) <= num_judgements(1, 6 + 20)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_answer_is_better_than_the_best_of_its_placement(seed: int) -> None:
    """That is judged on as many batches as what is near the best of all, however far behind the placement is."""
    demand = uneven(8, seed, global_batch=16)
    others = {name: run(demand)[0] for name, run in SEARCHES.items()}
    found = search(demand, others, strategy="orchmllm", num_batches=8, shortlist=12)
    assert set(found.of_placements) == set(PLACEMENTS)
    assert found.best.candidate.placement != "disaggregated"
    for one in found.of_placements.values():
        assert one.steps_s.size >= 6
    best_apart_s = seconds_beside(found.of_placements["disaggregated"], found.best)
    assert all(best_apart_s <= seconds_beside(one, found.best) * (1 + 1e-9) for one in found.answers.values() if one.fits)


def test_a_shortlist_has_several_numbers_of_microbatches_where_one_sample_determines_the_step() -> None:
    """A sample of twenty times the mean: thousands of layouts with one microbatch take as long as that, and others longer."""
    sizes = [*[0.5] * 39, 20.5]
    units = tuple(
        unit_of(name, seconds, layers=6, parameters=1e6, widths=widths, samples=sizes)
        for name, seconds, widths in (("vision", 1.0, (4,)), ("audio", 0.01, (1, 2, 4)), (LLM, 1.0, (4,)))
    )
    demand = Demand(units=units, cluster=cluster_of(128), global_batch=256)
    alone, *others = layouts(demand)
    assert alone.microbatches == 1
    assert (alone.step_s < min(part.step_s.min() for part in others)).sum() > 4000
    found, _ = candidates_of(demand, 50, ["disaggregated"])
    of_counts = Counter(one.microbatches for one in found)
    assert of_counts.total() == 50
    assert all(of_counts[count] >= 3 for count in (1, 2, 3, 4))


@pytest.mark.parametrize(("global_batch", "judged_on"), [(12, 8), (520, 1)])
def test_what_others_answer_far_behind_is_judged_on_few_batches_only_where_they_are_large(
    global_batch: int, judged_on: int
) -> None:
    demand = uneven(6, global_batch=global_batch)
    one_each = UnitGrid(dp=1, tp=1, pp=1)
    slow = Candidate(search="slow", grids={"vision": one_each, "llm": one_each}, microbatches=4)
    others = {"megatron": megatron(demand)[0], "slow": slow}
    found = search(demand, others, strategy="disttrain", num_batches=8, shortlist=4, placements=["disaggregated"])
    assert found.answers["slow"].step_s > 2 * found.best.step_s
    assert found.answers["slow"].steps_s.size == judged_on
    assert found.best.steps_s.size == 8


def test_a_tight_memory_is_kept_where_it_can_be() -> None:
    """The weights of each unit take more than a GPU, so that both are cut."""
    demand = uneven(4, parameters=4.5e9)
    found = search(demand, {}, num_batches=2, placements=["disaggregated"])
    assert found.best.fits
    assert [grid.tp * grid.pp for grid in found.best.candidate.grids.values()] == [2, 2]


def test_colocated_candidates_are_on_all_gpus() -> None:
    found, count = candidates_of(uneven(4), 10, ["colocated"])
    assert {one.placement for one in found} == {"colocated"}
    assert {one.gpus for one in found} == {4}
    assert [one.microbatches for one in found] == [1, 2, 3]
    assert count == 3


def test_too_few_gpus_are_said() -> None:
    with pytest.raises(ValueError, match="1 GPUs are too few for vision, llm"):
        search(replace(uneven(2), cluster=cluster_of(1, 1)), {}, placements=["disaggregated"])
