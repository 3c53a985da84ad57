"""Rotary position embedding (Su et al. 2021, section 3.2), along one axis for sequences and two for images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """The angle of every token in every pair of channels, as cosine and sine: each (T, 1, D / 2) float32."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotates channel i of (T, H, D) together with channel i + D / 2; dtype is kept."""
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)
        return rotated.to(x.dtype)


def rotation(positions: Tensor, head_dim: int, *, theta: float) -> Rotation:
    """`positions` (T, axes); the D / 2 pairs of channels are shared equally among the axes, D divisible by 2 * axes."""
    num_axes = positions.shape[1]
    if head_dim % (2 * num_axes):
        raise ValueError(f"a head of {head_dim} channels cannot carry rotary positions along {num_axes} axes")
    frequencies = head_dim // (2 * num_axes)
    exponents = torch.arange(frequencies, device=positions.device, dtype=torch.float32) / frequencies
    angles = positions.float()[:, :, None] * theta**-exponents
    angles = angles.flatten(1)[:, None, :]
    return Rotation(cos=angles.cos(), sin=angles.sin())
