"""Which units run on the ranks of the LLM, as the planner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import gcd

from headrace.execution_spec import SharingOrder
from headrace.plan import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Which units run on the LLM's ranks, and how. Raises ValueError for slices or pieces below 1, or of units not there."""

    order: SharingOrder
    slices: Mapping[str, int]
    """Ranks of a stage of the LLM and of every guest: slices of its layers, or of its sequences."""
    pieces: Mapping[str, int] = field(default_factory=dict)
    """Into how many actions, each of some of its layers, every pass of a guest in one stage is cut; 1 for those not named."""

    def __post_init__(self) -> None:
        if LLM not in self.slices or min(self.slices.values()) < 1:
            raise ValueError(f"slices are at least 1, of {LLM!r} and of the units on its ranks, got {dict(self.slices)}")
        if self.pieces.keys() - self.guests or min(self.pieces.values(), default=1) < 1:
            raise ValueError(f"pieces are at least 1, of units on the ranks of {LLM!r}, got {dict(self.pieces)}")

    @property
    def guests(self) -> frozenset[str]:
        """The units on the LLM's ranks."""
        return frozenset(self.slices) - {LLM}

    @property
    def cell(self) -> int:
        """Ranks of a cell: the most that always act together."""
        return reduce(gcd, self.slices.values())
