"""A candidate for the placement of a model's units on a cluster, as the searches return it and the judge simulates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.plan import LLM

Placement = Literal["disaggregated", "colocated"]
"""Where encoders and generator run: on GPUs of their own, or on all of the LLM's GPUs, before and after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGrid:
    """The processes of one unit: data-parallel replicas of pipelines of tensor-parallel slices."""

    dp: int
    tp: int
    pp: int

    @property
    def gpus(self) -> int:
        """Number of processes, each with a GPU."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to lay the units out, not yet judged."""

    search: str
    """Name of the search that found it."""
    grids: Mapping[str, UnitGrid]
    """By unit, in pipeline order."""
    microbatches: int
    """Microbatches of a step of each LLM replica."""
    placement: Placement = "disaggregated"

    @property
    def gpus(self) -> int:
        """GPUs that it uses; those of a cluster that it does not use are idle."""
        if self.placement == "colocated":
            return self.grids[LLM].gpus
        return sum(grid.gpus for grid in self.grids.values())
