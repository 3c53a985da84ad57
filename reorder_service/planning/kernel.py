"""How the hot loops are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile `function` on its first call and keep the machine code on disk.

    `nogil`: a planning thread does not stop the server. `fastmath` stays off: sums are added in the written order, so
    plans are equal on every machine. numba does not see that what a cached kernel uses from another file has changed, so
    kernels use only kernels and constants of their own file.
    """
    return cast(Function, numba.njit(cache=True, nogil=True, fastmath=False)(function))


def random_state(seed: int) -> np.uint64:
    """A first state, never 0, for the xorshift generators in kernels; neighbouring seeds give unlike states."""
    return np.uint64((seed * 2862933555777941757 + 3037000493) % (2**64 - 1) + 1)
