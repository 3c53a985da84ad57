"""What something takes, from readings that other work on the machine disturbs now and then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The median of readings, and how far the true one may be from it."""

    value: float
    half_width: float
    """Distance from the value to the farther end of its confidence interval of `CONFIDENCE`; infinite for a single reading."""

    @classmethod
    def of(cls, readings: Sequence[float]) -> Estimate:
        """Estimate the median of at least one reading, each taken in the same conditions.

        The interval lies between two of the sorted readings, whatever they are distributed like (David and Nagaraja 2003, section
        7.1): as many readings are below the lower one as above the upper one. Of fewer than six, which reach no such confidence,
        it is from the smallest to the largest.
        """
        ordered, middle = sorted(readings), median(readings)
        if len(ordered) == 1:
            return cls(value=middle, half_width=math.inf)
        outside = _outside(len(ordered))
        return cls(value=middle, half_width=max(middle - ordered[outside], ordered[-1 - outside] - middle))


@cache
def _outside(count: int) -> int:
    """Return how many of so many sorted readings are left out at either end of the interval."""
    tail, number = 0.0, 0
    while (tail := tail + math.comb(count, number) / 2.0**count) <= (1.0 - CONFIDENCE) / 2.0:
        number += 1
    return max(0, number - 1)
