"""How many ranks share which sequence, and which ranks: as level as they can be, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import StepPlan, Topology
from headrace.reorder_service.planning.batch import Batch, make_batch, slots_of
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.phase_step import phase_loads
from headrace.reorder_service.planning.strategies import plan_of
from headrace.reorder_service.planning.strategies.shared_sequences import first_ranks, with_degrees
from tests.examples import with_examples

BLOCK = 128


def batch_of(tokens: np.ndarray, ranks: int, cp: int | str, microbatches: int = 1, vision: np.ndarray | None = None) -> Batch:
    costs = {"vision": np.zeros(tokens.size) if vision is None else vision, "llm": tokens + tokens**2 / 8192}
    topology = Topology(replicas=ranks, microbatches=microbatches, stages=dict.fromkeys(costs, 1))
    execution = Execution(colocated="phases", may_cross_replicas=True, cp=cp)
    return make_batch(np.arange(tokens.size) + 7, costs, topology, 0, execution=execution, tokens=tokens)


def planned(batch: Batch) -> StepPlan:
    plan = plan_of("auto", batch)
    plan.check()
    return plan


def ranks_of(plan: StepPlan) -> dict[int, range]:
    """The ranks that share each sample."""
    return {
        sample: plan.sharers(sample, rank)
        for rank, replica in enumerate(plan.replicas)
        for microbatch in replica
        for sample in microbatch.sample_ids
    }


def test_short_sequences_are_on_one_rank_and_long_ones_on_several_of_any_number() -> None:
    plan = planned(batch_of(np.array([24_000, 9_000, *[600] * 40]), 8, "auto"))
    degrees = [len(plan.sharers(sample, 0)) for sample in plan.sample_ids()]
    assert degrees[0] > degrees[1] > 1
    assert set(degrees[2:]) == {1}
    assert plan.predicted is not None
    assert plan.predicted.iteration_s < 1.02 * plan.predicted.lower_bound_s


def test_one_sequence_is_on_all_ranks() -> None:
    plan = planned(batch_of(np.array([9_000]), 5, "auto"))
    assert ranks_of(plan) == {7: range(5)}


def test_a_fixed_number_divides_the_ranks_into_groups() -> None:
    plan = planned(batch_of(np.random.default_rng(0).integers(900, 4000, 50), 6, 3, 2))
    assert {(ranks.start, ranks.stop) for ranks in ranks_of(plan).values()} == {(0, 3), (3, 6)}


@pytest.mark.parametrize("cp", [4, "auto"])
def test_no_rank_shares_a_sequence_of_which_it_would_have_no_block(cp: int | str) -> None:
    tokens = np.array([BLOCK, BLOCK + 1, 3 * BLOCK])
    plan = planned(batch_of(tokens, 4, cp))
    shared = {sample: len(ranks) for sample, ranks in ranks_of(plan).items()}
    assert shared[7] == 1
    assert all(shared[7 + i] <= -(-count // BLOCK) for i, count in enumerate(tokens))
    if cp == 4:
        assert [shared[8], shared[9]] == [2, 3]


def test_smaller_parts_are_taken_where_the_fewest_ranks_do_not_lie_evenly() -> None:
    """Three sequences of one length on four ranks: each whole would leave one rank idle."""
    plan = planned(batch_of(np.full(3, 12_800), 4, "auto"))
    assert plan.predicted is not None
    assert plan.predicted.iteration_s == pytest.approx(plan.predicted.lower_bound_s)


def test_a_unit_in_front_is_level_by_itself() -> None:
    rng = np.random.default_rng(1)
    batch = batch_of(rng.integers(200, 9000, 60), 4, "auto", 2, vision=rng.uniform(100, 200, 60))
    plan = planned(batch)
    loads = phase_loads(with_degrees(batch), slots_of(plan, batch.sample_ids))
    assert (loads.max(axis=0) < 1.1 * loads.mean(axis=0)).all()
    assert phase_loads(with_degrees(batch), slots_of(plan, batch.sample_ids)).sum() == pytest.approx(
        float((batch.costs.sum(axis=1) * batch.step_factors).sum())
    )


@with_examples(60)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 40))
def test_places_are_groups_of_neighbours_as_level_as_list_scheduling_promises(seed: int, ranks: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    degrees, seconds = rng.integers(1, ranks + 1, count), rng.pareto(1.1, count)
    first = first_ranks(seconds, degrees, ranks)
    assert (first % degrees == 0).all()
    assert (first + degrees <= ranks).all()
    loads = np.zeros(ranks)
    for start, degree, own in zip(first, degrees, seconds / degrees, strict=True):
        loads[start : start + degree] += own
    widest = sum(own for own, degree in zip(seconds / degrees, degrees, strict=True) if degree > ranks / 2)
    rest = sum(own * degree for own, degree in zip(seconds / degrees, degrees, strict=True) if degree <= ranks / 2)
    assert loads.max() <= widest + 3 * rest / ranks + (seconds / degrees).max() + 1e-9


def test_samples_without_tokens_are_refused() -> None:
    batch = batch_of(np.array([1000]), 2, "auto")
    costs = {"vision": np.zeros(1), "llm": np.ones(1)}
    unknown = make_batch(batch.sample_ids, costs, batch.topology, 0, execution=batch.execution)
    with pytest.raises(ValueError, match="cp auto of the LLM needs to know how many tokens each sample has"):
        with_degrees(unknown)
    with pytest.raises(ValueError, match="cp is for ranks that meet behind every unit, got 2"):
        Execution(cp=2)
