"""Eager-forward 1F1B goes as deep as the memory limit allows, and no deeper."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.simulator import peak_memory, simulate
from headrace.reorder_service.planning.simulation.work import Work
from headrace.reorder_service.planning.strategies import STRATEGIES, plan_of
from tests.examples import with_examples
from tests.unit.reorder_service.planning.simulator_world import batch_of, plans


def limited(batch: Batch, limit: float, **execution: object) -> Batch:
    return replace(batch, execution=replace(batch.execution, memory_limit=limit, **execution))


def peak(batch: Batch, slots: Slots, in_flight: int | None) -> float:
    return float(peak_memory(Work.of(limited(batch, math.inf, in_flight=in_flight), slots)).max())


def equal_microbatches(count: int, **execution: object) -> tuple[Batch, Slots]:
    """`count` microbatches that take one unit of memory on each of four stages."""
    return batch_of({"llm": [4.0] * count}, {"llm": 4}, microbatches=count, **execution), np.arange(count)[None]


@pytest.mark.parametrize(("limit", "expected"), [(0.5, 1), (1, 1), (2.5, 2), (4, 4), (7, 7), (8, 8), (100, 8)])
def test_as_many_microbatches_are_in_flight_as_fit(limit: float, expected: int) -> None:
    batch, slots = equal_microbatches(8, schedule="eager", memory_limit=limit)
    assert planned_work(batch, slots).execution.in_flight == expected


@with_examples(200)
@given(plans(), st.floats(0.01, 1.2))
def test_the_depth_is_the_largest_that_fits(plan: tuple[Batch, Slots], share: float) -> None:
    batch, slots = plan
    batch = replace(batch, execution=replace(batch.execution, schedule="eager", chunks=1, in_flight=None))
    limit = share * peak(batch, slots, None)
    assume(limit > 0)
    found = planned_work(limited(batch, limit), slots).execution.in_flight
    most = max(Work.of(batch, slots).occupied.sum(axis=1))
    assert found == max((depth for depth in range(1, most + 1) if peak(batch, slots, depth) <= limit), default=1)


@pytest.mark.slow
@given(plans())
def test_a_deeper_schedule_never_holds_less(plan: tuple[Batch, Slots]) -> None:
    batch, slots = plan
    batch = replace(batch, execution=replace(batch.execution, schedule="eager", chunks=1, in_flight=None))
    most = batch.topology.microbatches * batch.topology.num_stages
    peaks = [peak(batch, slots, depth) for depth in (*range(1, most + 1), None)]
    assert (np.diff(peaks) >= -1e-9).all()
    assert peaks[-1] == peaks[-2]


@pytest.mark.parametrize(
    "execution",
    [
        {"schedule": "gpipe", "memory_limit": 2.0},
        {"schedule": "eager", "memory_limit": 2.0, "in_flight": 3},
        {"schedule": "eager"},
    ],
)
def test_what_has_a_depth_or_needs_none_is_left_alone(execution: dict[str, object]) -> None:
    batch, slots = equal_microbatches(8, **execution)
    assert planned_work(batch, slots).execution == batch.execution


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_names_the_depth_that_it_was_simulated_with(strategy: str) -> None:
    rng = np.random.default_rng(0)
    costs = {"encoder": rng.lognormal(0, 0.5, 64).tolist(), "llm": rng.lognormal(0, 0.5, 64).tolist()}
    batch = batch_of(costs, {"encoder": 2, "llm": 3}, replicas=2, microbatches=8, schedule="eager")
    batch = limited(batch, 0.6 * peak(batch, np.tile(np.arange(64) % 16, (2, 1)), None), may_cross_replicas=True)
    plan = plan_of(strategy, batch)
    assert plan.in_flight is not None
    assert plan.predicted is not None
    assert plan_of(strategy, limited(batch, math.inf)).in_flight is None
    assert 1 < plan.in_flight <= 8


def test_a_deeper_pipeline_is_used_where_memory_allows_it() -> None:
    # Microbatches of unlike length: what is ready ahead fills the time in which 1F1B waits for a long one.
    costs = [4.0, 1.0, 1.0, 6.0, 1.0, 1.0, 6.0, 1.0]
    batch = batch_of({"encoder": costs, "llm": costs[::-1]}, {"encoder": 1, "llm": 1}, microbatches=8, schedule="eager")
    slots = np.tile(np.arange(8), (2, 1))
    seconds = [simulate(planned_work(limited(batch, limit), slots)).iteration_s for limit in (7.0, 12.0, 30.0)]
    assert seconds[0] > seconds[1] >= seconds[2]
