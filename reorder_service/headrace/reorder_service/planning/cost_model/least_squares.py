"""Least squares without negative weights, for a handful of columns."""

from __future__ import annotations

import itertools
import math

import numpy as np

from headrace.reorder_service.planning.batch import Floats


def least_squares(columns: Floats, target: Floats) -> Floats:
    """Return the (c,) weights >= 0 for which the weighted sum of the (m, c) columns is nearest to the (m,) target.

    The best weights are the unconstrained optimum of the columns that they use, so all 2^c - 1 choices of columns are tried.
    """
    num_columns = columns.shape[1]
    best, best_error = np.zeros(num_columns), math.inf
    for count in range(num_columns, 0, -1):
        for used in itertools.combinations(range(num_columns), count):
            part = columns[:, used]
            weights = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(np.square(part @ weights - target).sum())
            if weights.min() >= 0 and error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[list(used)] = weights
    return best
