"""Which stages compute and send gradients: frozen layers skip backwards that nobody needs (Cornstarch, section 3.3.1)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from headrace.backward_factors import in_front
from headrace.trainer.pipeline.topology import PipelineTopology


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """Which parts of one unit have a backward, and which send gradients back.

    A part's position is its place among the `PipelineTopology.num_parts` parts, in the order in which a sample passes them.
    """

    first_trainable: int
    """The first position with a trainable layer; `num_parts` if the unit is frozen."""
    has_trainable_projector: bool
    """Whether the unit ends in a trainable projector."""
    has_trainable_upstream: bool
    """Whether anything is trainable in the upstream units."""
    num_parts: int

    @classmethod
    def of(cls, topology: PipelineTopology, unit: str) -> GradientFlow:
        """Return the gradient flow of one unit of a topology, whose cuts must be given if it has frozen layers."""
        return cls(
            first_trainable=_first_trainable(topology, unit),
            has_trainable_projector=_has_trainable_projector(topology, unit),
            has_trainable_upstream=has_trainable_upstream(topology, unit),
            num_parts=topology.num_parts(unit),
        )

    def sends_gradient(self, position: int) -> bool:
        """Whether the position sends the gradients of its inputs back to where the inputs came from."""
        return self.has_trainable_upstream or position > self.first_trainable

    def has_backward(self, position: int) -> bool:
        """Whether the position has a backward at all: something in it or upstream of it is trainable."""
        is_projecting = self.has_trainable_projector and position == self.num_parts - 1
        return self.sends_gradient(position) or self.has_weights(position) or is_projecting

    def has_weights(self, position: int) -> bool:
        """Whether the position has trainable weights, besides a projector: from the first on, all positions have."""
        return position >= self.first_trainable


def needs_output_gradient(topology: PipelineTopology, unit: str) -> bool:
    """Whether a unit takes gradients of its outputs: something in it or upstream of it is trainable."""
    return _is_trainable(topology, unit) or has_trainable_upstream(topology, unit)


def has_trainable_upstream(topology: PipelineTopology, unit: str) -> bool:
    """Whether anything is trainable in the units whose outputs reach this one."""
    return any(_is_trainable(topology, other) for other in in_front(unit, topology.units))


def _first_trainable(topology: PipelineTopology, unit: str) -> int:
    size = topology.units[unit]
    if size.frozen:
        return topology.num_parts(unit)
    if not size.frozen_layers or topology.num_parts(unit) == 1:
        return 0
    assert size.cuts is not None, "layer_partition.with_cuts gives them"
    return bisect_right(size.cuts, size.frozen_layers)


def _is_trainable(topology: PipelineTopology, unit: str) -> bool:
    return not topology.units[unit].frozen or _has_trainable_projector(topology, unit)


def _has_trainable_projector(topology: PipelineTopology, unit: str) -> bool:
    is_last = unit == list(topology.units)[-1]
    return not is_last and not topology.units[unit].frozen_projector
