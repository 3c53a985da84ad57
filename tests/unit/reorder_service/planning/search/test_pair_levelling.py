"""Bins exchange samples in pairs until they weigh the same, and never come to exceed a limit of tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.search.number_partition import descending
from headrace.reorder_service.planning.search.pair_levelling import divide, level_pairs

NO_LIMIT = 2**62


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 120), st.booleans())
def test_the_heaviest_bin_never_gets_heavier_and_no_bin_exceeds_the_limit(seed: int, num_bins: int, n: int, heads: bool) -> None:
    rng = np.random.default_rng(seed)
    costs, tokens, bins = rng.lognormal(0, 1, n), rng.integers(0, 50, n), rng.integers(0, num_bins, n)
    start = rng.random(num_bins) * 5 * heads
    before = start + np.bincount(bins, weights=costs, minlength=num_bins)
    limit = int(np.bincount(bins, weights=tokens).max())
    level_pairs(costs, descending(costs), start, 0.0, tokens, limit, bins)
    after = start + np.bincount(bins, weights=costs, minlength=num_bins)
    assert after.max() <= before.max() * (1 + 1e-12)
    assert after.sum() == pytest.approx(before.sum())
    assert np.bincount(bins, weights=tokens).max() <= limit


@pytest.mark.parametrize("per", [6, 12, 60])
def test_a_crowd_of_bins_ends_within_a_thousandth_of_the_mean(per: int) -> None:
    rng = np.random.default_rng(per)
    costs, bins = rng.lognormal(0, 0.5, 64 * per), np.repeat(np.arange(64), per)
    goal = costs.sum() / 64 * 1.0005
    level_pairs(costs, descending(costs), np.zeros(64), goal, np.zeros(costs.size, np.int64), NO_LIMIT, bins)
    assert np.bincount(bins, weights=costs).max() <= goal * (1.0005 if per > 6 else 1.02)


def test_bins_up_to_the_goal_are_left_alone() -> None:
    bins = np.array([0, 0, 1, 2, 2])
    before = bins.copy()
    costs = np.array([2.0, 1.0, 1.0, 2.0, 0.5])
    level_pairs(costs, descending(costs), np.zeros(3), 3.0, np.zeros(5, np.int64), NO_LIMIT, bins)
    assert (bins == before).all()


@pytest.mark.parametrize(("limit", "heaviest"), [(NO_LIMIT, 5.0), (5, 7.0)])
def test_an_exchange_that_the_limit_forbids_gives_way_to_the_next_best(limit: int, heaviest: float) -> None:
    """The light bin has no room for the tokens of the sample of 3, with which both bins would weigh 5; swapping it for the 2
    leaves 7 and 3."""
    costs, tokens, bins = np.array([5.0, 3.0, 2.0]), np.array([1, 4, 4]), np.array([0, 0, 1])
    level_pairs(costs, descending(costs), np.zeros(2), 0.0, tokens, limit, bins)
    assert np.bincount(bins, weights=costs).max() == heaviest
    assert np.bincount(bins, weights=tokens).max() <= limit


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=32))
def test_two_parts_differ_by_no_more_than_the_largest_number(numbers: list[int]) -> None:
    falling = np.array(sorted(numbers, reverse=True), np.float64)
    part = divide(falling)
    assert abs(falling[part].sum() - falling[~part].sum()) <= falling[0]
    assert sorted(numbers, reverse=True) == falling.tolist(), "the numbers themselves are not changed"


def test_differencing_does_better_than_the_greedy_rule() -> None:
    """The example of Karmarkar and Karp: 8, 7, 6, 5, 4 into 16 and 14; LPT has 17 and 13."""
    falling = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
    part = divide(falling)
    assert {falling[part].sum(), falling[~part].sum()} == {16.0, 14.0}
