"""A candidate for the placement of a model's units on a cluster, as the searches return it and the judge simulates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace.execution_spec import SharingOrder
from headrace.plan import GENERATOR, LLM

Placement = Literal["disaggregated", "colocated", "encoders-first", "nested"]
"""Where encoders and generator run. "disaggregated": on GPUs of their own. "colocated": every GPU has all units, sharded (FSDP),
one after the other. "encoders-first" and "nested": encoders are on the GPUs of the LLM's pipelines, and run in front of the LLM
and behind it, or between its actions. Of the latter, a generator may be there too."""
SHARING: Mapping[Placement, SharingOrder] = {"encoders-first": "colocated", "nested": "nested"}
"""By placement with encoders on the LLM's pipelines: what a job says of the order (`execution.sharing`)."""


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
    pieces: int = 1
    """Into how many actions, each of some of its layers, a pass of each of the units that share GPUs is cut (`execution.units`);
    more than 1 only where they have one stage and the schedule no chunks."""
    has_generator: bool = False
    """Whether the generator is on the GPUs of the LLM's pipelines as well; nested ones only."""
    in_flight: int | None = None
    """Most microbatches that a stage holds under the eager schedule, where units share GPUs; elsewhere as many as fit its
    memory."""
    estimated_s: float = field(default=0.0, compare=False)
    """Seconds of a step if all samples were mean ones, by an estimate of the search that found it, or that found what it is a
    variant of; 0 without one."""

    @property
    def layout(self) -> str:
        """What it has in common with candidates that are laid out alike, whoever found them."""
        return f"{self.placement} {self.has_generator} {self.microbatches} {self.pieces} {self.in_flight} {dict(self.grids)}"

    @property
    def sharing(self) -> SharingOrder | None:
        """In which order the GPUs of the LLM's pipelines take its actions and other units'; None if they have the LLM alone."""
        return SHARING.get(self.placement)

    @property
    def guests(self) -> tuple[str, ...]:
        """The units that share the GPUs of the LLM's pipelines, in pipeline order."""
        if self.sharing is None:
            return ()
        return tuple(unit for unit in self.grids if unit != LLM and (unit != GENERATOR or self.has_generator))

    @property
    def gpus(self) -> int:
        """GPUs that it uses; those of a cluster that it does not use are idle."""
        if self.placement == "colocated":
            return self.grids[LLM].gpus
        return sum(grid.gpus for unit, grid in self.grids.items() if unit not in self.guests)
