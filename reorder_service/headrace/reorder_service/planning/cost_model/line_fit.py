"""A line through times: what something takes as a multiple of an estimate, and what it takes besides."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from headrace.reorder_service.planning.cost_model.correction import MOST_CONSTANT
from headrace.reorder_service.planning.cost_model.least_squares import least_squares


def fit_line(estimated_s: ArrayLike, measured_s: ArrayLike) -> tuple[float, float]:
    """Return the slope and the constant of measured seconds over (m,) estimated ones, by least squares of relative errors.

    The slope is positive, the constant not negative and at most MOST_CONSTANT of the mean: what takes as long whatever it is
    estimated at would otherwise have no slope. Errors are relative because otherwise the longest time would outweigh all others.

    Raises ValueError unless all are finite and positive, and at least two.
    """
    x, y = np.asarray(estimated_s, np.float64), np.asarray(measured_s, np.float64)
    if x.ndim != 1 or x.shape != y.shape or x.size < 2 or not (np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)).all():
        raise ValueError(f"a line needs at least two finite, positive estimates and as many such times, got {x} and {y}")
    columns = np.stack((x, np.ones_like(x)), axis=1) / y[:, None]
    scale = np.linalg.norm(columns, axis=0)
    slope, constant = (least_squares(columns / scale, np.ones(x.size)) / scale).tolist()
    if slope <= 0 or constant > MOST_CONSTANT * y.mean():
        constant = min(constant, MOST_CONSTANT * float(y.mean()))
        slope = float((y.mean() - constant) / x.mean())
    return slope, constant
