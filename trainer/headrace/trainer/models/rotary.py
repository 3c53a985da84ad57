"""Rotary position embedding (Su et al. 2021, section 3.2), along one axis for sequences and two for images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """Rotary angles of every token and pair of channels, as cosine and sine: each (T, 1, D / 2) float32."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate each pair of channels i and i + D / 2 of x (T, H, D), in float32. Returns the dtype of x."""
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)
        return rotated.to(x.dtype)


def rotation(positions: Tensor, head_dim: int, *, theta: float) -> Rotation:
    """Return the rotary angles of `positions` (T, axes) for heads of `head_dim` (D) channels.

    The D / 2 pairs of channels are shared equally among the axes. Raises ValueError if D is not divisible by 2 * axes.
    """
    num_axes = positions.shape[1]
    if head_dim % (2 * num_axes):
        raise ValueError(f"a head of {head_dim} channels cannot carry rotary positions along {num_axes} axes")
    frequencies = head_dim // (2 * num_axes)
    exponents = torch.arange(frequencies, device=positions.device, dtype=torch.float32) / frequencies
    angles = positions.float()[:, :, None] * theta**-exponents
    angles = angles.flatten(1)[:, None, :]
    return Rotation(cos=angles.cos(), sin=angles.sin())
