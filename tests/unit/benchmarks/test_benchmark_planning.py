"""What the planning benchmark compares with published figures is the same quantity."""

from __future__ import annotations

import numpy as np

from benchmarks.planning.inputs import spread_of


def test_the_spread_is_in_seconds_of_the_microbatches_that_hold_a_sample() -> None:
    """Published deviations are absolute: fewer, heavier microbatches must not look level because their mean is larger."""
    many = np.array([[[1.0], [3.0], [1.0], [3.0]]])
    few = np.array([[[2.0], [6.0], [0.0], [0.0]]])
    assert spread_of(many, many[..., 0] > 0).tolist() == [1.0]
    assert spread_of(few, few[..., 0] > 0).tolist() == [2.0]
