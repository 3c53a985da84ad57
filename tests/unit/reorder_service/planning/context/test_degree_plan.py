"""A number of ranks for each sequence: beside brute force, the lower bound, and one number for all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.context.context_cost import ContextCost
from headrace.reorder_service.planning.context.degree_plan import fixed_degree, least_degrees, lower_bound, plan_degrees
from headrace.reorder_service.planning.context.gang_schedule import step_time
from tests.examples import with_examples

COST = ContextCost(token_s=1.0, pair_s=1e-3, gather_s=0.05, far_gather_s=0.4, start_s=20.0, ranks_per_node=4, block=8)


@st.composite
def batches(draw, most=12):
    num_ranks = draw(st.integers(1, 9))
    tokens = np.array(draw(st.lists(st.integers(1, 400), min_size=1, max_size=most)))
    least = least_degrees(tokens, num_ranks, tokens_per_rank=-(-400 // num_ranks) + 8)
    return COST.seconds(tokens, tokens * (tokens + 1) // 2, num_ranks), np.minimum(least, -(-tokens // COST.block))


@given(batch=batches())
@with_examples(50)
def test_a_plan_is_between_the_bound_and_every_fixed_degree(batch):
    seconds, least = batch
    plan = plan_degrees(seconds, least, COST.ranks_per_node)
    assert (plan.degrees >= least).all()
    np.testing.assert_allclose(plan.ends_s - plan.starts_s, seconds[np.arange(len(seconds)), plan.degrees - 1])
    assert plan.step_s >= lower_bound(seconds, least) * (1 - 1e-12)
    for degree in range(1, seconds.shape[1] + 1):
        if (least <= degree).all() and np.isfinite(seconds[:, degree - 1]).all():
            times = np.ascontiguousarray(seconds[:, degree - 1])
            same = np.full(len(seconds), degree)
            order = np.argsort(-times, kind="stable")
            assert plan.step_s <= step_time(order, same, times, seconds.shape[1], COST.ranks_per_node) * (1 + 1e-12)


def best_step(seconds, least):
    """The shortest step of all degrees and orders, in one node."""
    count, num_ranks = seconds.shape
    choices = itertools.product(*(range(low, num_ranks + 1) for low in least))
    orders = [np.array(order) for order in itertools.permutations(range(count))]
    return min(
        step_time(order, np.array(degrees), seconds[np.arange(count), np.array(degrees) - 1], num_ranks, num_ranks)
        for degrees in choices
        for order in orders
    )


def test_it_is_near_the_optimum():
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(25):
        tokens = rng.choice([24, 40, 200, 390], 4)
        seconds = COST.seconds(tokens, tokens * tokens, 3)
        least = least_degrees(tokens, 3, 200)
        ratios.append(plan_degrees(seconds, least, 3).step_s / best_step(seconds, least))
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 1.25
    assert np.mean(ratios) <= 1.05


def test_short_sequences_have_a_rank_each_and_a_long_one_has_several():
    tokens = np.array([64] * 20 + [2048])
    seconds = COST.seconds(tokens, tokens * tokens, 7)
    plan = plan_degrees(seconds, least_degrees(tokens, 7, 700), COST.ranks_per_node)
    assert (plan.degrees[:20] == 1).all()
    assert plan.degrees[20] >= 3
    fixed = min(fixed_degree(seconds, degree, COST.ranks_per_node).step_s for degree in range(3, 8))
    assert plan.step_s < fixed


def test_a_degree_is_no_power_of_two():
    seconds = np.array([[6.0, 3.0, 2.0], [6.0, 3.0, 2.0]])
    plan = plan_degrees(seconds, np.ones(2, np.int64), 3)
    assert plan.step_s == 4
    assert plan.degrees.tolist() == [3, 3]


def test_costs_divide_in_whole_blocks():
    seconds = COST.seconds(np.array([24]), np.array([0]), 5)[0]
    np.testing.assert_allclose(seconds[:3], [24, 16 + 24 / 2 * 0.05 + 20, 8 + 24 * 2 / 3 * 0.05 + 20])
    assert np.isinf(seconds[3:]).all()


def test_a_gather_is_hidden_by_attention_and_slower_between_nodes():
    near, far = COST.seconds(np.array([800]), np.array([0]), 5)[0, 3:]
    np.testing.assert_allclose([near, far], [200 + 600 * 0.05 + 20, 160 + 640 * 0.4 + 20])
    assert COST.seconds(np.array([800]), np.array([10**9]), 4)[0, 3] == pytest.approx(200 + 250_000 + 20)


def test_what_fits_no_degree_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has 900 tokens, which 8 ranks of 100 tokens do not hold at any degree"):
        least_degrees(np.array([5, 900]), 8, 100)
    with pytest.raises(ValueError, match="a rank holds at least one token, got 0"):
        least_degrees(np.array([5]), 8, 0)
    with pytest.raises(ValueError, match="sequence 0 fits no degree of context parallelism from 2 to 4"):
        plan_degrees(np.array([[1.0, np.inf, np.inf, np.inf]]), np.array([2]), 8)
    with pytest.raises(ValueError, match="pair_s of the cost of context parallelism must be at least 0, got -1"):
        ContextCost(token_s=1.0, pair_s=-1.0, gather_s=0.0, far_gather_s=0.0)


def test_an_empty_batch_has_an_empty_plan():
    assert plan_degrees(np.empty((0, 4)), np.empty(0, np.int64), 8).step_s == 0
