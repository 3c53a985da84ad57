"""The four post-balancing forms: twins of the kernels, bounds against the true optimum, and when each one pays."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.form_loads import bin_loads
from headrace.reorder_service.planning.post_balancing_options import FORMS
from headrace.reorder_service.planning.search.number_partition import descending, lpt
from headrace.reorder_service.planning.search.post_balancing import (
    by_sum_then_squares,
    fill_empty,
    fits_padded,
    pack_then_lpt,
    post_balance,
    try_pack_padded,
)
from tests.examples import with_examples

exactly = with_examples(150)
# Whole numbers, so that sums are exact and ties are ties in both twins.
whole = st.lists(st.integers(0, 12), max_size=25).map(lambda values: np.array(values, dtype=np.float64))
short = st.lists(st.integers(0, 9), min_size=1, max_size=7).map(lambda values: np.array(values, dtype=np.float64))
bin_counts = st.integers(1, 6)


def rising(lengths: np.ndarray) -> list[int]:
    return descending(lengths)[::-1].tolist()


def greedy_packing(lengths: np.ndarray, bound: float) -> list[list[int]]:
    """GETLEASTBATCHES of Alg. 2."""
    batches: list[list[int]] = [[]]
    for item in rising(lengths):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[item] > bound:
            batches.append([])
        batches[-1].append(item)
    return batches


def padded_length(lengths: np.ndarray, batch: list[int]) -> float:
    return len(batch) * max((float(lengths[item]) for item in batch), default=0.0)


def members(bins: np.ndarray, num_bins: int) -> list[list[int]]:
    return [np.flatnonzero(bins == b).tolist() for b in range(num_bins)]


def heaviest(lengths: np.ndarray, bins: np.ndarray, num_bins: int, load) -> float:
    return max(load(lengths[batch]) if batch else 0.0 for batch in members(bins, num_bins))


def attention(penalty: float):
    return lambda batch: batch.sum() + penalty * (batch**2).sum()


def padded_attention(penalty: float):
    return lambda batch: batch.sum() + penalty * batch.size * batch.max() ** 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("quadratic", [0.0, 2.0])
@exactly
@given(lengths=whole, num_bins=bin_counts)
def test_every_form_fills_the_first_bins_and_leaves_no_more_empty_than_it_must(
    form, quadratic: float, lengths, num_bins: int
) -> None:
    bins = post_balance(form, lengths, num_bins, quadratic=quadratic)
    assert bins.shape == lengths.shape
    assert set(bins.tolist()) == set(range(min(num_bins, lengths.size)))
    assert bins.tolist() == post_balance(form, lengths, num_bins, quadratic=quadratic).tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [np.full(9, 2.5), np.zeros(9), np.r_[1e9, np.ones(8)], np.r_[1e-300, np.ones(8)]])
def test_every_form_copes_with_extreme_lengths(form, lengths: np.ndarray) -> None:
    for num_bins in (1, 2, 4, 9, 12):
        assert set(post_balance(form, lengths, num_bins).tolist()) == set(range(min(num_bins, 9)))


@exactly
@given(whole, bin_counts)
def test_without_padding_it_is_lpt(lengths: np.ndarray, num_bins: int) -> None:
    assert post_balance("no_padding", lengths, num_bins).tolist() == lpt(lengths, descending(lengths), num_bins).tolist()


@with_examples(40)
@given(short, st.integers(1, 3))
def test_without_padding_the_heaviest_bin_is_within_grahams_bound(lengths: np.ndarray, num_bins: int) -> None:
    every = (np.array(bins) for bins in itertools.product(range(num_bins), repeat=lengths.size))
    optimum = min(heaviest(lengths, bins, num_bins, np.sum) for bins in every)
    reached = heaviest(lengths, post_balance("no_padding", lengths, num_bins), num_bins, np.sum)
    assert reached <= (4 / 3 - 1 / (3 * num_bins)) * optimum + 1e-9


@exactly
@given(whole, bin_counts, st.integers(0, 60))
def test_packing_equals_the_papers_greedy(lengths: np.ndarray, num_bins: int, bound: int) -> None:
    bound = max(bound, int(lengths.max(initial=0)))
    bins = np.full(lengths.size, -1)
    batches = greedy_packing(lengths, bound)
    assert try_pack_padded(lengths, descending(lengths), num_bins, float(bound), bins) == (len(batches) <= num_bins)
    if lengths.size:
        assert fits_padded(np.sort(lengths), num_bins, float(bound)) == (len(batches) <= num_bins)
    if len(batches) <= num_bins:
        assert [sorted(batch) for batch in batches if batch] == [batch for batch in members(bins, num_bins) if batch]


@exactly
@given(whole.filter(lambda lengths: lengths.size > 0), bin_counts)
def test_padded_bins_are_the_packing_of_the_least_bound_that_fits(lengths: np.ndarray, num_bins: int) -> None:
    # A bound only matters where it is a count times a length.
    bounds = {count * length for count in range(1, lengths.size + 1) for length in lengths.tolist()} | {lengths.max()}
    fitting = [b for b in sorted(bounds) if b >= lengths.max() and len(greedy_packing(lengths, b)) <= num_bins]
    bins = post_balance("padded", lengths, num_bins)
    assert max(padded_length(lengths, batch) for batch in members(bins, num_bins)) <= fitting[0]
    batches = greedy_packing(lengths, fitting[0])
    if len(batches) == min(num_bins, lengths.size):
        assert [sorted(batch) for batch in batches] == [batch for batch in members(bins, num_bins) if batch]


@with_examples(40)
@given(short, st.integers(1, 3))
def test_no_other_bins_have_a_smaller_padded_length(lengths: np.ndarray, num_bins: int) -> None:
    def longest(bins: np.ndarray) -> float:
        return max(padded_length(lengths, batch) for batch in members(bins, num_bins))

    optimum = min(longest(np.array(bins)) for bins in itertools.product(range(num_bins), repeat=lengths.size))
    assert longest(post_balance("padded", lengths, num_bins)) == optimum


def test_padded_bins_hold_few_long_samples_or_many_short_ones() -> None:
    bins = post_balance("padded", np.array([8.0, 1, 1, 2, 1, 4, 1, 2, 1, 4, 1, 1]), 4)
    assert members(bins, 4) == [[1, 2, 4, 6, 8, 10, 11], [3, 7], [5, 9], [0]]


@exactly
@given(whole, bin_counts, st.sampled_from([0.0, 0.5, 2.0, 7.0]))
def test_the_third_form_equals_a_linear_search(lengths: np.ndarray, num_bins: int, step: float) -> None:
    sums, squares, counts = [0.0] * num_bins, [0.0] * num_bins, [0] * num_bins
    expected = [0] * lengths.size
    for item in descending(lengths).tolist():
        keys = [math.floor(total / step) if step else total for total in sums]
        chosen = min(range(num_bins), key=lambda b: (keys[b], squares[b], counts[b], b))
        expected[item] = chosen
        sums[chosen] += lengths[item]
        squares[chosen] += lengths[item] ** 2
        counts[chosen] += 1
    assert by_sum_then_squares(lengths, descending(lengths), num_bins, step).tolist() == expected


@exactly
@given(whole, bin_counts, st.integers(0, 60))
def test_the_fourth_form_equals_the_papers_listing(lengths: np.ndarray, num_bins: int, bound: int) -> None:
    waiting = descending(lengths).tolist()
    batches: list[list[int]] = [[]]
    while waiting:
        if batches[-1] and (len(batches[-1]) + 1) * lengths[waiting[0]] > bound:
            if len(batches) == num_bins:
                break
            batches.append([])
        batches[-1].append(waiting.pop(0))
    batches += [[] for _ in range(num_bins - len(batches))]
    for item in waiting:
        chosen = min(range(num_bins), key=lambda b: (lengths[batches[b]].sum(), len(batches[b]), b))
        batches[chosen].append(item)
    assert members(pack_then_lpt(lengths, descending(lengths), num_bins, float(bound)), num_bins) == [
        sorted(batch) for batch in batches
    ]


@exactly
@given(st.data(), bin_counts)
def test_an_empty_bin_gets_the_longer_half_of_the_fullest(data, num_bins: int) -> None:
    lengths = data.draw(whole)
    bins = np.array(
        data.draw(st.lists(st.integers(0, num_bins - 1), min_size=lengths.size, max_size=lengths.size)), dtype=np.int64
    )
    order = descending(lengths).tolist()
    batches = [[item for item in order if bins[item] == b] for b in range(num_bins)]
    for empty in range(min(num_bins, lengths.size)):
        if not batches[empty]:
            fullest = max(range(num_bins), key=lambda b: (len(batches[b]), -b))
            half = len(batches[fullest]) // 2
            batches[empty], batches[fullest] = batches[fullest][:half], batches[fullest][half:]
    filled = fill_empty(bins, descending(lengths), num_bins)
    assert members(filled, num_bins) == [sorted(batch) for batch in batches]
    for load in (np.sum, attention(0.3), padded_attention(0.3)):
        assert heaviest(lengths, filled, num_bins, load) <= heaviest(lengths, bins, num_bins, load)


@pytest.mark.parametrize(("form", "load", "gain"), [("third", attention(0.05), 1.01), ("fourth", padded_attention(0.05), 2.0)])
def test_a_form_made_for_a_load_beats_lpt_on_it(form, load, gain: float) -> None:
    ratios = []
    for seed in range(20):
        lengths = np.random.default_rng(seed).lognormal(0, 1, 400)
        plain, made_for_it = (post_balance(f, lengths, 8, 0.1) for f in ("no_padding", form))
        ratios.append(heaviest(lengths, plain, 8, load) / heaviest(lengths, made_for_it, 8, load))
    assert np.mean(ratios) > gain


@exactly
@given(st.data(), bin_counts, st.sampled_from([0.0, 0.5, 3.0]))
def test_the_load_of_a_bin_is_that_of_the_table(data, num_bins: int, quadratic: float) -> None:
    lengths = data.draw(whole)
    bins = np.array(
        data.draw(st.lists(st.integers(0, num_bins - 1), min_size=lengths.size, max_size=lengths.size)), dtype=np.int64
    )
    table = {
        "no_padding": np.sum,
        "padded": lambda batch: batch.size * batch.max(),
        "third": attention(quadratic),
        "fourth": padded_attention(quadratic),
    }
    for form, load in table.items():
        expected = [float(load(lengths[batch])) if batch else 0.0 for batch in members(bins, num_bins)]
        assert bin_loads(form, lengths, bins, num_bins, quadratic).tolist() == expected


@pytest.mark.parametrize(("form", "load"), [("third", attention), ("fourth", padded_attention)])
@pytest.mark.parametrize("quadratic", [1e-4, 0.05, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_form_that_knows_lambda_is_no_worse_than_its_listing_or_lpt(form, load, quadratic: float, seed: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(0, 1, 400)
    knows, listing, plain = (
        heaviest(lengths, post_balance(f, lengths, 8, quadratic=weight), 8, load(quadratic))
        for f, weight in ((form, quadratic), (form, 0.0), ("no_padding", 0.0))
    )
    assert knows <= min(listing, plain) * 1.001


@with_examples(40)
@given(short, st.integers(1, 3), st.sampled_from([0.1, 2.0]))
def test_the_third_form_that_knows_lambda_is_within_grahams_bound(lengths: np.ndarray, num_bins: int, quadratic: float) -> None:
    every = (np.array(bins) for bins in itertools.product(range(num_bins), repeat=lengths.size))
    optimum = min(heaviest(lengths, bins, num_bins, attention(quadratic)) for bins in every)
    reached = heaviest(lengths, post_balance("third", lengths, num_bins, quadratic=quadratic), num_bins, attention(quadratic))
    assert reached <= (4 / 3 - 1 / (3 * num_bins)) * optimum + 1e-9
