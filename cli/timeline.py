"""The picture that shows what planning is worth: one global batch in arrival order above the same batch as planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from headrace.plan import Predicted, StepPlan
from headrace.schedule import Kind
from reorder_service.planning.simulator import Timeline, Work, simulate, timeline

_MAX_ROWS = 16  # stage rows of one panel; beyond that the slowest replicas stand for all
_WIDTH_IN, _ROW_IN, _PANEL_EXTRA_IN, _MARGIN_IN = 13.0, 0.27, 0.75, 1.3
_LEFT, _RIGHT = 0.105, 0.985
_ROW_FILL = 0.86  # height of a box; the rest separates the rows
_REPLICA_GAP = 0.55
_INK, _QUIET, _IDLE, _SAVED = "#22303c", "#66757f", "#e9edf0", "#dff3e4"
# (forward, backward) of the units in pipeline order: the strong colour and its tint
_COLOURS = (("#12807a", "#93d1cb"), ("#d1603d", "#f5bfa8"), ("#6a4c93", "#c8b6e2"), ("#3a6ea5", "#b3cde8"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Panel:
    """One plan, ready to be drawn."""

    plan: StepPlan
    predicted: Predicted
    timeline: Timeline
    replicas: list[int]
    """Those that are drawn, from the top."""

    @classmethod
    def of(cls, plan: StepPlan, sample_ids: NDArray[np.int64], costs: Mapping[str, NDArray[np.float64]]) -> _Panel:
        work = Work.of_plan(plan, sample_ids, costs)
        actions = timeline(work)
        ends = np.zeros(plan.topology.replicas)
        np.maximum.at(ends, actions.replica, actions.end_s)
        most = max(1, _MAX_ROWS // plan.topology.num_stages)
        slowest = np.argsort(-ends, kind="stable")[:most]
        return cls(plan=plan, predicted=simulate(work), timeline=actions, replicas=sorted(slowest.tolist()))

    @property
    def height_in(self) -> float:
        rows = len(self.replicas) * (self.plan.topology.num_stages + _REPLICA_GAP)
        return rows * _ROW_IN + _PANEL_EXTRA_IN

    @property
    def stage_names(self) -> list[str]:
        stages = self.plan.topology.stages
        return [unit if n == 1 else f"{unit} {i + 1}" for unit, n in stages.items() for i in range(n)]

    @property
    def unit_of_stage(self) -> list[int]:
        return [u for u, n in enumerate(self.plan.topology.stages.values()) for _ in range(n)]


def draw_comparison(
    out: Path,
    arrival: StepPlan,
    planned: StepPlan,
    sample_ids: NDArray[np.int64],
    costs: Mapping[str, NDArray[np.float64]],
    *,
    title: str,
) -> Path:
    """Write a PNG with the simulated pipelines of two plans of one global batch on one time axis; returns `out`.

    sample_ids: (n,) of the batch, in the order of the cost columns (n,), forward seconds per unit. The plans' own
    predictions are not read: both panels come from the same simulation.
    """
    panels = [_Panel.of(plan, sample_ids, costs) for plan in (arrival, planned)]
    height = sum(panel.height_in for panel in panels) + _MARGIN_IN
    figure = Figure(figsize=(_WIDTH_IN, height), facecolor="white")
    FigureCanvasAgg(figure)
    end_s = max(panel.predicted.iteration_s for panel in panels) or 1.0
    scale, unit = _time_unit(end_s)
    top = height - 0.8
    for index, panel in enumerate(panels):
        bottom = top - panel.height_in + 0.45
        axes = figure.add_axes((_LEFT, bottom / height, _RIGHT - _LEFT, (panel.height_in - 0.72) / height))
        axes.set_xlim(0, end_s * scale * 1.012)
        _draw_panel(axes, panel, scale)
        headline = "Arrival order" if index == 0 else f"As planned ({panel.plan.strategy})"
        _write_headline(axes, headline, panel, scale, unit)
        if index == 1:
            _mark_gain(axes, panels[0].predicted, panel.predicted, scale, unit)
            axes.set_xlabel(f"time since the start of the step ({unit})", color=_QUIET, fontsize=9)
        top -= panel.height_in
    _write_frame(figure, panels, title, height)
    figure.savefig(out, dpi=130)
    return out


def _draw_panel(axes: Axes, panel: _Panel, scale: float) -> None:
    names, units = panel.stage_names, panel.unit_of_stage
    width_s = axes.get_xlim()[1]
    rows = {(r, s): i * (len(names) + _REPLICA_GAP) + s for i, r in enumerate(panel.replicas) for s in range(len(names))}
    iteration = panel.predicted.iteration_s * scale
    for row in rows.values():
        axes.add_patch(Rectangle((0, row - _ROW_FILL / 2), iteration, _ROW_FILL, facecolor=_IDLE, edgecolor="none"))
    for replica, stage, microbatch, kind, start, end in _actions(panel.timeline):
        if replica not in panel.replicas or end <= start:
            continue
        row, length = rows[replica, stage], (end - start) * scale
        colour = _COLOURS[units[stage] % len(_COLOURS)][kind]
        box = (start * scale, row - _ROW_FILL / 2)
        axes.add_patch(Rectangle(box, length, _ROW_FILL, facecolor=colour, edgecolor="white", linewidth=0.7))
        label, length_in = str(microbatch + 1), length / width_s * _WIDTH_IN * (_RIGHT - _LEFT)
        if length_in > 0.085 * len(label) + 0.03:
            ink = "white" if kind == Kind.FORWARD else _INK
            axes.text(box[0] + length / 2, row, label, ha="center", va="center_baseline", fontsize=8, color=ink)
    axes.set_ylim(max(rows.values()) + 0.6, -0.6)
    axes.set_yticks(list(rows.values()), names * len(panel.replicas), fontsize=8, color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=_QUIET, labelsize=8)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
    for replica in panel.replicas:
        middle = (rows[replica, 0] + rows[replica, len(names) - 1]) / 2
        axes.annotate(
            f"replica {replica + 1}", (0, middle), (-66, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            rotation=90, ha="center", va="center", fontsize=9, color=_QUIET,
        )  # fmt: skip


def _actions(actions: Timeline) -> Iterator[tuple[int, int, int, int, float, float]]:
    columns = (actions.replica, actions.stage, actions.microbatch, actions.kind, actions.start_s, actions.end_s)
    return zip(*(column.tolist() for column in columns), strict=True)


def _write_headline(axes: Axes, headline: str, panel: _Panel, scale: float, unit: str) -> None:
    predicted = panel.predicted
    figures = f"{predicted.iteration_s * scale:.3g} {unit} per step, stages idle {predicted.bubble:.0%} of the time"
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axes.annotate(headline, (0, 1), (0, 5), fontsize=11.5, fontweight="bold", color=_INK, **place)
    axes.annotate(figures, (0, 1), (205, 5), fontsize=11, color=_INK, **place)
    drawn, replicas = len(panel.replicas), panel.plan.topology.replicas
    if drawn < replicas:
        note = f"the slowest {drawn} of {replicas} replicas" if drawn > 1 else f"the slowest of {replicas} replicas"
        axes.annotate(note, (1, 1), (0, 5), ha="right", fontsize=9, color=_QUIET, **place)


def _mark_gain(axes: Axes, arrival: Predicted, planned: Predicted, scale: float, unit: str) -> None:
    saved = (arrival.iteration_s - planned.iteration_s) * scale
    if saved <= 0:
        return
    start = planned.iteration_s * scale
    axes.axvspan(start, start + saved, facecolor=_SAVED, edgecolor="none", zorder=0)
    if saved / axes.get_xlim()[1] > 0.055:
        low, high = axes.get_ylim()
        axes.text(
            start + saved / 2, (low + high) / 2, f"saved\n{saved:.2g} {unit}", ha="center", va="center", fontsize=10,
            fontweight="bold", color="#2b7a43",
        )  # fmt: skip


def _write_frame(figure: Figure, panels: list[_Panel], title: str, height: float) -> None:
    before, after = (panel.predicted.iteration_s for panel in panels)
    gain = f"{before / after:.2f} x faster" if 0 < after < before else "no gain on this batch"
    figure.text(0.012, 1 - 0.17 / height, title, fontsize=14, fontweight="bold", color=_INK, va="top")
    subtitle = (
        "Each row is one pipeline stage over time, the numbers are microbatches; the step ends when the slowest replica is done. "
        "Times are estimated from FLOPs, not measured."
    )
    figure.text(0.012, 1 - 0.47 / height, subtitle, fontsize=10, color=_QUIET, va="top")
    figure.text(_RIGHT, 1 - 0.17 / height, gain, fontsize=14, fontweight="bold", color="#2b7a43", va="top", ha="right")
    handles = [
        Patch(facecolor=_COLOURS[u % len(_COLOURS)][kind], label=f"{unit} {'forward' if kind == 0 else 'backward'}")
        for u, unit in enumerate(panels[0].plan.topology.stages)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.005, 0.02 / height), ncols=len(handles), frameon=False,
        fontsize=9, labelcolor=_INK, handlelength=1.3, columnspacing=1.3,
    )  # fmt: skip


def _time_unit(longest_s: float) -> tuple[float, str]:
    """(factor, name) of the unit in which the longest time reads well."""
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if longest_s * factor >= 1:
            return factor, name
    return 1e9, "ns"
