"""Where gradients go: frozen units save the backward that nobody needs (Cornstarch, section 3.3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.plan import GENERATOR, LLM
from trainer.pipeline.topology import PipelineTopology


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """Of the positions of one unit: its stages, chunk after chunk, in the order in which a microbatch passes them."""

    frozen: bool
    """Whether none of the unit's layers learns."""
    projects: bool
    """Whether a projector that learns stands at the unit's end."""
    behind_learners: bool
    """Whether anything learns in the units in front."""
    num_positions: int

    @classmethod
    def of(cls, topology: PipelineTopology, unit: str) -> GradientFlow:
        here = topology.units[unit]
        return cls(
            frozen=here.frozen,
            projects=_projects(topology, unit),
            behind_learners=any(_learns(topology, other) for other in _in_front(topology, unit)),
            num_positions=here.pp * topology.chunks,
        )

    def leaves(self, position: int) -> bool:
        """Whether gradients of what came in are sent back to where it came from."""
        return self.behind_learners or (position > 0 and not self.frozen)

    def enters(self, position: int) -> bool:
        """Whether the position has a backward at all."""
        return self.leaves(position) or not self.frozen or (self.projects and position == self.num_positions - 1)


def learns(topology: PipelineTopology, unit: str) -> bool:
    """Whether a unit takes gradients of what it hands over."""
    return _learns(topology, unit) or GradientFlow.of(topology, unit).behind_learners


def _learns(topology: PipelineTopology, unit: str) -> bool:
    return not topology.units[unit].frozen or _projects(topology, unit)


def _projects(topology: PipelineTopology, unit: str) -> bool:
    is_last = unit == (GENERATOR if GENERATOR in topology.units else LLM)
    return not is_last and not topology.units[unit].frozen_projector


def _in_front(topology: PipelineTopology, unit: str) -> list[str]:
    if unit == GENERATOR:
        return [other for other in topology.units if other != GENERATOR]
    return [other for other in topology.units if other not in (LLM, GENERATOR)] if unit == LLM else []
