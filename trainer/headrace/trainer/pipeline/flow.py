"""Where gradients go: frozen units save the backward that nobody needs (Cornstarch, section 3.3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.backward import in_front
from headrace.trainer.pipeline.topology import PipelineTopology


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """Of the parts of one unit (`PipelineTopology.num_parts`), by their positions: in the order in which they are passed."""

    frozen: bool
    """Whether none of the unit's layers learns."""
    projects: bool
    """Whether a projector that learns stands at the unit's end."""
    behind_learners: bool
    """Whether anything learns in the units in front."""
    num_parts: int

    @classmethod
    def of(cls, topology: PipelineTopology, unit: str) -> GradientFlow:
        here = topology.units[unit]
        return cls(
            frozen=here.frozen,
            projects=_projects(topology, unit),
            behind_learners=any(_learns(topology, other) for other in in_front(unit, topology.units)),
            num_parts=topology.num_parts(unit),
        )

    def leaves(self, position: int) -> bool:
        """Whether gradients of what came in are sent back to where it came from."""
        return self.behind_learners or (position > 0 and not self.frozen)

    def enters(self, position: int) -> bool:
        """Whether the position has a backward at all."""
        return self.leaves(position) or not self.frozen or (self.projects and position == self.num_parts - 1)


def learns(topology: PipelineTopology, unit: str) -> bool:
    """Whether a unit takes gradients of what it hands over."""
    return _learns(topology, unit) or GradientFlow.of(topology, unit).behind_learners


def _learns(topology: PipelineTopology, unit: str) -> bool:
    return not topology.units[unit].frozen or _projects(topology, unit)


def _projects(topology: PipelineTopology, unit: str) -> bool:
    is_last = unit == list(topology.units)[-1]
    return not is_last and not topology.units[unit].frozen_projector
