"""Medians of disturbed readings, and intervals that hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.trainer.profiling.robust_estimate import Estimate


def readings(seed: int, count: int, disturbed: float = 0.2) -> list[float]:
    """Readings around 1, some of which other work makes several times as long."""
    dice = np.random.default_rng(seed)
    undisturbed = dice.lognormal(0.0, 0.05, count)
    return np.where(dice.random(count) < disturbed, undisturbed * dice.uniform(1.5, 10.0, count), undisturbed).tolist()


def test_a_fifth_of_disturbed_readings_moves_the_median_by_little_and_the_mean_by_much() -> None:
    some = readings(0, 400)
    assert Estimate.of(some).value == pytest.approx(1.0, abs=0.03)
    assert np.mean(some) > 1.5


@pytest.mark.parametrize("count", [6, 15, 40])
def test_the_interval_has_the_true_median_as_often_as_it_says(count: int) -> None:
    found = [Estimate.of(readings(seed, count, disturbed=0.0)) for seed in range(1000)]
    assert np.mean([abs(one.value - 1.0) <= one.half_width for one in found]) >= 0.94


def test_the_interval_narrows_with_the_root_of_the_readings() -> None:
    few, many = (
        np.mean([Estimate.of(readings(seed, count, disturbed=0.0)).half_width for seed in range(50)]) for count in (25, 400)
    )
    assert few / many == pytest.approx(4.0, rel=0.4)


def test_few_readings_say_what_they_can() -> None:
    assert Estimate.of([3.0]) == Estimate(value=3.0, half_width=math.inf)
    assert Estimate.of([1.0, 2.0, 5.0]) == Estimate(value=2.0, half_width=3.0)
    assert Estimate.of([2.0] * 7).half_width == 0.0
