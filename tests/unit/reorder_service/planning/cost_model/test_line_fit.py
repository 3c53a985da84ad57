"""A line through times: a multiple of an estimate, and a constant."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.cost_model.line_fit import fit_line

X = np.array([1.0, 2.0, 3.0, 8.0, 20.0])


@given(slope=st.floats(1e-6, 1e6), share=st.floats(0.0, 3.0))
def test_the_line_that_times_lie_on_is_found(slope: float, share: float) -> None:
    found = fit_line(X, slope * (X + share))
    assert found == (pytest.approx(slope, rel=1e-6), pytest.approx(slope * share, rel=1e-6, abs=1e-6 * slope))


def test_noise_of_a_few_percent_moves_what_it_says_by_less() -> None:
    noise = np.random.default_rng(0).uniform(0.97, 1.03, (40, 5))
    slope, constant = fit_line(np.tile(X, 40), (noise * (3.0 * X + 5.0)).ravel())
    np.testing.assert_allclose(slope * X + constant, 3.0 * X + 5.0, rtol=0.01)


def test_times_that_do_not_grow_have_a_slope_all_the_same() -> None:
    slope, constant = fit_line(X, np.full(5, 7.0))
    assert slope > 0
    assert slope * X.mean() + constant == pytest.approx(7.0)


def test_times_that_fall_have_a_slope_all_the_same() -> None:
    assert fit_line(X, [9.0, 1.0, 1.0, 1.0, 0.5])[0] > 0


def test_times_that_grow_faster_than_the_estimate_have_no_negative_constant() -> None:
    assert fit_line(X, X**2)[1] == 0.0


@pytest.mark.parametrize(("x", "y"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, 2.0], [1.0, np.nan])])
def test_no_line_goes_through_less(x: list[float], y: list[float]) -> None:
    with pytest.raises(ValueError, match="a line needs at least two"):
        fit_line(x, y)
