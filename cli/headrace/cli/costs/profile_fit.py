"""From measured times of a model's layers to its cost coefficients, and how far the fitted curves lie from the times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from headrace.backward_factors import BackwardTimes
from headrace.errors import UserError
from headrace.plan import LLM

if TYPE_CHECKING:
    from headrace.cli.costs.stage_fit import FittedStage
    from headrace.reorder_service.planning.cost_model.coefficients import LayerCost
    from headrace.reorder_service.planning.cost_model.measured_costs import PartCosts
    from headrace.trainer.profiling.layer_times import KindTimes

_HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedKind:
    """The times of one kind of layer, with the curve through its forward times."""

    times: KindTimes
    cost: LayerCost

    @classmethod
    def of(cls, times: KindTimes) -> FittedKind:
        """Fit the forward times. Raises UserError for fewer than 3 different numbers of positions."""
        from headrace.reorder_service.planning.cost_model.coefficients import fit

        try:
            return cls(times=times, cost=fit(times.positions, times.forward_s))
        except ValueError as err:
            raise UserError(f"{times.part} {times.name}: {err}; give other --tokens") from err

    @property
    def fitted_s(self) -> tuple[float, ...]:
        """The fitted forward seconds at each measured number of positions."""
        return tuple(self.cost.seconds(positions) for positions in self.times.positions)

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative error of the fitted seconds at each measured number of positions."""
        return tuple(fitted / measured - 1 for fitted, measured in zip(self.fitted_s, self.times.forward_s, strict=True))


def worst(kinds: Iterable[FittedKind]) -> float:
    """Return the largest relative error of any kind, without its sign."""
    return max(abs(error) for kind in kinds for error in kind.errors)


def worst_of_units(kinds: Sequence[FittedKind]) -> float:
    """Return the largest relative error, without its sign, of a whole unit: all its layers, at any width, and its ends."""
    errors = []
    for part, tp in {(kind.times.part, kind.times.tp) for kind in kinds if kind.times.layers}:
        of_unit = [kind for kind in kinds if kind.times.part == part and (kind.times.tp == tp or not kind.times.layers)]
        fitted, measured = (_sums(of_unit, pick) for pick in (lambda kind: kind.fitted_s, lambda kind: kind.times.forward_s))
        errors += [abs(total / whole - 1) for total, whole in zip(fitted, measured, strict=True)]
    return max(errors)


def _sums(kinds: Iterable[FittedKind], pick: Callable[[FittedKind], Sequence[float]]) -> list[float]:
    """Return the sums of what `pick` returns over all layers and ends, by number of positions."""
    columns = [[max(1, len(kind.times.layers)) * seconds for seconds in pick(kind)] for kind in kinds]
    return [sum(row) for row in zip(*columns, strict=True)]


def part_costs(kinds: Sequence[FittedKind], tp: int = 1) -> PartCosts:
    """Return the costs of one part of a model at a tensor-parallel width, from all kinds of this part."""
    from headrace.reorder_service.planning.cost_model.coefficients import TARGETS
    from headrace.reorder_service.planning.cost_model.measured_costs import PartCosts

    layers = [kind for kind in kinds if kind.times.layers and kind.times.tp == tp]
    heads = [kind for kind in kinds if kind.times.part == LLM and kind.times.name == _HEAD]
    ends = [kind for kind in kinds if not kind.times.layers and kind not in heads]
    by_index = {index: kind.cost for kind in layers for index in kind.times.layers}
    backward = _backward([*layers, *ends])
    by_name = {kind.times.name: kind.cost for kind in ends}
    for head in heads:
        by_name[TARGETS] = _of_targets(head.times, backward)
    return PartCosts(
        layers=tuple(by_index[index] for index in sorted(by_index)),
        ends=by_name,
        backward=backward,
        tp=tp,
    )


def _of_targets(head: KindTimes, backward: BackwardTimes) -> LayerCost:
    """Return the cost of the LLM's head by tokens that carry loss, for which alone it computes anything.

    Its gradients are computed with the loss, in the forward, and there is one ratio of backward to forward for the whole unit: so
    its cost is what with this ratio comes to its forward and backward together.
    """
    from headrace.reorder_service.planning.cost_model.coefficients import fit

    both = zip(head.forward_s, head.input_gradients_s, head.weight_gradients_s, strict=True)
    whole = fit(head.positions, [sum(seconds) for seconds in both])
    return whole.scaled(1.0 / (1.0 + backward.input_gradients + backward.weight_gradients))


def _backward(kinds: Sequence[FittedKind]) -> BackwardTimes:
    """Return the times of the backward of all layers and ends over those of their forward: medians over positions."""
    forward = _sums(kinds, lambda kind: kind.times.forward_s)

    def ratio(pick: Callable[[FittedKind], Sequence[float]]) -> float:
        return median(part / whole for part, whole in zip(_sums(kinds, pick), forward, strict=True))

    return BackwardTimes(
        input_gradients=ratio(lambda kind: kind.times.input_gradients_s),
        weight_gradients=ratio(lambda kind: kind.times.weight_gradients_s),
        rerun=ratio(lambda kind: kind.times.rerun_s),
    )


def profile_document(
    head: Mapping[str, Any], kinds: Iterable[FittedKind], widths: Sequence[int], stages: Mapping[str, FittedStage] | None = None
) -> dict[str, Any]:
    """Return the content of a coefficients file: the first of the widths as the parts' own, the others as their `slices`.

    stages: what whole stages of parts say of their layers, by part.
    """
    from headrace.reorder_service.planning.cost_model.coefficients_document import entry_of

    parts: dict[str, list[FittedKind]] = {}
    for kind in kinds:
        parts.setdefault(kind.times.part, []).append(kind)
    units = {}
    for part, of_part in parts.items():
        costs = [part_costs(of_part, width) for width in widths]
        if stages and part in stages:
            costs = [stages[part].applied_to(of_width) for of_width in costs]
        own, *others = costs
        units[part] = entry_of(own) | ({"tp": own.tp} if own.tp > 1 else {})
        if others:
            units[part]["slices"] = {str(of_width.tp): entry_of(of_width) for of_width in others}
    return {**head, "units": units}
