"""Balancing near home: ranks are level, and few samples leave their node."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.search.limited_partition import NOWHERE
from headrace.reorder_service.planning.search.near_home import balance_near, deal_within, give_away
from headrace.reorder_service.planning.search.number_partition import descending, lpt

# Whole numbers, so that sums are exact and ties are ties in both twins.
whole = st.lists(st.integers(0, 12), min_size=1, max_size=30).map(lambda values: np.array(values, np.float64))


@st.composite
def samples_at_home(draw):
    weights, num_nodes = draw(whole), draw(st.integers(1, 5))
    homes = draw(st.lists(st.integers(NOWHERE, num_nodes - 1), min_size=weights.size, max_size=weights.size))
    return weights, np.array(homes, np.int64), num_nodes


@given(samples_at_home(), st.floats(0, 40))
def test_a_node_gives_away_the_largest_that_leave_it_its_level(given_samples, level: float) -> None:
    weights, homes, num_nodes = given_samples
    heads = np.arange(num_nodes, dtype=np.float64)
    expected, order = homes.tolist(), descending(weights)
    for node in range(num_nodes):
        load = node + sum(weight for weight, home in zip(weights, homes, strict=True) if home == node)
        for item in order:
            if expected[item] == node and weights[item] and load - weights[item] >= level:
                load -= weights[item]
                expected[item] = NOWHERE
    given_away = homes.copy()
    give_away(weights, order, heads, level, given_away)
    assert given_away.tolist() == expected


@given(samples_at_home(), st.integers(1, 4))
def test_each_node_deals_to_its_ranks_by_lpt(given_samples, ranks_per_node: int) -> None:
    weights, homes, num_nodes = given_samples
    nodes = np.maximum(homes, 0)
    first = np.arange(num_nodes + 1) * ranks_per_node
    ranks = deal_within(weights, descending(weights), nodes, first)
    for node in range(num_nodes):
        mine = np.flatnonzero(nodes == node)
        by_lpt = lpt(weights[mine], descending(weights[mine]), ranks_per_node)
        assert (ranks[mine] == first[node] + by_lpt).all()


@given(samples_at_home(), st.integers(1, 11), st.integers(1, 12))
def test_every_sample_has_a_rank_and_the_same_one_again(given_samples, num_ranks: int, ranks_per_node: int) -> None:
    weights, homes, _ = given_samples
    homes = np.minimum(homes, (num_ranks - 1) // ranks_per_node)
    before = homes.copy()
    ranks = balance_near(weights, homes, num_ranks, ranks_per_node)
    assert ((ranks >= 0) & (ranks < num_ranks)).all()
    assert (homes == before).all(), "the homes are the caller's"
    assert (ranks == balance_near(weights, homes, num_ranks, ranks_per_node)).all()


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(128, 8), (100, 8), (64, 1), (12, 16)])
def test_ranks_are_level_and_few_samples_leave_their_node(num_ranks: int, ranks_per_node: int) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        weights = rng.lognormal(0, 0.7, 60 * num_ranks)
        homes = rng.integers(num_ranks, size=weights.size) // ranks_per_node
        ranks = balance_near(weights, homes, num_ranks, ranks_per_node)
        loads = np.bincount(ranks, weights=weights, minlength=num_ranks)
        assert loads.max() <= 1.004 * loads.mean()
        left = weights[ranks // ranks_per_node != homes].sum() / weights.sum()
        assert left <= (0.1 if ranks_per_node == 1 else 0.05)


def test_nodes_that_are_level_already_keep_all_of_their_samples() -> None:
    homes = np.repeat(np.arange(4), 16)
    ranks = balance_near(np.ones(64), homes, 16, 4)
    assert (ranks // 4 == homes).all()
    assert (np.bincount(ranks) == 4).all()


def test_a_sample_larger_than_a_ranks_share_has_its_rank_alone() -> None:
    weights = np.array([100.0, *[1.0] * 60])
    ranks = balance_near(weights, np.zeros(61, np.int64), 4, 2)
    assert (ranks[1:] != ranks[0]).all()
