"""How many rounds are measured: until times are known well, within a limit of time."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest

from headrace.cli.costs.profile_measuring import Patience
from headrace.trainer.profiling.robust_estimate import Estimate


class World:
    """Rounds of ten seconds each, in which something takes about a second."""

    def __init__(self, noise: float) -> None:
        self.now_s, self.closed, self._noise = 0.0, False, noise
        self.shown: list[tuple[float, float]] = []

    def rounds(self) -> Generator[Estimate, None, None]:
        dice = np.random.default_rng(0)
        readings: list[float] = []
        try:
            yield Estimate(value=0.0, half_width=np.inf)  # warms up
            while True:
                self.now_s += 10.0
                readings.append(float(dice.lognormal(0.0, self._noise)))
                yield Estimate.of(readings)
        finally:
            self.closed = True

    def measured(self, **patience: float) -> tuple[Estimate, float, int]:
        """The estimate, its uncertainty, and the number of rounds."""
        limits = Patience(**{"repeats": 7, "within": 0.02, "seconds": 1e9, **patience})
        found, share = limits.measure(
            self.rounds(), lambda one: one.half_width / one.value, lambda *what: self.shown.append(what), lambda: self.now_s
        )
        assert self.closed
        return found, share, len(self.shown)


def test_noisy_times_take_more_rounds_until_they_are_known_as_well() -> None:
    (calm, calm_share, few), (noisy, noisy_share, many) = World(0.01).measured(), World(0.1).measured()
    assert few == 7
    assert many > 50
    assert max(calm_share, noisy_share) <= 0.02
    assert max(abs(calm.value - 1.0), abs(noisy.value - 1.0)) < 0.03


def test_the_limit_ends_it_and_says_how_uncertain_times_are() -> None:
    world = World(0.5)
    _, share, rounds = world.measured(seconds=95.0)
    assert rounds == 10
    assert share > 0.1
    assert world.shown[-1] == (1.0, share)


def test_no_limit_is_below_the_rounds_that_are_asked_for() -> None:
    assert World(0.5).measured(seconds=0.0, repeats=3)[2] == 3


@pytest.mark.parametrize("noise", [0.01, 0.5])
def test_what_is_shown_grows_to_all_of_it(noise: float) -> None:
    world = World(noise)
    world.measured(seconds=200.0)
    done = [share for share, _ in world.shown]
    assert done == sorted(done)
    assert 0.0 < done[0] < done[-1] <= 1.0
