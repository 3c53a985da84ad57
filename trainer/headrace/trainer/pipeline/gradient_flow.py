"""Which stages compute and send gradients: frozen units skip backwards that nobody needs (Cornstarch, section 3.3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.backward_factors import in_front
from headrace.trainer.pipeline.topology import PipelineTopology


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """Which parts of one unit have a backward, and which send gradients back.

    A part's position is its place among the `PipelineTopology.num_parts` parts, in the order in which a sample passes them.
    """

    frozen: bool
    """Whether all of the unit's layers are frozen."""
    has_trainable_projector: bool
    """Whether the unit ends in a trainable projector."""
    has_trainable_upstream: bool
    """Whether anything is trainable in the upstream units."""
    num_parts: int

    @classmethod
    def of(cls, topology: PipelineTopology, unit: str) -> GradientFlow:
        """Return the gradient flow of one unit of a topology."""
        here = topology.units[unit]
        return cls(
            frozen=here.frozen,
            has_trainable_projector=_has_trainable_projector(topology, unit),
            has_trainable_upstream=any(_is_trainable(topology, other) for other in in_front(unit, topology.units)),
            num_parts=topology.num_parts(unit),
        )

    def sends_gradient(self, position: int) -> bool:
        """Whether the position sends the gradients of its inputs back to where the inputs came from."""
        return self.has_trainable_upstream or (position > 0 and not self.frozen)

    def has_backward(self, position: int) -> bool:
        """Whether the position has a backward at all: something in it or upstream of it is trainable."""
        return (
            self.sends_gradient(position) or not self.frozen or (self.has_trainable_projector and position == self.num_parts - 1)
        )


def needs_output_gradient(topology: PipelineTopology, unit: str) -> bool:
    """Whether a unit takes gradients of its outputs: something in it or upstream of it is trainable."""
    return _is_trainable(topology, unit) or GradientFlow.of(topology, unit).has_trainable_upstream


def _is_trainable(topology: PipelineTopology, unit: str) -> bool:
    return not topology.units[unit].frozen or _has_trainable_projector(topology, unit)


def _has_trainable_projector(topology: PipelineTopology, unit: str) -> bool:
    is_last = unit == list(topology.units)[-1]
    return not is_last and not topology.units[unit].frozen_projector
