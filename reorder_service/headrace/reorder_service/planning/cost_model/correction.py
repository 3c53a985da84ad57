"""Corrections of estimated costs, fitted to what a job's trainers have measured.

Estimated seconds are off by what they leave out: the speed of the machine, the share of it that each unit reaches, and what every
microbatch costs whatever is in it, such as launching kernels. So each unit and each kind of action gets a line of its own:
measured seconds = scale x estimated forward seconds + seconds a microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from headrace.reorder_service.planning.batch import Floats
from headrace.reorder_service.planning.cost_model.least_squares import least_squares
from headrace.reorder_service.planning.execution import Execution
from headrace.schedule import Kind

MOST_CONSTANT = 0.9  # share of the mean measurement that may be taken for the constant of a line
_OUTLYING = 3.0  # robust standard deviations from which on a measurement is left out of a fit
_NORMAL = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_ROUNDS = 4  # of leaving out outliers, or of telling anew which rank is the slowest
_LARGEST_FACTOR = 1e3  # of a backward over its forward: beyond that a forward was not measured
_LEAST_SCALE, _MOST_SCALE = 1e-9, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCorrection:
    """The lines of a unit; each sequence is indexed by `headrace.schedule.Kind`."""

    scale: Sequence[float]
    """Measured seconds over estimated forward seconds; 0 for a kind of action that the unit does not have."""
    microbatch_s: Sequence[float] = (0.0, 0.0, 0.0)
    """Seconds that a microbatch takes besides, in all stages of the unit together."""
    stages: Sequence[Sequence[float]] = ()
    """Seconds of each stage over an even share, one entry a kind; empty: all stages are even."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What the costs of a job's plans are corrected by; without units, by nothing."""

    units: Mapping[str, UnitCorrection] = field(default_factory=dict)
    unexplained_s: float = 0.0
    """Seconds that a step takes longer than its plan, such as those of the optimizer and of messages."""

    def to_document(self) -> dict[str, Any]:
        """Return the correction as plain data, from which `from_document` makes an equal one."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Correction:
        """Return the correction in a document of `to_document`. Fields that a newer release has added are left out."""
        known = UnitCorrection.__dataclass_fields__
        units = {
            unit: UnitCorrection(**{name: values for name, values in lines.items() if name in known})
            for unit, lines in document["units"].items()
        }
        return cls(units=units, unexplained_s=document["unexplained_s"])

    def seconds(self, estimated: Mapping[str, Floats]) -> dict[str, Floats]:
        """Return the (n,) forward seconds of the samples in each unit, corrected.

        A unit that was not measured goes by the mean of the others, so that all are in seconds of the same machine.
        """
        measured = [lines.scale[Kind.FORWARD] for lines in self.units.values()]
        mean = math.exp(sum(map(math.log, measured)) / len(measured)) if measured else 1.0
        return {
            unit: (self.units[unit].scale[Kind.FORWARD] if unit in self.units else mean) * seconds
            for unit, seconds in estimated.items()
        }

    def execution(self, execution: Execution) -> Execution:
        """Return the execution with the measured backward factors, and with what every microbatch takes."""
        factors, weights = dict(execution.backward_factors), dict(execution.weight_gradient_factors)
        for unit, lines in self.units.items():
            forward, backward, of_weights = lines.scale
            factors[unit] = (backward + of_weights) / forward
            weights[unit] = of_weights / forward
        fixed = {**execution.microbatch_s, **{unit: tuple(lines.microbatch_s) for unit, lines in self.units.items()}}
        stages = {unit: lines.stages for unit, lines in self.units.items() if lines.stages}
        return replace(
            execution, backward_factors=factors, weight_gradient_factors=weights, microbatch_s=fixed, stage_loads=stages
        )


UNCORRECTED = Correction()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """Measurements of one unit and kind in one step: of one action each, or of several that are added up."""

    estimated_s: Floats
    """(m,) estimated forward seconds of the samples."""
    actions: Floats
    """(m,) number of actions."""
    measured_s: Floats
    """(m,) measured seconds in all stages."""
    stage_s: Floats
    """(S,) measured seconds of each stage of the unit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """Measurements of ranks that have all units, in one step."""

    estimated_s: Floats
    """(D, K, U) estimated forward and backward seconds of each rank's microbatches."""
    measured_s: Floats
    """(D, K) measured seconds; NaN where none were."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """What the trainers have measured of one step: by unit, or where every rank has all units, by rank."""

    units: Mapping[tuple[str, Kind], Line] = field(default_factory=dict)
    ranks: Ranks | None = None


def fit(observed: Sequence[Observation], execution: Execution, units: Sequence[str]) -> Correction:
    """Fit a correction to at least one step; it has no units if nothing was measured.

    execution: the uncorrected one, from which ranks with all units keep the ratio of backward to forward. units: the axis of
    `Ranks.estimated_s`.
    """
    ranks = [one.ranks for one in observed if one.ranks is not None]
    if ranks:
        scales = _fit_ranks(ranks, meet_at_microbatches=execution.colocated == "microbatch")
        lines = {
            unit: UnitCorrection(scale=(scale, scale * execution.backward_factor(unit), 0.0))
            for unit, scale in zip(units, scales.tolist(), strict=True)
            if scale > 0
        }
        return Correction(units=lines)
    measured: dict[str, UnitCorrection] = {}
    for unit in units:
        of_kinds = [[one.units[unit, kind] for one in observed if (unit, kind) in one.units] for kind in Kind]
        scale, fixed = zip(*map(_fit_line, of_kinds), strict=True)
        if _LEAST_SCALE < scale[Kind.FORWARD] < _MOST_SCALE and sum(scale) <= _LARGEST_FACTOR * scale[Kind.FORWARD]:
            measured[unit] = UnitCorrection(scale=scale, microbatch_s=fixed, stages=_stage_loads(of_kinds))
    return Correction(units=measured)


def _fit_line(lines: Sequence[Line]) -> tuple[float, float]:
    """Return the slope and the constant of an action, by least squares without outliers; zeros if nothing was measured.

    Neither is negative, and the constant is not more than MOST_CONSTANT of the mean: where all microbatches are nearly of one
    size, the slope would otherwise be anything.
    """
    if not lines:
        return 0.0, 0.0
    x, n, y = (np.concatenate([getattr(line, name) for line in lines]) for name in ("estimated_s", "actions", "measured_s"))
    x, y, known = x / n, y / n, (n > 0) & np.isfinite(y) & (y > 0) & (x > 0)
    x, n, y = x[known], n[known], y[known]
    if not x.size:
        return 0.0, 0.0
    keep, slope, constant = np.ones(x.size, np.bool_), 0.0, 0.0
    for _ in range(_ROUNDS):
        slope, constant = _least_squares(x[keep], y[keep], n[keep])
        keep = _inliers(y - slope * x - constant, floor=0.01 * float(np.median(y)))
    return slope, constant


def _stage_loads(of_kinds: Sequence[Sequence[Line]]) -> list[list[float]]:
    """Return the seconds of each stage of a unit over an even share, one entry a kind: the medians of all steps."""
    num_stages = max(line.stage_s.size for lines in of_kinds for line in lines)
    loads = np.ones((num_stages, len(of_kinds)))
    for kind, lines in enumerate(of_kinds):
        shares = [line.stage_s / line.stage_s.mean() for line in lines if line.stage_s.sum() > 0]
        median = np.median(shares, axis=0) if shares else np.zeros(1)
        if median.sum() > 0:
            loads[:, kind] = median / median.mean()
    result: list[list[float]] = loads.tolist()
    return result


def _least_squares(x: Floats, y: Floats, weights: Floats) -> tuple[float, float]:
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    spread = float(np.average((x - mean_x) ** 2, weights=weights))
    slope = float(np.average((x - mean_x) * (y - mean_y), weights=weights)) / spread if spread > 0 else math.inf
    constant = min(max(0.0, float(mean_y - slope * mean_x)), MOST_CONSTANT * float(mean_y))
    return float((mean_y - constant) / mean_x), constant


def _inliers(residuals: Floats, floor: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    middle = np.median(residuals)
    deviation = _NORMAL * float(np.median(np.abs(residuals - middle)))
    kept: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.abs(residuals - middle) <= _OUTLYING * max(deviation, floor)
    return kept


def _fit_ranks(ranks: Sequence[Ranks], *, meet_at_microbatches: bool) -> Floats:
    """Return the (U,) scales of the units, by non-negative least squares on the sum of all units.

    Where ranks meet at every microbatch, each of them measures the slowest one: the fit asks which one that was by the scales
    that it found before.
    """
    num_units = ranks[0].estimated_s.shape[2]
    scales = np.ones(num_units)
    for _ in range(_ROUNDS):
        rows = list(_rows(ranks, scales, meet_at_microbatches=meet_at_microbatches))
        x, y = np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows])
        known = np.isfinite(y) & (y > 0) & (x.sum(axis=1) > 0)
        if not known.any():
            return np.zeros(num_units)
        x, y = x[known], y[known]
        size = x.mean(axis=0)
        size[size == 0] = 1.0
        keep = np.ones(y.size, np.bool_)
        for _ in range(_ROUNDS):
            scales = least_squares(x[keep] / size, y[keep]) / size
            keep = _inliers(y - x @ scales, floor=0.01 * float(np.median(y)))
    return scales


def _rows(ranks: Sequence[Ranks], scales: Floats, *, meet_at_microbatches: bool) -> Iterable[tuple[Floats, Floats]]:
    """Yield (m, U) estimated and (m,) measured seconds of each step."""
    for one in ranks:
        if not meet_at_microbatches:
            yield one.estimated_s.reshape(-1, one.estimated_s.shape[2]), one.measured_s.ravel()
            continue
        slowest = (one.estimated_s @ scales).argmax(axis=0)
        yield one.estimated_s[slowest, np.arange(slowest.size)], np.min(one.measured_s, axis=0)
