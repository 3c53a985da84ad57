"""Measured costs of a model: the forward seconds of its layers, and the times of their backward over those of the forward."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from headrace.backward_factors import BackwardTimes
from headrace.model_shape import ModelShape
from headrace.plan import LLM
from headrace.reorder_service.planning.cost_model.coefficients import PARTS, TARGETS, Coefficients, LayerCost, total
from headrace.reorder_service.planning.cost_model.cost import PARTS_OF

BACKWARD_FIELDS = ("input_gradients", "weight_gradients", "rerun")
"""Fields of BackwardTimes."""
_MOST_ENDS = 2  # that a file without `ends` may count among the layers
_TYPICAL_POSITIONS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """The measured costs of one part of a model (see `coefficients.PARTS`), on one slice of it where it is tensor-parallel."""

    layers: tuple[LayerCost, ...]
    """Forward seconds of each layer of the stack, in order."""
    ends: Mapping[str, LayerCost] = field(default_factory=dict)
    """Forward seconds of what stands in front of the layers and behind them, by name: embedding, projector, head.

    The LLM's TARGETS are on the number of tokens that carry loss. Theirs are such that with the unit's backward, as `backward`
    has it, they come to what targets take forward and backward.
    """
    backward: BackwardTimes = field(default_factory=BackwardTimes)
    """Times of the backward of layers and ends together, each over that of their forward."""
    tp: int = 1
    """Number of slices that each layer is cut into."""
    microbatch_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of the forward and of the backward of a microbatch in all layers and ends, besides those of its samples."""
    step_s: tuple[float, float] = (0.0, 0.0)
    """Seconds once a step for all weights: to collect their gradients, which every replica does, and to clip and update, of which
    every replica has its share."""

    @property
    def forward(self) -> LayerCost:
        """The forward seconds of all layers and ends together."""
        return total((*self.layers, *self.ends.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """The measured costs of a model, as `headrace profile` writes them or as the times of a job's steps give them."""

    parts: Mapping[str, PartCosts]
    """Costs by part of the model (`coefficients.PARTS`)."""
    model: str = ""
    """Name of the measured model; empty if it is not known."""
    huggingface: Mapping[str, str] = field(default_factory=dict)
    """Name of the Hugging Face model of each part that is not the named model's own; its layers are not compared with a shape."""
    measured_on: Mapping[str, str] = field(default_factory=dict)
    """How the times were taken, for people to read: the device, the dtype."""

    @property
    def coefficients(self) -> Coefficients:
        """The forward costs of all layers and ends, for `cost.estimate(measured=...)`."""
        found = {
            part: (*costs.layers, *(end for name, end in costs.ends.items() if name != TARGETS))
            for part, costs in self.parts.items()
        }
        has_targets = LLM in self.parts and TARGETS in self.parts[LLM].ends
        return found | {TARGETS: (self.parts[LLM].ends[TARGETS],)} if has_targets else found

    def microbatch_s(self, units: Collection[str], backward_factors: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """Return by unit the seconds of a microbatch besides those of its samples, forward and backward, where there are some.

        backward_factors: of the units as they are trained. A backward that does less or more than the measured one, as that of
        frozen or checkpointed layers, takes as much less or more.
        """
        found = {}
        for unit in units:
            forward_s = backward_s = 0.0
            for costs in (self.parts[part] for part in PARTS_OF[unit] if part in self.parts):
                measured = costs.backward.input_gradients + costs.backward.weight_gradients
                forward_s += costs.microbatch_s[0]
                backward_s += costs.microbatch_s[1] * (backward_factors[unit] / measured if measured > 0 else 0.0)
            if forward_s or backward_s:
                found[unit] = forward_s, backward_s
        return found

    def step_s(self, unit: str) -> tuple[float, float]:
        """Return a unit's seconds once a step, of all its parts together (`PartCosts.step_s`)."""
        of_parts = [self.parts[part].step_s for part in PARTS_OF[unit] if part in self.parts]
        return sum(one for one, _ in of_parts), sum(other for _, other in of_parts)

    def backward_times(self, units: Collection[str]) -> dict[str, BackwardTimes]:
        """Return the measured times of those of `units` that have some, for `backward_factors(measured=...)`.

        The times of unit `encoder` are the means of vision's and audio's, weighted by their forward seconds on 1,024 positions.
        """
        times = {}
        for unit in units:
            parts = [self.parts[part] for part in PARTS_OF[unit] if part in self.parts]
            weights = [costs.forward.seconds(_TYPICAL_POSITIONS) for costs in parts]
            if sum(weights) > 0:
                means = {
                    name: sum(weight * getattr(costs.backward, name) for weight, costs in zip(weights, parts, strict=True))
                    / sum(weights)
                    for name in BACKWARD_FIELDS
                }
                times[unit] = BackwardTimes(**means)
        return times

    def check_model(self, name: str, shape: ModelShape, units: Collection[str] = ()) -> None:
        """Raise ValueError unless these are the costs of a model of that shape, and of all parts of `units`.

        name: of the model, for the error. A part that gives no ends may count up to two among its layers.
        """
        ours = f"the coefficients are of model {self.model!r} and have" if self.model else "the coefficients have"
        remedy = f"measure it with `headrace profile {name}`"
        stacks = {part: shape.units[part] for part in PARTS if part in shape.units}
        for part, costs in self.parts.items():
            if part not in stacks:
                raise ValueError(f"{ours} a part {part!r}, but model {name!r} has only {', '.join(stacks)}: {remedy}")
            if part in self.huggingface:
                continue
            most = stacks[part].layers + (0 if costs.ends else _MOST_ENDS)
            if not stacks[part].layers <= len(costs.layers) <= most:
                raise ValueError(
                    f"{ours} {len(costs.layers)} layers of {part}, but model {name!r} has {stacks[part].layers}: {remedy}"
                )
        lacking = [part for unit in units for part in PARTS_OF[unit] if part not in self.parts]
        if lacking:
            raise ValueError(f"{ours} {', '.join(self.parts)}, but the job's units need {lacking[0]} too: {remedy}")
