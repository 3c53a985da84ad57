"""Normal noise by counter: each value follows from a key and its own place alone, on any device and beside any other rows.

Bits are mixed as in SplitMix64 (Steele, Lea and Flood 2014), whose n-th number needs no other, and turned into normal values by
the method of Box and Muller (1958). Devices agree up to the rounding of their logarithms and cosines.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64  # as an int64, like all numbers here, whose arithmetic is that of 64 bits
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_UNIFORM_BITS = 24  # of a float32's significand
_BLOCK_ROWS = 64  # on the CPU: what stays in a core's cache takes less than half the time


def numbers(keys: Tensor, places: Tensor) -> Tensor:
    """Return the 64 random bits, as int64, at these places of the streams with these int64 keys (shapes are broadcast)."""
    x = keys + (places + 1) * _STEP
    x = (x ^ _shifted(x, 30)).mul_(_FIRST)
    x = x.bitwise_xor_(_shifted(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shifted(x, 31))


def uniform(numbers: Tensor) -> Tensor:
    """Return float32 values from 0 up to, but not including, 1 from the upper bits of random numbers."""
    return _shifted(numbers, 64 - _UNIFORM_BITS).float().mul_(2.0**-_UNIFORM_BITS)


def normal(keys: Tensor, width: int) -> Tensor:
    """Return standard normal values (L, width), float32, of which each row follows from its key in (L,) int64 `keys`."""
    blocks = torch.split(keys, _BLOCK_ROWS) if keys.device.type == "cpu" else (keys,)
    return torch.cat([_normal(block, width) for block in blocks])


def _normal(keys: Tensor, width: int) -> Tensor:
    pairs = torch.arange(-(-width // 2), device=keys.device)
    bits = numbers(keys[:, None], pairs)
    radius = (1.0 - uniform(bits)).log_().mul_(-2.0).sqrt_()
    angle = (bits & (2**_UNIFORM_BITS - 1)).float().mul_(2.0 * math.pi / 2**_UNIFORM_BITS)
    return torch.cat((radius * angle.cos(), radius * angle.sin()), dim=1)[:, :width]


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift int64 to the right, filling with zeros."""
    return (x >> by).bitwise_and_(2 ** (64 - by) - 1)
