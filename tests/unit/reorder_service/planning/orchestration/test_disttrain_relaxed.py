"""DistTrain's convex problem: its optimum beside a grid, its rounding beside the exact integer optimum."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import LLM
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import step_s
from headrace.reorder_service.planning.orchestration.searches import disttrain_exact, disttrain_relaxed
from headrace.reorder_service.planning.orchestration.searches.convex_kernels import level_with_gpus
from tests.examples import with_examples
from tests.unit.reorder_service.planning.orchestration.orchestration_world import cluster_of, demands, unit_of

pytestmark = pytest.mark.timeout(600)  # whichever test comes first may have to compile the kernels

sizes = st.floats(0.1, 10.0)


@with_examples(80)
@given(work=st.lists(sizes, min_size=1, max_size=4), least=st.lists(sizes, min_size=4, max_size=4), gpus=st.floats(1.0, 60.0))
def test_no_division_of_gpus_is_more_level(work: list[float], least: list[float], gpus: float) -> None:
    """A level is reached if the fewest GPUs with which each unit keeps it are not too many; a lower one is not."""
    needs, low = np.array(work), np.array(least[: len(work)])
    high = low + 8.0
    level = level_with_gpus(needs, low, high, gpus)
    if low.sum() > gpus:
        assert math.isinf(level)
        return
    assert np.maximum(low, needs / level).sum() <= gpus * (1 + 1e-9)
    assert (needs / level <= high * (1 + 1e-9)).all()
    lower = level * (1 - 1e-6)
    assert np.maximum(low, needs / lower).sum() > gpus or (needs / lower > high).any() or level <= (needs / high).max()


@with_examples(40)
@given(demand=demands())
def test_rounding_never_beats_the_integer_optimum(demand: Demand) -> None:
    try:
        rounded = disttrain_relaxed.search(demand)
    except ValueError:
        return
    exact = disttrain_exact.search(demand)[0]
    assert min(step_s(demand, candidate) for candidate in rounded) >= step_s(demand, exact) * (1 - 1e-9)


def test_units_get_gpus_in_proportion_where_stages_divide() -> None:
    """Work 2 : 4 on 12 GPUs, one sample on each of 4 replicas of both."""
    units = tuple(
        unit_of(name, seconds, layers=48, parameters=1e8, trained_share=0.0, widths=(1,))
        for name, seconds in [("e", 2.0), (LLM, 4.0)]
    )
    best = disttrain_relaxed.search(Demand(units=units, cluster=cluster_of(3), global_batch=4))[0]
    assert {name: grid.gpus for name, grid in best.grids.items()} == {"e": 4, LLM: 8}


def test_gpus_stay_idle_where_stages_do_not_divide() -> None:
    """An LLM of two layers on 11 GPUs: 4 replicas of 2 stages."""
    units = (unit_of(LLM, 6.0, layers=2, parameters=1e8, trained_share=0.0, widths=(1,)),)
    best = disttrain_relaxed.search(Demand(units=units, cluster=cluster_of(11, 1), global_batch=4))[0]
    assert best.gpus == 8


@pytest.mark.parametrize("module", [disttrain_exact, disttrain_relaxed])
def test_only_the_best_on_request(module: object) -> None:
    demand = Demand(units=(unit_of("e", 1.0), unit_of(LLM, 4.0)), cluster=cluster_of(4), global_batch=16)
    every, best = module.search(demand), module.search(demand, worth=1.0)  # type: ignore[attr-defined]
    assert best[0] == every[0]
    assert len(best) <= len(every)
