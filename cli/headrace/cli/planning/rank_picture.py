"""The picture of a plan for ranks that have all units: what their microbatches take, and where they wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from headrace.cli.planning.pipeline_panel import IDLE, INK, QUIET, ROW_FILL, add_boxes, unit_colour
from headrace.cli.planning.strategy_picture import (
    BARS,
    HEAD_IN,
    ROW_IN,
    TIMES,
    new_figure,
    place,
    save,
    style_bars,
    write_head,
    write_legend,
)
from headrace.cli.planning.timeline import UNKNOWN, mark_gain, time_unit
from headrace.plan import Predicted
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.simulation.phase_step import AFTER_PHASES
from headrace.reorder_service.planning.simulation.prediction import predict_step
from headrace.schedule import Kind

_MOST_RANKS = 12
_FOOT_IN = 0.45
_POINTS_PER_NUMBER = 9.0  # width that a number takes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankStep:
    """What R ranks with all units do in a step of K microbatches: in each, the U units forward, and backward in reverse."""

    batch: Batch
    predicted: Predicted
    loads: Floats
    """(R, K, U) forward time of every microbatch."""

    @classmethod
    def of(cls, batch: Batch, slots: Slots) -> RankStep:
        """Simulate a plan of a batch whose execution is one of `colocated`: (U, n) slots."""
        return cls(batch=batch, predicted=predict_step(batch, slots), loads=batch.loads(slots))

    def passes(self) -> list[tuple[int, int, Kind, Floats, Floats]]:
        """Return all passes in order: the microbatch, the unit, the kind, and the (R,) start and duration on every rank."""
        units = range(len(self.batch.units))
        order = [(u, Kind.FORWARD, 1.0) for u in units]
        order += [(u, Kind.BACKWARD, float(self.batch.step_factors[u]) - 1.0) for u in reversed(units)]
        clock = np.zeros(self.loads.shape[0])
        passes = []
        for k in range(self.loads.shape[1]):
            for u, kind, factor in order:
                lasts = self.loads[:, k, u] * factor
                passes.append((k, u, kind, clock.copy(), lasts))
                clock = clock + lasts
                if self.batch.execution.colocated == AFTER_PHASES:
                    clock[:] = clock.max()
            clock[:] = clock.max()
        return passes

    def shown(self) -> Ints:
        """Return the ranks to draw: all, or of many those with the most work."""
        work = (self.loads.sum(axis=1) * self.batch.step_factors).sum(axis=1)
        busiest: Ints = np.sort(np.argsort(-work, kind="stable")[:_MOST_RANKS])
        return busiest


def draw_ranks(out: Path, steps: Mapping[str, RankStep], *, title: str, subtitle: str, seconds: bool) -> Path:
    """Write a PNG with one plan above the one that is to be compared with it; return `out`.

    steps: two, by headline, of the same batch. seconds: whether costs are seconds; otherwise they are in a unit of their own.
    """
    longest = max(step.predicted.iteration_s for step in steps.values()) or 1.0
    scale, unit = time_unit(longest) if seconds else (1.0, "")
    ranks = next(iter(steps.values())).loads.shape[0]
    axes_in = (min(ranks, _MOST_RANKS) + 0.2) * ROW_IN
    each_in = HEAD_IN + axes_in + _FOOT_IN
    heaviest = max(float((step.loads * step.batch.step_factors).sum(axis=2).max()) for step in steps.values()) * scale or 1.0
    figure, height, top_in = new_figure(each_in * len(steps), title, subtitle)
    for name, step in steps.items():
        shown = step.shown()
        axes = figure.add_axes(place(height, top_in, axes_in, TIMES))
        _draw_turns(axes, step, shown, scale, longest * scale)
        bars = figure.add_axes(place(height, top_in, axes_in, BARS))
        _draw_work(bars, step, shown, scale, heaviest)
        some = f"; the busiest {shown.size} of {ranks} ranks" if shown.size < ranks else ""
        figures = f"{step.predicted.iteration_s * scale:.3g} {unit}".rstrip()
        write_head(figure, 1 - (top_in + 0.04) / height, name, f"{figures} a step, ranks idle {step.predicted.bubble:.0%}{some}")
        top_in += each_in
    first, *_ = of_plans = list(steps.values())
    mark_gain(axes, first.predicted, of_plans[-1].predicted, scale, unit)
    axes.set_xlabel(f"time since the start of the step ({unit or UNKNOWN})", color=QUIET, fontsize=8.5)
    bars.set_xlabel(f"a microbatch's work ({unit or UNKNOWN})", color=QUIET, fontsize=8.5, labelpad=1)
    handles = [
        Patch(facecolor=unit_colour(u, kind), label=f"{name} {kind.name.lower()}")
        for u, name in enumerate(first.batch.units)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    write_legend(figure, [*handles, Patch(facecolor=IDLE, label="idle")])
    return save(figure, out)


def _draw_turns(axes: Axes, step: RankStep, shown: Ints, scale: float, end: float) -> None:
    axes.set_xlim(0, end * 1.012)
    axes.set_ylim(shown.size - 0.4, -0.6)
    rows = np.arange(shown.size, dtype=np.float64)
    whole = np.full_like(rows, step.predicted.iteration_s * scale)
    add_boxes(axes, np.zeros_like(rows), whole, rows, facecolors=IDLE)
    points = axes.bbox.width / axes.figure.dpi * 72 / axes.get_xlim()[1]
    for k, u, kind, start, lasts in step.passes():
        start_s, width = start[shown] * scale, lasts[shown] * scale
        add_boxes(axes, start_s, width, rows, facecolors=unit_colour(u, kind), edgecolors="white", linewidths=0.5)
        for row in np.flatnonzero(width * points > _POINTS_PER_NUMBER).tolist():
            ink = INK if kind == Kind.BACKWARD else "white"
            x = float(start_s[row] + width[row] / 2)
            axes.text(x, row, str(k), ha="center", va="center_baseline", fontsize=7.5, color=ink)
    axes.set_yticks(rows.tolist(), [f"rank {rank}" for rank in shown.tolist()], fontsize=8, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=QUIET, labelsize=8)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)


def _draw_work(axes: Axes, step: RankStep, shown: Ints, scale: float, heaviest: float) -> None:
    """Draw a bar for each microbatch of each rank, one below the other, in which the units' forwards and backwards are added."""
    work = step.loads[shown] * step.batch.step_factors * scale
    _, microbatches, units = work.shape
    thick = ROW_FILL / microbatches
    for k in range(microbatches):
        y = np.arange(shown.size) - ROW_FILL / 2 + (k + 0.5) * thick
        left = np.zeros(shown.size)
        for u in range(units):
            axes.barh(y, work[:, k, u], thick * 0.86, left=left, color=unit_colour(u, Kind.FORWARD))
            left = left + work[:, k, u]
    axes.set_ylim(shown.size - 0.4, -0.6)
    axes.set_xlim(0, heaviest * 1.06)
    axes.set_yticks([])
    style_bars(axes)
