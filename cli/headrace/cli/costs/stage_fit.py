"""What whole stages say of the costs of a part's layers: how far they are off in a stage, and what a microbatch and a step take
besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.reorder_service.planning.cost_model.measured_costs import PartCosts
    from headrace.trainer.profiling.profiled_batch import BatchShape
    from headrace.trainer.profiling.stage_times import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStage:
    """The times of a part's stage, with lines through them: a multiple of what its layers were estimated at, and a constant."""

    times: StageTimes
    forward: tuple[float, float]
    """Slope of the forward's line, and its constant: seconds of a microbatch besides those of its samples."""
    backward: tuple[float, float]
    errors: tuple[float, ...]
    """Relative error of what the lines say of forward and backward together, for each microbatch."""

    @classmethod
    def of(cls, times: StageTimes, costs: PartCosts) -> FittedStage:
        """Fit the lines. costs: of the part, at width 1, from its layers and ends alone."""
        from headrace.reorder_service.planning.cost_model.line_fit import fit_line

        factor = costs.backward.input_gradients + costs.backward.weight_gradients
        estimated_s = [_estimated_s(shape, costs, times.layers) for shape in times.shapes]
        measured_s = [one.value for one in times.forward_s], [one.value for one in times.backward_s]
        forward = fit_line(estimated_s, measured_s[0])
        backward = fit_line([factor * seconds for seconds in estimated_s], measured_s[1])
        errors = []
        for seconds, one_s, other_s in zip(estimated_s, *measured_s, strict=True):
            fitted_s = forward[0] * seconds + forward[1] + backward[0] * factor * seconds + backward[1]
            errors.append(fitted_s / (one_s + other_s) - 1.0)
        return cls(times=times, forward=forward, backward=backward, errors=tuple(errors))

    def applied_to(self, costs: PartCosts) -> PartCosts:
        """Return the costs of the part at any width as they are in a stage."""
        (forward, forward_s), (backward, backward_s) = self.forward, self.backward
        times = costs.backward
        return replace(
            costs,
            layers=tuple(layer.scaled(forward) for layer in costs.layers),
            ends={name: end.scaled(forward) for name, end in costs.ends.items()},
            backward=replace(
                times,
                input_gradients=times.input_gradients * backward / forward,
                weight_gradients=times.weight_gradients * backward / forward,
            ),
            microbatch_s=(forward_s, backward_s),
            step_s=(self.times.gradients_s.value, self.times.update_s.value),
        )


def _estimated_s(shape: BatchShape, costs: PartCosts, layers: Sequence[int]) -> float:
    """Return the forward seconds of a microbatch in these layers and all ends that a stage of the part has."""
    from headrace.plan import GENERATOR
    from headrace.reorder_service.planning.cost_model.coefficients import TARGETS, total

    elsewhere = (TARGETS, "projector") if shape.part == GENERATOR else (TARGETS,)  # a generator's projector is on the LLM's ranks
    of_positions = total(
        [*(costs.layers[index] for index in layers), *(end for name, end in costs.ends.items() if name not in elsewhere)]
    )
    seconds = sum(of_positions.seconds(length) for length in shape.lengths)
    if TARGETS in costs.ends:
        seconds += sum(costs.ends[TARGETS].seconds(count) for count in shape.targets if count)
    return seconds
