"""What the hot loops share."""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel

__all__ = ["kernel", "random_state"]


def random_state(seed: int) -> np.uint64:
    """A first state, never 0, for the xorshift generators in kernels; neighbouring seeds give unlike states."""
    return np.uint64((seed * 2862933555777941757 + 3037000493) % (2**64 - 1) + 1)
