"""Measured layer costs: a layer takes a x^2 + b x + c seconds on x positions (Entrain: dissertation, section 4.4.1).

Counting operations misses memory bandwidth and kernel launches; a curve through a few measured times does not. Entrain
measures every layer separately, because attention grows with the square of the length and the MLP does not, at
x = 64, 256, 1024, 4096 and 16384.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.cost_model.least_squares import least_squares

VISION = "vision"
AUDIO = "audio"
PARTS = (VISION, AUDIO, LLM, GENERATOR)
"""Parts of a model for which costs are given, each on positions of its own.

The vision encoder is measured on patches before merging, the audio encoder on its own frames (half of the mel frames), the LLM
on tokens, and the generator on image tokens. An encoder's projector counts as one of its layers, the projector to the generator
and the layers at both ends of the generator as layers of the generator. The LLM's head is its TARGETS.
"""

TARGETS = "targets"
"""What the LLM computes for tokens that carry loss only: its head, and the loss. Its costs are given on the number of these."""

POWERS = ("quadratic", "linear", "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """The forward seconds of a layer on x positions, as the polynomial `quadratic` * x^2 + `linear` * x + `constant`.

    x counts the positions that attend to each other, so the square is taken image by image and recording by recording. The
    constant is added once per sample that has any position.
    """

    quadratic: float = 0.0
    linear: float = 0.0
    constant: float = 0.0

    def seconds(self, positions: float) -> float:
        """Return the forward seconds on that many positions, all of which attend to each other."""
        return self.quadratic * positions**2 + self.linear * positions + self.constant

    def sliced(self, tp: int) -> LayerCost:
        """Return the cost of one of `tp` equal slices, without what slicing itself costs."""
        return LayerCost(**{power: getattr(self, power) / tp for power in POWERS})

    def scaled(self, by: float) -> LayerCost:
        """Return the cost of a layer that takes so many times as long."""
        return LayerCost(**{power: getattr(self, power) * by for power in POWERS})


Coefficients = Mapping[str, Sequence[LayerCost]]
"""The costs of the layers, in order, by part of the model (see PARTS), and perhaps those of the LLM's TARGETS."""


def total(layers: Iterable[LayerCost]) -> LayerCost:
    """Add up the polynomials of several layers, as if they were one layer."""
    layers = tuple(layers)
    return LayerCost(**{power: math.fsum(getattr(layer, power) for layer in layers) for power in POWERS})


def fit(positions: ArrayLike, seconds: ArrayLike) -> LayerCost:
    """Fit a layer to (m,) positions and (m,) measured seconds, by least squares of relative errors with no coefficient below 0.

    Errors are relative because otherwise the time at 16384 positions would outweigh that at 64.

    Raises ValueError for positions or times that are not positive, and for fewer than 3 different positions.
    """
    x, y = np.asarray(positions, np.float64), np.asarray(seconds, np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"positions and seconds must be lists of one length, got shapes {x.shape} and {y.shape}")
    wrong = np.flatnonzero(~(np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)))
    if wrong.size:
        row = wrong[0]
        raise ValueError(f"positions and seconds must be finite and positive, but measurement {row} is {x[row]} and {y[row]}")
    if len(set(x.tolist())) < len(POWERS):
        raise ValueError(
            f"a curve of {len(POWERS)} coefficients needs as many different positions, got {sorted(set(x.tolist()))}"
        )
    columns = np.stack((x**2, x, np.ones_like(x)), axis=1) / y[:, None]
    scale = np.linalg.norm(columns, axis=0)
    return LayerCost(**dict(zip(POWERS, (least_squares(columns / scale, np.ones(x.size)) / scale).tolist(), strict=True)))
