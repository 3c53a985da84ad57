"""A plan that is too slow is known by a few of its replicas, and what is known so is what the whole simulation says."""

import math

import numpy as np
import pytest

from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.screening import num_screened, seconds_of_first, seconds_within
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.simulation.work import Work
from headrace.reorder_service.planning.strategies import CANDIDATES, entrain, run_strategy


def batch_of(**execution) -> Batch:
    rng = np.random.default_rng(2)
    costs = {unit: rng.lognormal(0, 0.6, 640) for unit in ("encoder", "llm")}
    topology = Topology(replicas=64, microbatches=4, stages={"encoder": 1, "llm": 2})
    return make_batch(np.arange(640), costs, topology, 0, execution=Execution(**execution))


@pytest.mark.parametrize("strategy", CANDIDATES)
@pytest.mark.parametrize("latency_s", [0.0, 0.01])
def test_the_seconds_within_a_limit_are_those_of_the_whole_plan_or_infinite(strategy: str, latency_s: float) -> None:
    batch = batch_of(latency_s=latency_s)
    slots = CANDIDATES[strategy](batch)
    whole = simulate(Work.of(batch, slots)).iteration_s
    assert seconds_within(batch, slots, math.inf) == seconds_within(batch, slots, whole) == whole
    assert seconds_within(batch, slots, 0.9 * whole) == seconds_within(batch, slots, whole * (1 - 1e-12)) == math.inf


def test_the_first_replicas_take_no_longer_than_all_of_them() -> None:
    batch = batch_of()
    slots = CANDIDATES["entrain"](batch)
    assert seconds_of_first(batch, slots, 2) <= seconds_of_first(batch, slots, 20) <= seconds_of_first(batch, slots, 64)
    assert seconds_of_first(batch, slots, 64) == simulate(Work.of(batch, slots)).iteration_s


def test_entrain_plans_the_first_replicas_as_it_plans_them_among_all() -> None:
    batch = batch_of()
    whole, first = entrain.plan_slots(batch), entrain.plan_first(batch, 5)
    assert (first == np.where(whole < 5 * 4, whole, -1)).all()


def test_under_a_memory_limit_nothing_is_screened() -> None:
    assert num_screened(batch_of()) == 2
    assert num_screened(batch_of(schedule="eager", memory_limit=10.0)) == 0


@pytest.mark.parametrize("may_cross_replicas", [False, True])
def test_auto_is_as_fast_as_the_fastest_that_it_may_run_without_simulating_all_of_each(may_cross_replicas: bool) -> None:
    batch = batch_of(may_cross_replicas=may_cross_replicas)
    slots = {name: strategy(batch) for name, strategy in CANDIDATES.items()}
    times = {
        name: simulate(Work.of(batch, planned)).iteration_s
        for name, planned in slots.items()
        if may_cross_replicas or not batch.crosses_replicas(planned)
    }
    chosen, taken = run_strategy("auto", batch)
    assert times[chosen] == min(times.values())
    assert (taken == slots[chosen]).all()
