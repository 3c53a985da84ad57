"""Attention inside one device: whole blocks wait for the longest, subblocks do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.context.compute_units import kernel_time, subblocks


@given(touched=st.lists(st.integers(0, 40), max_size=20), width=st.integers(1, 12))
def test_subblocks_are_all_of_their_block_and_nearly_equal(touched, width):
    owner, sizes = subblocks(np.array(touched, np.int64), width)
    np.testing.assert_array_equal(np.bincount(owner, weights=sizes, minlength=len(touched)), touched)
    assert (np.diff(owner) >= 0).all()
    for block in range(len(touched)):
        own = sizes[owner == block]
        assert len(own) == -(-touched[block] // width)
        assert len(own) == 0 or 1 <= own.min() <= own.max() <= min(width, own.min() + 1)


def test_a_long_block_does_not_keep_the_others_waiting():
    """Cornstarch's dissertation, figure 3.3b: blocks of 1 and 5 on two compute units, in subblocks of 2."""
    assert kernel_time(np.array([1, 5]), 2) == 5
    assert kernel_time(np.array([1, 5]), 2, width=2) == 3
    assert kernel_time(np.array([1, 5]), 2, width=2, joining=0.1) == pytest.approx(3.3)
    assert kernel_time(np.array([1, 1]), 2, width=2, joining=0.1) == 1


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="at least one block of keys, got a width of 0"):
        subblocks(np.array([1]), 0)
    with pytest.raises(ValueError, match="at least one compute unit, got 0"):
        kernel_time(np.array([1]), 0)
