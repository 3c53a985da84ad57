"""Sorting, LPT and ranks: the kernels against slow twins, and the bound that the literature proves."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.search.number_partition import (
    descending,
    lpt,
    lpt_of_groups,
    lpt_of_rounds,
    rank_in_bin,
)
from tests.examples import with_examples

weights_lists = st.lists(st.integers(0, 50), min_size=1, max_size=40)


def slow_lpt(weights: list[float], num_bins: int) -> list[int]:
    loads, counts, bins = [0.0] * num_bins, [0] * num_bins, [0] * len(weights)
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min(range(num_bins), key=lambda b: (loads[b], counts[b], b))
        loads[lightest] += weights[item]
        counts[lightest] += 1
        bins[item] = lightest
    return bins


def run_lpt(weights: list[float], num_bins: int) -> list[int]:
    array = np.array(weights, dtype=np.float64)
    return lpt(array, descending(array), num_bins).tolist()


@given(weights_lists, st.integers(1, 9))
def test_the_tournament_takes_the_same_bins_as_a_linear_search(weights: list[float], num_bins: int) -> None:
    assert run_lpt(weights, num_bins) == slow_lpt(weights, num_bins)


@with_examples(30)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=40), st.integers(1, 5))
def test_groups_get_the_bins_that_each_gets_by_itself(items: list[tuple[int, int]], num_bins: int) -> None:
    weights, group = np.array([float(weight) for weight, _ in items]), np.array([of for _, of in items])
    bins = lpt_of_groups(weights, descending(weights), group, 4, num_bins)
    for number in range(4):
        of_group = np.flatnonzero(group == number)
        assert bins[of_group].tolist() == (run_lpt(weights[of_group].tolist(), num_bins) if of_group.size else [])


def slow_rounds(weights: list[float], group: list[int], is_open: list[list[bool]], share: float) -> list[int]:
    members = {g: [i for i, of in enumerate(group) if of == g] for g in set(group)}
    totals, bins = [0.0] * len(is_open[0]), [0] * len(weights)
    for g in sorted(members, key=lambda g: (-max(weights[i] for i in members[g]), g)):
        allowed = [b for b, may in enumerate(is_open[g]) if may]
        free = [b for b in allowed if totals[b] < share] or allowed
        lots = slow_lpt([weights[i] for i in members[g]], len(free))
        loads = [sum(weights[i] for i, of in zip(members[g], lots, strict=True) if of == lot) for lot in range(len(free))]
        heaviest_first = sorted(range(len(free)), key=lambda lot: -loads[lot])
        bin_of = dict(zip(heaviest_first, sorted(free, key=lambda b: totals[b]), strict=True))
        for i, lot in zip(members[g], lots, strict=True):
            bins[i] = bin_of[lot]
            totals[bin_of[lot]] += weights[i]
    return bins


@with_examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=40),
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5).filter(any), min_size=4, max_size=4),
    st.integers(0, 60),
)
def test_rounds_give_their_heaviest_lots_to_the_lightest_open_bins(
    items: list[tuple[int, int]], is_open: list[list[bool]], share: int
) -> None:
    weights, group = [float(weight) for weight, _ in items], [of for _, of in items]
    array = np.array(weights)
    bins = lpt_of_rounds(array, descending(array), np.array(group), np.array(is_open), float(share))
    assert bins.tolist() == slow_rounds(weights, group, is_open, share)
    assert all(is_open[of][into] for of, into in zip(group, bins.tolist(), strict=True))


@with_examples(40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_heaviest_bin_is_within_the_bound_of_the_optimum(weights: list[float], num_bins: int) -> None:
    def heaviest(bins: tuple[int, ...] | list[int]) -> float:
        return np.bincount(bins, weights=weights).max()

    optimum = min(heaviest(bins) for bins in itertools.product(range(num_bins), repeat=len(weights)))
    assert heaviest(run_lpt(weights, num_bins)) <= (4 / 3 - 1 / (3 * num_bins)) * optimum + 1e-9


def test_the_bound_is_reached_on_grahams_instance() -> None:
    bins = run_lpt([5, 5, 4, 4, 3, 3, 3], 3)
    assert np.bincount(bins, weights=[5, 5, 4, 4, 3, 3, 3]).max() == 11  # the optimum is 9, and 4/3 - 1/9 = 11/9


def test_weights_of_zero_are_dealt_out_evenly() -> None:
    assert run_lpt([0] * 7, 3) == [0, 1, 2, 0, 1, 2, 0]


def slow_descending(weights: list[float]) -> list[int]:
    return sorted(range(len(weights)), key=lambda i: -weights[i])


@given(st.lists(st.floats(-1e300, 1e300) | st.sampled_from([0.0, -0.0, 1.0, 1.0 + 2**-52]), max_size=60))
def test_descending_equals_a_plain_sort(weights: list[float]) -> None:
    assert descending(np.array(weights)).tolist() == slow_descending(weights)


@given(st.lists(st.integers(0, 40), max_size=200), st.sampled_from([1.0, -1.0, 1e-310]))
def test_weights_that_differ_only_in_their_last_bits_are_sorted_too(steps: list[int], start: float) -> None:
    weights = [start + step * np.spacing(start) for step in steps]
    assert descending(np.array(weights)).tolist() == slow_descending(weights)


@pytest.mark.parametrize("sigma", [0.0, 1e-9, 1e-6, 1.0, 3.0])
def test_descending_equals_a_stable_argsort_on_many_weights(sigma: float) -> None:
    weights = np.random.default_rng(0).lognormal(0, sigma, 5000)
    assert (descending(weights) == np.argsort(-weights, kind="stable")).all()


def test_equal_weights_keep_their_order() -> None:
    assert descending(np.array([2.0, 5.0, 2.0, 5.0])).tolist() == [1, 3, 0, 2]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_rank_in_bin_counts_along_the_order(bins: list[int], random) -> None:
    order = list(range(len(bins)))
    random.shuffle(order)
    seen = [0] * 5
    expected = [0] * len(bins)
    for item in order:
        expected[item] = seen[bins[item]]
        seen[bins[item]] += 1
    assert rank_in_bin(np.array(order), np.array(bins)).tolist() == expected


@pytest.mark.parametrize("num_bins", [1, 2, 3, 31, 32, 33, 160])
@pytest.mark.parametrize("n", [0, 1, 32, 500])
def test_lpt_with_many_bins_equals_a_linear_search(num_bins: int, n: int) -> None:
    weights = np.random.default_rng(n).integers(0, 100, n).astype(np.float64)
    assert run_lpt(weights.tolist(), num_bins) == slow_lpt(weights.tolist(), num_bins)


@given(weights_lists, st.integers(1, 9))
def test_the_first_items_open_the_bins_one_by_one(weights: list[float], num_bins: int) -> None:
    order = descending(np.array(weights, np.float64))
    opened = lpt(np.array(weights, np.float64), order, num_bins)[order[:num_bins]]
    assert opened.tolist() == list(range(len(opened)))


def test_of_no_items_there_are_no_ranks() -> None:
    assert rank_in_bin(np.empty(0, np.int64), np.empty(0, np.int64)).size == 0


@pytest.mark.parametrize("num_bins", [1, 4])
def test_one_item_goes_to_the_first_bin(num_bins: int) -> None:
    assert run_lpt([3.0], num_bins) == [0]
