"""Balancing near home: ranks are level, and few samples leave their node."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.search.limited_partition import NOWHERE
from headrace.reorder_service.planning.search.near_home import balance_near, deal_free, deal_within, give_away, level_within
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


@given(samples_at_home(), st.floats(0, 60))
def test_free_samples_are_dealt_like_cards_to_nodes_with_room(given_samples, level: float) -> None:
    weights, homes, num_nodes = given_samples
    heads, order = np.zeros(num_nodes), descending(weights)
    loads = [weights[homes == node].sum() for node in range(num_nodes)]
    expected, asked = homes.tolist(), 0
    for item in order:
        for _ in range(4 if homes[item] == NOWHERE else 0):
            node, asked = asked % num_nodes, asked + 1
            if loads[node] + weights[item] <= level:
                loads[node] += weights[item]
                expected[item] = node
                break
    dealt = homes.copy()
    deal_free(weights, order, heads, level, dealt)
    assert dealt.tolist() == expected


@given(samples_at_home(), st.integers(1, 4))
def test_each_node_deals_to_its_ranks_by_lpt(given_samples, ranks_per_node: int) -> None:
    weights, homes, num_nodes = given_samples
    nodes = np.maximum(homes, 0)
    first = np.arange(num_nodes + 1) * ranks_per_node
    ranks = deal_within(weights, descending(weights), nodes, first, np.zeros(num_nodes))
    for node in range(num_nodes):
        mine = np.flatnonzero(nodes == node)
        by_lpt = lpt(weights[mine], descending(weights[mine]), ranks_per_node)
        assert (ranks[mine] == first[node] + by_lpt).all()


@given(samples_at_home(), st.integers(1, 4), st.integers(0, 2**32))
def test_swaps_level_the_ranks_of_a_node(given_samples, ranks_per_node: int, seed: int) -> None:
    weights, _, num_nodes = given_samples
    first = np.arange(num_nodes + 1) * ranks_per_node
    before = np.random.default_rng(seed).integers(first[-1], size=weights.size)
    ranks = before.copy()
    level_within(weights, descending(weights), first, 0.0, ranks)
    assert (ranks // ranks_per_node == before // ranks_per_node).all(), "no sample leaves its node"
    assert (np.bincount(ranks, minlength=first[-1]) == np.bincount(before, minlength=first[-1])).all(), "one for one"
    loads = np.bincount(ranks, weights=weights, minlength=first[-1]).reshape(num_nodes, -1)
    heaviest = np.bincount(before, weights=weights, minlength=first[-1]).reshape(num_nodes, -1).max(axis=1)
    assert (loads.max(axis=1) <= heaviest).all()


def test_swaps_take_what_comes_closest() -> None:
    """9 + 5 + 1 beside 4 + 3 differ by 8, so that 4 should move: 9 for 4 moves 5, 9 for 3 moves 6, 5 for 3 only 2."""
    weights = np.array([9.0, 5.0, 1.0, 4.0, 3.0])
    ranks = np.array([0, 0, 0, 1, 1])
    level_within(weights, descending(weights), np.array([0, 2]), 0.0, ranks)
    assert sorted(np.bincount(ranks, weights=weights)) == [10, 12]


def test_swaps_level_many_samples_of_few_sizes() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        weights, ranks = rng.choice(np.arange(640.0, 1025.0, 32.0), 320), np.repeat(np.arange(8), 40)
        level_within(weights, descending(weights), np.array([0, 8]), 0.0, ranks)
        loads = np.bincount(ranks, weights=weights)
        assert loads.max() <= 1.002 * loads.mean()


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


def test_ranks_take_turns_up_to_their_share() -> None:
    """8, 7, 6, 5 go in turn; then 4 is too much for the first rank and goes to the lightest, and so do the others."""
    weights = np.array([8.0, 7.0, 6.0, 5.0, 4.0, 3.0])
    ranks = deal_within(weights, np.arange(6), np.zeros(6, np.int64), np.array([0, 2]), np.array([16.5]))
    assert ranks.tolist() == [0, 1, 0, 1, 1, 0]


def test_nodes_that_are_level_already_keep_all_of_their_samples() -> None:
    homes = np.repeat(np.arange(4), 16)
    ranks = balance_near(np.ones(64), homes, 16, 4)
    assert (ranks // 4 == homes).all()
    assert (np.bincount(ranks) == 4).all()


def test_a_sample_larger_than_a_ranks_share_has_its_rank_alone() -> None:
    weights = np.array([100.0, *[1.0] * 60])
    ranks = balance_near(weights, np.zeros(61, np.int64), 4, 2)
    assert (ranks[1:] != ranks[0]).all()
