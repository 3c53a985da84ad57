"""The exact search beside full enumeration."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.plan import LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.demand import Demand
from headrace.reorder_service.planning.orchestration.estimate import fits, step_s
from headrace.reorder_service.planning.orchestration.searches import disttrain_exact
from headrace.reorder_service.planning.orchestration.searches.grid_choices import grids_within, replica_counts
from headrace.reorder_service.planning.orchestration.searches.option_table import useful_depths
from tests.examples import with_examples
from tests.unit.reorder_service.planning.orchestration.orchestration_world import cluster_of, demands, restricted, unit_of

pytestmark = pytest.mark.timeout(600)  # whichever test comes first may have to compile the kernels


def least_step_s(demand: Demand, microbatch: int = 1) -> float:
    """The shortest step of all that fit, by trying every grid of every unit; infinite if none fits."""
    cluster = demand.cluster
    try:
        counts = replica_counts(demand, microbatch)
    except ValueError:
        return math.inf
    choices = [
        grids_within(
            unit, cluster.gpus_per_node, cluster.num_gpus, counts if unit.name == LLM else range(1, cluster.num_gpus + 1)
        )
        for unit in demand.units
    ]
    best = math.inf
    for grids in within(choices, cluster.num_gpus):
        of_unit = dict(zip(demand.unit_names, grids, strict=True))
        samples = of_unit[LLM].dp * microbatch
        if max(grid.dp for grid in grids) <= samples:
            candidate = Candidate(search="all", grids=of_unit, microbatches=demand.global_batch // samples)
            seconds = step_s(demand, candidate)
            if seconds < best and fits(demand, candidate):
                best = seconds
    return best


def within(choices: list[list[UnitGrid]], gpus: int) -> Iterator[tuple[UnitGrid, ...]]:
    """One grid of each list, of so many GPUs together at most."""
    if not choices:
        yield ()
        return
    for grid in choices[0]:
        if grid.gpus <= gpus:
            for rest in within(choices[1:], gpus - grid.gpus):
                yield (grid, *rest)


def check(demand: Demand) -> None:
    best = least_step_s(demand)
    if math.isinf(best):
        with pytest.raises(ValueError, match=r"fit|too few|allowed"):
            disttrain_exact.search(demand)
    else:
        assert step_s(demand, disttrain_exact.search(demand)[0]) == pytest.approx(best, rel=1e-9)


@with_examples(40)
@given(demand=demands(most_gpus=5, most_layers=3))
def test_no_placement_is_faster(demand: Demand) -> None:
    check(demand)


@with_examples(30)
@given(demand=demands(most_gpus=5, most_layers=3), dp=st.sampled_from([None, (1, 2), (2, 3)]), pp=st.sampled_from([(1,), (2, 3)]))
def test_no_allowed_placement_is_faster(demand: Demand, dp: tuple[int, ...] | None, pp: tuple[int, ...]) -> None:
    check(restricted(demand, dp=dp, pp=pp))


@pytest.mark.slow
@with_examples(60)
@given(demand=demands(most_gpus=32, most_layers=3))
def test_no_placement_is_faster_on_32_gpus(demand: Demand) -> None:
    assume(len(demand.units) < 4)
    check(demand)


def test_the_best_leaves_gpus_idle_rather_than_use_them_in_vain() -> None:
    """One layer each, one sample: no GPU beyond one for each unit helps."""
    units = [unit_of(name, 1.0, layers=1, widths=(1,), parameters=1e8) for name in ("encoder", LLM)]
    best = disttrain_exact.search(Demand(units=tuple(units), cluster=cluster_of(4), global_batch=1))[0]
    assert best.gpus == 2


def test_depths_that_help() -> None:
    assert useful_depths(32) == [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 32]
    assert useful_depths(1) == [1]
