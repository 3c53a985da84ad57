"""Layouts with encoders on the LLM's GPUs: they are on all of them, fit what they can, and none is estimated faster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from headrace.execution_spec import UnitExecution, check_sharing
from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.orchestration.bubble_bound import bubble_bound_s
from headrace.reorder_service.planning.orchestration.candidate import Candidate, Placement, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import fits
from headrace.reorder_service.planning.orchestration.headrace_search import candidates_of, search
from headrace.reorder_service.planning.orchestration.judge import draw_batches, judge, simulated
from headrace.reorder_service.planning.orchestration.judgement import in_words
from headrace.reorder_service.planning.orchestration.memory_curve import memory_curves
from headrace.reorder_service.planning.orchestration.searches.grid_choices import allows
from headrace.reorder_service.planning.orchestration.shared_space import can_be_cut, in_pieces, shared_candidates
from tests.unit.reorder_service.planning.orchestration.orchestration_world import GIB, cluster_of, unit_of

BOTH = ("encoders-first", "nested")


def demand_of(gpus: int = 8, *, parameters: float = 1e9, kept: float = 0.0, **options: object) -> Demand:
    rng = np.random.default_rng(3)
    sizes = [rng.lognormal(0, 0.5, 64) for _ in range(3)]
    units = tuple(
        unit_of(name, seconds, layers=8, parameters=parameters, kept=kept, widths=(1, 2), samples=size / size.mean())
        for name, seconds, size in zip(("vision", "audio", LLM), (0.5, 0.2, 2.0), sizes, strict=True)
    )
    return Demand(units=units, cluster=cluster_of(gpus // 4), **{"global_batch": 32, **options})  # type: ignore[arg-type]


def test_encoders_are_on_all_gpus_of_the_llm() -> None:
    found, count = shared_candidates(demand_of(), 10, BOTH, "test")
    assert {one.placement for one in found} == set(BOTH)
    assert count > len(found) > 4
    for one in found:
        assert {grid.gpus for grid in one.grids.values()} == {one.gpus}
        assert one.gpus <= 8
        assert one.guests == ("vision", "audio")
        assert one.microbatches * one.grids[LLM].dp <= 32
        assert fits(demand_of(), one)


def all_shared(demand: Demand, placement: Placement) -> Iterator[Candidate]:
    """Every layout of an encoder on the GPUs of an LLM, with one or two slices and up to four stages of each."""
    gpus, shapes = demand.cluster.num_gpus, list(itertools.product((1, 2), (1, 2, 4)))
    for (tp, pp), (guest_tp, guest_pp) in itertools.product(shapes, repeat=2):
        for dp in range(1, gpus // (tp * pp) + 1):
            ranks = dp * tp * pp
            for count in range(1, demand.global_batch // dp + 1):
                if ranks % (guest_tp * guest_pp) == 0:
                    guest = UnitGrid(dp=ranks // (guest_tp * guest_pp), tp=guest_tp, pp=guest_pp)
                    grids = {"vision": guest, LLM: UnitGrid(dp=dp, tp=tp, pp=pp)}
                    yield Candidate(search="all", grids=grids, microbatches=count, placement=placement)


@pytest.mark.parametrize("dp", [None, [1], [1, 2]])
@pytest.mark.parametrize("placement", BOTH)
def test_the_answer_is_as_good_as_the_best_of_all_shared_layouts(placement: Placement, dp: list[int] | None) -> None:
    whole = demand_of(4, global_batch=8, kept=4 * GIB)
    units = tuple(replace(whole.units[i], only_dp=tuple(dp) if dp and i == 2 else None) for i in (0, 2))
    demand = replace(whole, units=units)
    found = search(demand, {}, strategy="entrain", num_batches=1, shortlist=1000, placements=[placement])
    every = [one for one in all_shared(demand, placement) if allows(demand, one)]
    judged = [judge(demand, one, found.batches, "entrain") for one in every]
    assert allows(demand, found.best.candidate)
    assert found.best.fits
    assert found.best.step_s <= min(one.step_s for one in judged if one.fits) * (1 + 1e-9)


def test_large_models_are_cut_until_they_fit() -> None:
    """4 x 10^9 weights of 18 bytes or more are more than a GPU has, and of all three units more than two have."""
    demand = demand_of(parameters=4e9)
    found, _ = shared_candidates(demand, 10, BOTH, "test")
    judged = judge(demand, found[0], draw_batches(demand, 1, 0))
    assert judged.fits
    assert found[0].grids["vision"].tp * found[0].grids["vision"].pp > 1


def test_nested_encoders_need_less_memory_than_those_in_front() -> None:
    """A rank encodes four samples of 4 GiB each, and has room for two of them or three."""
    demand = demand_of(kept=12 * GIB, global_batch=64)
    peaks = {}
    for placement in BOTH:
        one = shared_candidates(demand, 40, [placement], "test")[0]
        peaks[placement] = [candidate for candidate in one if candidate.grids[LLM].pp > 1 and fits(demand, candidate)]
    assert len(peaks["nested"]) > len(peaks["encoders-first"])


def test_an_llm_alone_shares_with_nobody() -> None:
    assert shared_candidates(replace(demand_of(), units=demand_of().units[-1:]), 10, BOTH, "test") == ([], 0)


@pytest.mark.parametrize("placement", BOTH)
def test_eager_stages_hold_as_many_microbatches_as_their_memory_allows(placement: str) -> None:
    depths = {}
    for kept in (0.0, 1.5 * GIB):
        demand = demand_of(kept=kept, schedule="eager", global_batch=64)
        found = [
            one for one in shared_candidates(demand, 40, [placement], "test")[0] if one.grids[LLM].pp > 1 and fits(demand, one)
        ]
        depths[kept] = max(one.in_flight / one.microbatches for one in found if one.in_flight)
        judged = judge(demand, found[0], draw_batches(demand, 1, 0))
        assert judged.step_s >= 64 * 2.7 / 8
        assert f", {found[0].in_flight} in flight" in in_words(found[0])
    assert depths[0.0] == 1.0, "all of them"
    assert depths[1.5 * GIB] <= 1.0


def with_generator(gpus: int = 8, **options: object) -> Demand:
    demand = demand_of(gpus, **options)
    return replace(demand, units=(*demand.units, unit_of(GENERATOR, 1.0, widths=(1, 2), samples=[1.0] * 64)))


def test_a_generator_has_gpus_of_its_own_beside_them() -> None:
    demand = with_generator()
    every, _ = shared_candidates(demand, 10, BOTH, "test")
    assert {one.placement for one in every if one.has_generator} == {"nested"}, "the LLM's backwards wait for it"
    found = [one for one in every if not one.has_generator]
    assert {one.placement for one in found} == set(BOTH)
    for one in found:
        assert one.gpus == one.grids[LLM].gpus + one.grids[GENERATOR].gpus <= 8
        assert {one.grids[unit].gpus for unit in one.guests} == {one.grids[LLM].gpus}
        assert one.grids[LLM].gpus % one.grids[GENERATOR].tp == 0
    judged = [judge(demand, one, draw_batches(demand, 1, 0)) for one in found]
    assert {rank.unit for rank in judged[0].ranks} == {LLM, GENERATOR}
    assert min(one.step_s for one in judged) >= 32 * 3.7 / 8, "all the work, spread evenly over the GPUs"
    assert all(len(one.ranks) == one.candidate.grids[LLM].pp + one.candidate.grids[GENERATOR].pp for one in judged)


def test_a_generator_is_nested_on_all_gpus_as_encoders_are() -> None:
    demand = with_generator()
    found = [one for one in shared_candidates(demand, 10, ["nested"], "test")[0] if one.has_generator]
    assert any(one.grids[LLM].pp > 1 for one in found)
    for one in found:
        assert one.guests == ("vision", "audio", GENERATOR)
        assert {grid.gpus for grid in one.grids.values()} == {one.gpus}
        assert fits(demand, one)
        assert in_words(one).startswith("vision ")
        assert f", generator {one.grids[GENERATOR].dp} x " in in_words(one).split(" nested in ")[0]
    batches = draw_batches(demand, 1, 0)
    for one in found:
        judged = judge(demand, one, batches)
        assert judged.step_s >= 32 * 3.7 / 8, "all the work, spread evenly over the GPUs"
        assert {rank.unit for rank in judged.ranks} == {LLM}
        on_llm = {unit: UnitExecution(on=LLM if unit in one.guests else None) for unit in one.grids}
        check_sharing(on_llm, "nested", {unit: grid.gpus for unit, grid in one.grids.items()})


@pytest.mark.parametrize(("placement", "of_found"), [("encoders-first", 0), ("nested", 0), ("nested", -1)])
def test_a_generator_and_shared_gpus_have_curves_of_memory(placement: str, of_found: int) -> None:
    demand = with_generator(kept=1 * GIB)
    one = shared_candidates(demand, 4, [placement], "test")[0][of_found]
    assert one.has_generator == (of_found == -1)
    batches = draw_batches(demand, 1, 0)
    judged, step = judge(demand, one, batches), simulated(demand, one, batches[0])
    curves = memory_curves(demand, one, step, judged.ranks)
    assert [curve.unit for curve in curves] == [rank.unit for rank in judged.ranks]
    for curve, rank in zip(curves, judged.ranks, strict=True):
        assert curve.peak <= rank.total * (1 + 1e-9)


@pytest.mark.parametrize("placement", BOTH)
def test_interleaved_stages_have_their_parts(placement: str) -> None:
    demand = demand_of(schedule="interleaved", chunks=2)
    found, _ = shared_candidates(demand, 10, [placement], "test")
    assert any(one.grids[LLM].pp > 1 for one in found)
    assert all(grid.pp * 2 <= 8 for one in found for grid in one.grids.values())
    judged = judge(demand, found[0], draw_batches(demand, 1, 0))
    assert judged.step_s >= 32 * 2.7 / 8


def test_encoders_of_one_stage_are_cut_into_pieces_where_the_llm_has_bubbles() -> None:
    demand = demand_of()
    grids = {"vision": UnitGrid(dp=8, tp=1, pp=1), "audio": UnitGrid(dp=8, tp=1, pp=1), LLM: UnitGrid(dp=2, tp=1, pp=4)}
    nested = Candidate(search="test", grids=grids, microbatches=8, placement="nested")
    assert can_be_cut(demand, nested)
    assert [one.pieces for one in in_pieces(demand, nested, (2, 4, 16))] == [2, 4], "there are eight layers"
    assert not can_be_cut(demand, replace(nested, placement="encoders-first"))
    assert not can_be_cut(demand, replace(nested, grids=grids | {LLM: UnitGrid(dp=8, tp=1, pp=1)}))
    assert not can_be_cut(demand, replace(nested, grids=grids | {"vision": UnitGrid(dp=4, tp=1, pp=2)}))
    assert not can_be_cut(demand_of(schedule="interleaved", chunks=2), nested)
    batches = draw_batches(demand, 2, 0)
    whole, cut = (judge(demand, one, batches) for one in (nested, replace(nested, pieces=4)))
    assert cut.step_s <= whole.step_s * 1.02
    assert cut.fullest.activations <= whole.fullest.activations * (1 + 1e-9)
    assert in_words(cut.candidate).startswith("vision 8 x 1 x 1, audio 8 x 1 x 1 in 4 pieces nested in llm")


def test_the_search_says_the_best_of_every_placement() -> None:
    found = search(demand_of(), {}, num_batches=2, shortlist=8)
    assert set(found.of_placements) == {"disaggregated", "colocated", *BOTH}
    first, *others = found.of_placements.values()
    assert first is found.best
    assert all(found.best.key <= one.key for one in others)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("has_generator", [False, True])
def test_no_nested_step_is_shorter_than_its_bound(stages: int, has_generator: bool) -> None:
    """Samples cross replicas, so that what one GPU encodes another waits for."""
    demand = with_generator() if has_generator else demand_of()
    on_all = UnitGrid(dp=8, tp=1, pp=1)
    grids = dict.fromkeys(demand.unit_names, on_all) | {LLM: UnitGrid(dp=8 // stages, tp=1, pp=stages)}
    nested = Candidate(search="test", grids=grids, microbatches=stages, placement="nested", has_generator=has_generator)
    batches = draw_batches(demand, 4, 0)
    judged = judge(demand, nested, batches)
    bound_s = bubble_bound_s(demand, judged, batches)
    work_s = 32 * (3.7 if has_generator else 2.7) / 8
    assert work_s * 0.8 < bound_s <= judged.step_s


def test_only_asked_for_placements_are_taken() -> None:
    found, _ = candidates_of(demand_of(), 10, ["nested"])
    assert {one.placement for one in found} == {"nested"}
