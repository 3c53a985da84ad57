"""Blocks of queries over ranks: level work and equal tokens, beside the optimum and the published example."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.block_distribution import distribute
from headrace.reorder_service.planning.context.exact_distribution import solve
from headrace.reorder_service.planning.context.published_distributions import longest_first, ring, shuffled, unevenness, zigzag

FIGURE_3_3A = np.array([1, 2, 2, 4, 5, 2, 2, 8])
"""Work of the blocks in Cornstarch's dissertation, for two GPUs."""

WORK = st.lists(st.integers(0, 50), min_size=1, max_size=60).filter(any)


def heaviest(work, ranks, num_ranks):
    return np.bincount(ranks, weights=work, minlength=num_ranks).max()


def optimum(work, num_ranks, most):
    """The least work of the heaviest rank, of all assignments."""
    found = [
        heaviest(work, np.array(ranks), num_ranks)
        for ranks in itertools.product(range(num_ranks), repeat=len(work))
        if np.bincount(ranks).max() <= most
    ]
    return min(found)


def test_the_published_example_is_level():
    ranks = longest_first(FIGURE_3_3A, 2)
    assert [np.flatnonzero(ranks == rank).tolist() for rank in range(2)] == [[0, 1, 5, 7], [2, 3, 4, 6]]
    for choice in (ranks, distribute(FIGURE_3_3A, 2), solve(FIGURE_3_3A, 2).ranks):
        assert np.bincount(choice, weights=FIGURE_3_3A).tolist() == [13, 13]


@given(work=WORK, data=st.data())
def test_tokens_are_equal_and_work_is_within_the_bound(work, data):
    num_ranks = data.draw(st.integers(1, len(work)))
    ranks = distribute(np.array(work), num_ranks)
    assert np.bincount(ranks, minlength=num_ranks).max() <= -(-len(work) // num_ranks)
    assert heaviest(work, ranks, num_ranks) <= sum(work) / num_ranks + max(work)
    np.testing.assert_array_equal(distribute(np.array(work), num_ranks), ranks)


@pytest.mark.parametrize(("num_blocks", "num_ranks"), [(5, 2), (7, 2), (6, 3), (7, 3), (5, 4)])
def test_it_is_near_the_optimum(num_blocks, num_ranks):
    rng = np.random.default_rng(num_blocks)
    ratios = []
    for _ in range(40):
        work = rng.integers(1, 30, num_blocks)
        best = optimum(work, num_ranks, -(-num_blocks // num_ranks))
        ratios.append(heaviest(work, distribute(work, num_ranks), num_ranks) / best)
    assert min(ratios) >= 1
    assert max(ratios) <= 7 / 6
    assert np.mean(ratios) <= 1.02


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_solver_finds_the_optimum(num_ranks):
    rng = np.random.default_rng(3)
    for num_blocks in range(num_ranks, 7):
        work = rng.integers(0, 20, num_blocks)
        for most in (None, -(-num_blocks // num_ranks)):
            found = solve(work, num_ranks, most_blocks=most)
            best = optimum(work, num_ranks, most or num_blocks)
            assert heaviest(work, found.ranks, num_ranks) == pytest.approx(best)
            assert found.bound == pytest.approx(best)
            assert np.bincount(found.ranks).max() <= (most or num_blocks)


@pytest.mark.parametrize(("num_blocks", "num_ranks"), [(40, 4), (128, 8), (8192, 64)])
def test_many_blocks_are_within_half_a_percent_of_an_equal_share(num_blocks, num_ranks):
    work = np.random.default_rng(5).integers(1, 300, num_blocks)
    assert unevenness(work, distribute(work, num_ranks), num_ranks) <= 1.005


@given(per_rank=st.integers(1, 9), num_ranks=st.integers(1, 9), seed=st.integers(0, 3))
def test_other_orders_give_equally_many_blocks(per_rank, num_ranks, seed):
    num_blocks = 2 * per_rank * num_ranks
    for ranks in (ring(num_blocks, num_ranks), zigzag(num_blocks, num_ranks), shuffled(num_blocks, num_ranks, seed)):
        assert np.bincount(ranks, minlength=num_ranks).tolist() == [2 * per_rank] * num_ranks


def test_zigzag_is_level_where_attention_is_causal():
    work = np.arange(1, 33)
    assert unevenness(work, zigzag(32, 4), 4) == 1
    assert unevenness(work, ring(32, 4), 4) > 1.7
    assert ring(4, 2).tolist() == [0, 0, 1, 1]
    assert zigzag(8, 2).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="cp 3 is more than the 2 blocks of the sequence"):
        distribute(np.ones(2), 3)
    with pytest.raises(ValueError, match="takes at least one rank, got cp 0"):
        longest_first(np.ones(2), 0)
    with pytest.raises(ValueError, match="no token of the sequence sees another"):
        distribute(np.zeros(4), 2)
    with pytest.raises(ValueError, match="5 blocks have no room on 2 ranks that take 2 each"):
        solve(np.ones(5), 2, most_blocks=2)
