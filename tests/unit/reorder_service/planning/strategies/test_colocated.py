"""Plans for ranks that have all units: they wait little for each other, and no microbatch has more tokens than it may."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import Topology
from headrace.reorder_service.planning import plan
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search.number_partition import descending, lpt
from headrace.reorder_service.planning.strategies import COLOCATED, arrival, colocated

Meet = Literal["microbatch", "step"]
UNITS = {"encoder": 1, "llm": 1}


def batch_of(
    tokens: np.ndarray, ranks: int, microbatches: int, meet: Meet, max_tokens: int | None = None, seed: int = 0
) -> Batch:
    """Samples whose LLM seconds follow from their tokens, and whose encoder seconds are drawn."""
    rng = np.random.default_rng(seed)
    llm = tokens * (1.0 + tokens / 4000)
    costs = {"encoder": llm * rng.choice([0.0, 0.3, 2.0], tokens.size), "llm": llm}
    topology = Topology(replicas=ranks, microbatches=microbatches, stages=UNITS)
    execution = Execution(colocated=meet, max_tokens=max_tokens)
    return make_batch(np.arange(tokens.size), costs, topology, seed, execution=execution, tokens=tokens)


def drawn_tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(6, 1, count).astype(np.int64).clip(1, 8000)


lengths = st.lists(st.integers(1, 4000), min_size=1, max_size=60)
meets = st.sampled_from(["microbatch", "step"])


@settings(max_examples=80, deadline=None)
@given(lengths, st.integers(1, 6), st.integers(1, 4), meets, st.booleans())
def test_every_sample_has_one_place_and_no_microbatch_too_many_tokens(tokens, ranks, microbatches, meet, is_tight) -> None:
    tokens = np.array(tokens)
    limit = max(int(tokens.max()), int(tokens.sum() * 2 / (ranks * microbatches))) if is_tight else None
    batch = batch_of(tokens, ranks, microbatches, meet, limit)
    try:
        slots = colocated.plan_slots(batch)
    except ValueError as err:
        assert limit is not None
        assert "raise max_tokens, or plan more microbatches" in str(err)  # noqa: PT017 - a packing may be too tight for the search
        return
    assert slots.shape == (2, tokens.size)
    assert (slots[0] == slots[1]).all(), "a rank has all units"
    assert ((slots >= 0) & (slots < ranks * microbatches)).all()
    if limit is not None:
        assert np.bincount(slots[0], weights=tokens).max() <= limit
    assert (slots == colocated.plan_slots(batch)).all()


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 6), st.integers(1, 4), meets)
def test_it_is_never_slower_than_arrival_order_or_than_lpt_over_all_microbatches(tokens, ranks, microbatches, meet) -> None:
    batch = batch_of(np.array(tokens), ranks, microbatches, meet)
    seconds = colocated.rank_seconds(batch)
    ours = colocated.predict(batch, colocated.plan_slots(batch)).iteration_s
    assert ours <= colocated.predict(batch, arrival.plan_slots(batch)).iteration_s * (1 + 1e-9)
    bins = lpt(seconds, descending(seconds), batch.num_slots)
    assert ours <= colocated.predict(batch, np.stack([bins, bins])).iteration_s * (1 + 6e-4), "level is what is within 5e-4"


@pytest.mark.parametrize("meet", ["microbatch", "step"])
@pytest.mark.parametrize(("ranks", "microbatches", "limit"), [(8, 4, 1.005), (64, 2, 1.005), (64, 1, 1.005)])
def test_ranks_wait_for_less_than_half_a_per_cent_where_samples_are_many_and_none_is_long(
    ranks: int, microbatches: int, limit: float, meet: Meet
) -> None:
    for seed in range(5):
        batch = batch_of(drawn_tokens(ranks * microbatches * 8, seed).clip(max=2000), ranks, microbatches, meet, seed=seed)
        predicted = colocated.predict(batch, colocated.plan_slots(batch))
        assert predicted.iteration_s <= limit * predicted.lower_bound_s


def test_large_samples_share_a_microbatch() -> None:
    """Four samples of 100 and many of 1 on four ranks that meet at every microbatch: 100 + 10, not 100 + 100."""
    tokens = np.array([1] * 40 + [100] * 4)
    costs = {"encoder": np.zeros(44), "llm": tokens.astype(np.float64)}
    topology = Topology(replicas=4, microbatches=2, stages=UNITS)
    batch = make_batch(np.arange(44), costs, topology, 0, execution=Execution(colocated="microbatch"))
    assert colocated.predict(batch, colocated.plan_slots(batch)).iteration_s == pytest.approx(3 * 110)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), meets)
def test_beside_the_best_of_all_plans(tokens, meet) -> None:
    """Of a handful of samples on two ranks with two microbatches, at most a third more than the best (the bound of LPT)."""
    batch = batch_of(np.array(tokens), 2, 2, meet)
    best = min(
        colocated.predict(batch, np.array([slots, slots])).iteration_s
        for slots in itertools.product(range(4), repeat=len(tokens))
    )
    assert colocated.predict(batch, colocated.plan_slots(batch)).iteration_s <= best * (4 / 3 + 1e-9)


def test_what_is_predicted_is_what_ranks_wait_for() -> None:
    """Two ranks, two microbatches: 3 and 1 seconds of forward, then 1 and 2; backward takes twice as long."""
    costs = {"encoder": np.array([1.0, 0.0, 1.0, 0.0]), "llm": np.array([2.0, 1.0, 0.0, 2.0])}
    slots = np.array([[0, 2, 1, 3]] * 2)
    topology = Topology(replicas=2, microbatches=2, stages=UNITS)
    for meet, seconds in (("microbatch", 3 * (3 + 2)), ("step", 3 * (3 + 1))):
        execution = Execution(colocated=meet)  # type: ignore[arg-type]
        batch = make_batch(np.arange(4), costs, topology, 0, execution=execution)
        assert colocated.predict(batch, slots).iteration_s == seconds


def test_a_frozen_unit_costs_a_rank_its_forward_only() -> None:
    costs = {"encoder": np.array([4.0]), "llm": np.array([1.0])}
    execution = Execution(colocated="step", backward_factors={"encoder": 0.0})
    topology = Topology(replicas=1, microbatches=1, stages=UNITS)
    assert colocated.rank_seconds(make_batch(np.arange(1), costs, topology, 0, execution=execution))[0] == 4 + 3


def test_auto_is_this_for_colocated_ranks_and_says_so() -> None:
    tokens = drawn_tokens(64, 1)
    costs = {"encoder": tokens * 0.5, "llm": tokens * 1.0}
    topology = Topology(replicas=8, microbatches=2, stages=UNITS)
    execution = Execution(colocated="microbatch", max_tokens=60_000)
    made = plan("auto", np.arange(64), costs, topology, 0, execution=execution, tokens=tokens)
    assert (made.strategy, made.chosen) == ("auto", COLOCATED)
    other = plan("disttrain", np.arange(64), costs, topology, 0, execution=execution, tokens=tokens)
    assert made.predicted is not None
    assert other.predicted is not None
    assert made.predicted.iteration_s <= other.predicted.iteration_s, "both in the same clock"


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "sentence"),
    [
        ([5, 900], 800, "sample 1 has 900 tokens, more than a microbatch may have (800): raise max_tokens"),
        ([500] * 5, 700, "4 microbatches have at most 700 tokens each: the batch has 2,500 tokens, and the fullest microbatch"),
    ],
)
def test_a_limit_that_no_plan_keeps_is_told_with_both_numbers(tokens: list[int], max_tokens: int, sentence: str) -> None:
    with pytest.raises(ValueError, match="max_tokens") as error:
        colocated.plan_slots(batch_of(np.array(tokens), 2, 2, "microbatch", max_tokens))
    assert sentence in str(error.value)


def test_a_limit_needs_to_know_the_tokens() -> None:
    topology = Topology(replicas=1, microbatches=1, stages=UNITS)
    execution = Execution(colocated="step", max_tokens=10)
    batch = make_batch(np.arange(1), {"encoder": np.ones(1), "llm": np.ones(1)}, topology, 0, execution=execution)
    with pytest.raises(ValueError, match="needs to know how many tokens each sample has"):
        colocated.plan_slots(batch)
