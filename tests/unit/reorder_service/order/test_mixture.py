"""Sources interleave evenly by weights, which may change on the way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from headrace.reorder_service.order.mixture import Mixture

shares = st.lists(st.floats(0.05, 5), min_size=1, max_size=5)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Mixture, int, list[int]]:
    """A mixture, its number of sources, and where its weights change."""
    weights = draw(shares)
    size = len(weights)
    places = sorted(draw(st.lists(st.integers(0, 300), max_size=4)))
    some = st.lists(st.one_of(st.just(0.0), st.floats(0.05, 5)), min_size=size, max_size=size).filter(any)
    return Mixture(weights, [(place, draw(some)) for place in places]), size, places


@given(mixtures(), st.integers(0, 400), st.integers(0, 60))
def test_any_part_of_it_is_found_without_what_is_before(made: tuple[Mixture, int, list[int]], start: int, length: int) -> None:
    mixture, _, _ = made
    assert_array_equal(mixture.positions(start, start + length), mixture.positions(0, start + length)[start:])


@given(mixtures())
def test_every_source_gives_its_samples_in_order_without_a_gap(made: tuple[Mixture, int, list[int]]) -> None:
    mixture, size, _ = made
    found = mixture.positions(0, 500)
    for source in range(size):
        positions = [position for giver, position in found if giver == source]
        assert positions == list(range(len(positions)))


@given(mixtures())
def test_places_are_the_inverse_of_positions(made: tuple[Mixture, int, list[int]]) -> None:
    mixture, _, _ = made
    for place, (source, position) in enumerate(mixture.positions(0, 400)):
        assert mixture.place(source, position) == place


@given(st.integers(1, 150), st.floats(0, 3), st.integers(0, 10**9), st.integers(1, 300))
def test_many_uneven_sources_give_their_samples_as_they_are_due(number: int, skew: float, start: int, length: int) -> None:
    weights = np.arange(1, number + 1, dtype=np.float64) ** -skew
    shares = weights / weights.sum()
    mixture = Mixture(weights.tolist())
    before = mixture.given(start)
    later = [(source, before[source] + n) for source in range(number) for n in range(length)]
    later.sort(key=lambda sample: ((sample[1] + 0.5) / shares[sample[0]], sample))
    assert mixture.positions(start, start + length).tolist() == [list(sample) for sample in later[:length]]
    assert before.sum() == start
    first_source, first_position = later[0]
    assert all((before - 0.5) / shares <= (first_position + 0.5) / shares[first_source])


def test_shares_hold_in_every_part_of_the_job() -> None:
    mixture = Mixture([3, 1], [(400, [1, 1]), (600, [0, 1])])
    for start, stop, expected in [(0, 400, 0.75), (400, 600, 0.5), (600, 900, 0.0)]:
        given_ = Counter(source for source, _ in mixture.positions(start, stop))
        assert given_[0] / (stop - start) == pytest.approx(expected, abs=0.01)


def test_a_change_leaves_what_is_before_it_alone() -> None:
    assert_array_equal(Mixture([3, 1], [(100, [1, 9])]).positions(0, 100), Mixture([3, 1]).positions(0, 100))


def test_a_source_without_a_share_is_not_awaited() -> None:
    mixture = Mixture([1, 1], [(10, [1, 0])])
    assert mixture.place(1, 4) is not None
    assert mixture.place(1, 5) is None


def test_the_later_of_two_changes_at_one_place_counts() -> None:
    assert Mixture([1, 1], [(0, [1, 0]), (0, [0, 1])]).positions(0, 3).tolist() == [[1, 0], [1, 1], [1, 2]]


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [float("nan"), 1], [float("inf"), 1]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be"):
        Mixture(weights)


@pytest.mark.parametrize("changes", [[(5, [1, 1, 1])], [(5, [1, 1]), (4, [1, 1])]])
def test_changes_that_do_not_fit_are_refused(changes: list[tuple[int, list[float]]]) -> None:
    with pytest.raises(ValueError, match="must follow"):
        Mixture([1, 1], changes)
