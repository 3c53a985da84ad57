"""Number partitioning with a limit: LPT where the limit does not matter, and never a bin that exceeds it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.search.limited_partition import NOWHERE, deal, fill, first_fit
from headrace.reorder_service.planning.search.number_partition import descending, lpt

NO_LIMIT = 2**62
weights = st.lists(st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=60).map(np.array)
lengths = st.lists(st.integers(0, 50), min_size=1, max_size=60).map(np.array)
bin_counts = st.integers(1, 9)


def filled(costs: np.ndarray, heads: np.ndarray, tokens: np.ndarray, limit: int, bins: np.ndarray | None = None) -> np.ndarray:
    bins = np.full(costs.size, NOWHERE) if bins is None else bins
    fill(costs, descending(costs), heads, tokens, limit, bins)
    return bins


@given(weights, bin_counts)
def test_without_head_starts_and_limit_it_is_lpt(costs: np.ndarray, num_bins: int) -> None:
    bins = filled(costs, np.zeros(num_bins), np.zeros(costs.size, np.int64), NO_LIMIT)
    assert (bins == lpt(costs, descending(costs), num_bins)).all()


@given(lengths, bin_counts, st.integers(1, 120))
def test_an_item_goes_into_the_lightest_bin_with_room_or_nowhere(tokens: np.ndarray, num_bins: int, limit: int) -> None:
    """Beside a slow twin that looks at every bin."""
    costs = np.random.default_rng(tokens.size).random(tokens.size)
    heads = np.arange(num_bins) / 10
    loads, used, counts = heads.copy(), np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
    expected = np.full(tokens.size, NOWHERE)
    for i in np.argsort(-costs, kind="stable"):
        with_room = [b for b in range(num_bins) if used[b] + tokens[i] <= limit]
        if with_room:
            b = min(with_room, key=lambda b: (loads[b], counts[b], b))
            expected[i] = b
            loads[b], used[b], counts[b] = loads[b] + costs[i], used[b] + tokens[i], counts[b] + 1
    assert (filled(costs, heads, tokens, limit) == expected).all()


@given(lengths, bin_counts, st.integers(1, 400))
def test_what_is_dealt_exceeds_neither_the_mean_nor_the_limit_and_the_rest_is_filled_in(
    tokens: np.ndarray, num_bins: int, limit: int
) -> None:
    costs = np.random.default_rng(tokens.size).random(tokens.size)
    bins = deal(costs, descending(costs), np.zeros(num_bins), tokens, limit)
    dealt = bins != NOWHERE
    assert np.bincount(bins[dealt], weights=costs[dealt], minlength=num_bins).max() <= costs.sum() / num_bins * (1 + 1e-12)
    before = bins.copy()
    filled(costs, np.zeros(num_bins), tokens, limit, bins)
    assert (bins[dealt] == before[dealt]).all(), "what has a bin keeps it"
    placed = bins != NOWHERE
    assert np.bincount(bins[placed], weights=tokens[placed], minlength=num_bins).max() <= limit


@given(lengths, bin_counts, st.integers(1, 120))
def test_first_fit_takes_the_first_bin_with_room(tokens: np.ndarray, num_bins: int, limit: int) -> None:
    order = descending(tokens.astype(np.float64))
    used, expected = np.zeros(num_bins, np.int64), np.full(tokens.size, NOWHERE)
    for i in order:
        b = next((b for b in range(num_bins) if used[b] + tokens[i] <= limit), NOWHERE)
        if b != NOWHERE:
            expected[i] = b
            used[b] += tokens[i]
    assert (first_fit(tokens, order, num_bins, limit) == expected).all()
