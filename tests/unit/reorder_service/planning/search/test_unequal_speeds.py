"""Shares follow the replicas' speeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, Floats, make_batch
from headrace.reorder_service.planning.search.unequal_speeds import share_by_speed
from headrace.reorder_service.planning.strategies import plan_of
from tests.examples import with_examples


def batch_of(num_samples: int, replicas: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    topology = Topology(replicas=replicas, microbatches=3, stages={"encoder": 1, "llm": 2})
    costs = {unit: rng.lognormal(0.0, 0.5, num_samples) for unit in topology.stages}
    return make_batch(np.arange(num_samples), costs, topology, 0)


def seconds(batch: Batch, speeds: Floats) -> Floats:
    """(D,) of each replica's work at its own speed."""
    return batch.loads(share_by_speed(batch, speeds)).sum(axis=(1, 2)) / speeds


@pytest.mark.parametrize("speeds", [[1.0, 2.0], [1.0, 1.0, 0.5, 3.0]])
def test_all_replicas_end_at_about_the_same_time(speeds: list[float]) -> None:
    ends = seconds(batch_of(400, len(speeds)), np.array(speeds))
    assert ends.max() / ends.min() < 1.05


@given(st.integers(1, 80), st.lists(st.floats(0.1, 10), min_size=1, max_size=5))
@with_examples(200)
def test_the_slowest_end_is_less_than_twice_the_least_possible(num_samples: int, speeds: list[float]) -> None:
    """What is possible: as many of the heaviest samples as there are fastest microbatches, on these; and all samples on all."""
    batch, rates = batch_of(num_samples, len(speeds)), np.array(speeds)
    loads = batch.loads(share_by_speed(batch, rates)).sum(axis=2)  # (D, K): microbatches are the machines of the algorithm
    per_machine = (loads / rates[:, None]).max()
    machines = -np.sort(-np.repeat(rates, 3))
    heaviest = -np.sort(-batch.costs.sum(axis=0))
    several = min(len(machines), len(heaviest))
    possible = (heaviest.cumsum()[:several] / machines.cumsum()[:several]).max()
    assert per_machine < 2 * max(possible, heaviest.sum() / machines.sum()) + 1e-9


def test_every_sample_has_one_place_and_the_plan_says_how_it_was_made() -> None:
    plan = plan_of("taper", batch_of(60, 2), 7, np.array([1.0, 2.0]))
    plan.check()
    assert (plan.strategy, plan.chosen, plan.generation, plan.predicted) == ("taper", "unequal", 7, None)
    ids = [i for replica in plan.replicas for microbatch in replica for i in microbatch.sample_ids]
    assert sorted(ids) == list(range(60))


def test_equal_speeds_leave_the_strategy_alone() -> None:
    batch = batch_of(60, 2)
    assert plan_of("joint", batch, 1, np.array([2.0, 2.0])).replicas == plan_of("joint", batch).replicas
