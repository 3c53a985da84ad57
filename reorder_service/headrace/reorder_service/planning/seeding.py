"""Seeding of the xorshift random generators in numba kernels."""

from __future__ import annotations

import numpy as np


def xorshift_state(seed: int) -> np.uint64:
    """Turn a seed into a generator's initial state: never 0, and unlike that of neighbouring seeds."""
    return np.uint64((seed * 2862933555777941757 + 3037000493) % (2**64 - 1) + 1)
