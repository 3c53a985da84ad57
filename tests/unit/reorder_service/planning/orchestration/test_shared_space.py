"""Layouts with encoders on the LLM's GPUs: they are on all of them, fit what they can, and none is estimated faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import fits
from headrace.reorder_service.planning.orchestration.headrace_search import candidates_of, search
from headrace.reorder_service.planning.orchestration.judge import draw_batches, judge
from headrace.reorder_service.planning.orchestration.shared_space import shared_candidates
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


@pytest.mark.parametrize(
    "demand",
    [
        demand_of(schedule="eager"),
        demand_of(schedule="interleaved", chunks=2),
        replace(demand_of(), units=(*demand_of().units, unit_of(GENERATOR, 1.0, samples=[1.0] * 64))),
        replace(demand_of(), units=demand_of().units[-1:]),
    ],
)
def test_what_is_not_searched_has_none(demand: Demand) -> None:
    assert shared_candidates(demand, 10, BOTH, "test") == ([], 0)


def test_the_search_says_the_best_of_every_placement() -> None:
    found = search(demand_of(), {}, num_batches=2, shortlist=8)
    assert set(found.of_placements) == {"disaggregated", "colocated", *BOTH}
    first, *others = found.of_placements.values()
    assert first is found.best
    assert all(found.best.key <= one.key for one in others)


def test_only_asked_for_placements_are_taken() -> None:
    found, _ = candidates_of(demand_of(), 10, ["nested"])
    assert {one.placement for one in found} == {"nested"}
