"""The time of a step on ranks that have all units is what its definition says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Topology
from headrace.reorder_service.planning import plan
from headrace.reorder_service.planning.batch import make_batch, slots_of
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.colocated_step import predict, sample_seconds
from headrace.reorder_service.planning.simulation.phase_step import predict_phases

UNITS = {"encoder": 1, "llm": 1}


@pytest.mark.parametrize(("meet", "seconds"), [("microbatch", 3 * (3 + 2)), ("step", 3 * (3 + 1))])
def test_ranks_wait_for_the_slowest_where_they_meet(meet, seconds: float) -> None:
    """Two ranks, two microbatches: 3 and 1 seconds of forward on the one, 1 and 2 on the other; backward takes twice as long."""
    costs = {"encoder": np.array([1.0, 0.0, 1.0, 0.0]), "llm": np.array([2.0, 1.0, 0.0, 2.0])}
    topology = Topology(replicas=2, microbatches=2, stages=UNITS)
    batch = make_batch(np.arange(4), costs, topology, 0, execution=Execution(colocated=meet))
    predicted = predict(batch, np.array([[0, 2, 1, 3]] * 2))
    assert predicted.iteration_s == seconds
    assert predicted.lower_bound_s == 3 * 3.5
    assert predicted.bubble == pytest.approx(1 - 3 * 7 / (2 * seconds))


def test_where_they_meet_behind_every_unit_the_slowest_of_each_counts() -> None:
    """Two ranks, one microbatch: 3 and 1 seconds of the encoder's forward, 2 and 5 of the LLM's; backward takes twice as long."""
    costs = {"encoder": np.array([3.0, 1.0]), "llm": np.array([5.0, 2.0])}
    topology = Topology(replicas=2, microbatches=1, stages=UNITS)
    batch = make_batch(np.arange(2), costs, topology, 0, execution=Execution(colocated="phases"))
    predicted = predict_phases(batch, np.array([[0, 1], [1, 0]]))
    assert predicted.iteration_s == 3 * (3 + 5)
    assert predicted.lower_bound_s == 3 * (3 + 5), "the largest sample of each unit"
    assert predicted.bubble == pytest.approx(1 - 3 * 11 / (2 * 24))


def test_auto_balances_every_unit_by_itself_where_ranks_meet_behind_each() -> None:
    costs = {"encoder": np.array([4.0, 4.0, 0.0, 0.0]), "llm": np.array([1.0, 1.0, 3.0, 3.0])}
    topology = Topology(replicas=2, microbatches=1, stages=UNITS)
    planned = plan("auto", np.arange(4), costs, topology, 0, execution=Execution(colocated="phases", may_cross_replicas=True))
    assert planned.chosen == "orchmllm"
    assert planned.predicted is not None
    assert planned.predicted.iteration_s == planned.predicted.lower_bound_s == 3 * (4 + 4)


def test_a_frozen_unit_costs_a_rank_its_forward_only() -> None:
    costs = {"encoder": np.array([4.0]), "llm": np.array([1.0])}
    execution = Execution(colocated="step", backward_factors={"encoder": 0.0})
    topology = Topology(replicas=1, microbatches=1, stages=UNITS)
    assert sample_seconds(make_batch(np.arange(1), costs, topology, 0, execution=execution))[0] == 4 + 3


@given(st.integers(0, 2**32), st.sampled_from(["random", "disttrain", "entrain", "orchmllm", "joint", "taper", "auto"]))
def test_every_strategys_plan_is_predicted_by_the_definition(seed: int, strategy: str) -> None:
    rng = np.random.default_rng(seed)
    ranks, microbatches, n = (int(rng.integers(1, most)) for most in (5, 5, 30))
    costs = {unit: rng.lognormal(0, 1, n) for unit in UNITS}
    for meet in ("microbatch", "step"):
        execution = Execution(colocated=meet, backward_factors={"encoder": 0.5})  # type: ignore[arg-type]
        topology = Topology(replicas=ranks, microbatches=microbatches, stages=UNITS)
        planned = plan(strategy, np.arange(n), costs, topology, 0, execution=execution)
        took = np.zeros((ranks, microbatches))
        for u, factor in enumerate((1.5, 3.0)):
            for i, slot in enumerate(slots_of(planned, np.arange(n))[u]):
                took[slot // microbatches, slot % microbatches] += factor * costs[list(UNITS)[u]][i]
        expected = took.max(axis=0).sum() if meet == "microbatch" else took.sum(axis=1).max()
        assert planned.predicted is not None
        assert planned.predicted.iteration_s == pytest.approx(expected, rel=1e-12)
        assert planned.predicted.lower_bound_s <= planned.predicted.iteration_s
