"""Pictures of simulated steps over time: one plan, a plan as predicted and measured, or a batch before and after planning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headrace.cli.planning.outcome import Outcome
from headrace.cli.planning.pipeline_panel import (
    GAIN,
    INK,
    LEFT,
    QUIET,
    RIGHT,
    WIDTH_IN,
    Panel,
    draw_panel,
    legend_handles,
    write_headline,
)
from headrace.plan import Predicted, StepPlan
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.execution import Execution

ARRIVAL = "Arrival order"
_TOP_IN = 0.8
_LEGEND_COLUMNS = 9
_SAVED = "#dff3e4"
_SAVED_IN = 0.55  # width from which on words have room in it
_ESTIMATED = "Simulated, from FLOPs, not measured."
_AXIS, UNKNOWN = "time since the start of the step", "unit of the costs"


def draw_timeline(out: Path, outcome: Outcome, *, end: float, title: str, unit: str = "") -> Path:
    """Write a PNG with the simulated pipelines of one plan; return `out`.

    end: where the time axis ends, in the unit of the costs, so that several pictures can be compared side by side. unit: name of
    that unit, empty if it is not known.
    """
    panel = Panel.of(outcome)
    height = panel.height_in + _TOP_IN + legend_in(panel)
    figure = empty_figure(height, title, f"{panel.reading} Simulated, not measured.")
    axes = _panel_axes(figure, height, _TOP_IN, panel)
    draw_panel(axes, panel, 1.0, end or 1.0)
    write_headline(axes, panel, _name(outcome), _figures(panel, 1.0, unit))
    axes.set_xlabel(f"{_AXIS} ({unit or UNKNOWN})", color=QUIET, fontsize=9)
    write_legend(figure, panel, height)
    figure.savefig(out, dpi=130)
    return out


def draw_measured(out: Path, predicted: Panel, measured: Panel, *, title: str, label: str) -> Path:
    """Write a PNG with a step as predicted above the same step as measured, in seconds; return `out`.

    label: put in front of both headlines, to say if what was measured is not the real thing.
    """
    panels = {f"{label} predicted".lstrip(): predicted, f"{label} measured".lstrip(): measured}
    longest = max(panel.outcome.predicted.iteration_s for panel in panels.values()) or 1.0
    scale, unit = time_unit(longest)
    height = sum(panel.height_in for panel in panels.values()) + _TOP_IN + legend_in(predicted)
    figure, top_in = empty_figure(height, title, predicted.reading), _TOP_IN
    for headline, panel in panels.items():
        axes = _panel_axes(figure, height, top_in, panel)
        draw_panel(axes, panel, scale, longest * scale)
        write_headline(axes, panel, headline, _figures(panel, scale, unit))
        top_in += panel.height_in
    axes.set_xlabel(f"{_AXIS} ({unit})", color=QUIET, fontsize=9)
    write_legend(figure, predicted, height)
    figure.savefig(out, dpi=130)
    return out


def draw_comparison(
    out: Path,
    arrival: StepPlan,
    planned: StepPlan,
    sample_ids: NDArray[np.int64],
    costs: Mapping[str, NDArray[np.float64]],
    *,
    title: str,
    execution: Execution | None = None,
) -> Path:
    """Write a PNG with the simulated pipelines of two plans of one global batch on one time axis; return `out`.

    sample_ids: (n,) ids of the batch's samples, in the order of the costs. costs: by unit, (n,) forward seconds. The predictions
    that the plans carry are not used: both panels are simulated alike.
    """
    panels = [
        Panel.of(Outcome.of(plan, make_batch(sample_ids, costs, plan.topology, plan.seed, execution=execution)))
        for plan in (arrival, planned)
    ]
    height = sum(panel.height_in for panel in panels) + _TOP_IN + legend_in(panels[1])
    figure = empty_figure(height, title, f"{panels[1].reading} {_ESTIMATED}")
    draw_pair(figure, height, _TOP_IN, panels, seconds=True)
    before, after = (panel.outcome.predicted.iteration_s for panel in panels)
    gain = f"{before / after:.2f} x faster" if 0 < after < before else "no gain on this batch"
    figure.text(RIGHT, 1 - 0.17 / height, gain, fontsize=14, fontweight="bold", color=GAIN, va="top", ha="right")
    write_legend(figure, panels[1], height)
    figure.savefig(out, dpi=130)
    return out


def draw_pair(
    figure: Figure, height_in: float, top_in: float, panels: list[Panel], *, seconds: bool, before: str = ARRIVAL, note: str = ""
) -> None:
    """Draw two panels, one below the other, on one time axis, and mark the time that the second saves.

    top_in: inches between the figure's upper edge and the first panel. panels: the worse plan and the better one. before:
    headline of the first panel. note: text behind the figures of the second.
    """
    first, second = (panel.outcome.predicted for panel in panels)
    longest = max(first.iteration_s, second.iteration_s) or 1.0
    scale, unit = time_unit(longest) if seconds else (1.0, "")
    for panel in panels:
        axes = _panel_axes(figure, height_in, top_in, panel)
        draw_panel(axes, panel, scale, longest * scale)
        headline = before if panel is panels[0] else f"As planned ({_name(panel.outcome)})"
        figures = _figures(panel, scale, unit)
        write_headline(axes, panel, headline, figures if panel is panels[0] else figures + note)
        top_in += panel.height_in
    mark_gain(axes, first, second, scale, unit)
    axes.set_xlabel(f"{_AXIS} ({unit or UNKNOWN})", color=QUIET, fontsize=9)


def time_unit(longest_s: float) -> tuple[float, str]:
    """Choose the unit in which the longest time reads well: return the factor from seconds to it, and its name."""
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if longest_s * factor >= 1:
            return factor, name
    return 1e9, "ns"


def empty_figure(height_in: float, title: str, subtitle: str, width_in: float = WIDTH_IN) -> Figure:
    """Return a figure that has only a title and a subtitle, which take 0.8 inches if the subtitle has one line."""
    figure = Figure(figsize=(width_in, height_in), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.012, 1 - 0.17 / height_in, title, fontsize=14, fontweight="bold", color=INK, va="top", parse_math=False)
    figure.text(0.012, 1 - 0.47 / height_in, subtitle, fontsize=10, color=QUIET, va="top", parse_math=False)
    return figure


def _panel_axes(figure: Figure, height_in: float, top_in: float, panel: Panel) -> Axes:
    bottom_in = height_in - top_in - 0.3 - panel.axes_in
    return figure.add_axes((LEFT, bottom_in / height_in, RIGHT - LEFT, panel.axes_in / height_in))


def _name(outcome: Outcome) -> str:
    plan = outcome.plan
    return f"{plan.strategy}: {plan.chosen}" if plan.chosen else plan.strategy


def _figures(panel: Panel, scale: float, unit: str) -> str:
    predicted, who = panel.outcome.predicted, "ranks" if panel.shares_ranks else "stages"
    return f"{predicted.iteration_s * scale:.3g} {unit}".rstrip() + f" per step, {who} idle {predicted.bubble:.0%} of the time"


def mark_gain(axes: Axes, before: Predicted, after: Predicted, scale: float, unit: str) -> None:
    """Mark on the time axis of the second of two steps what it saves. scale: factor from their times to those of the axis."""
    saved = (before.iteration_s - after.iteration_s) * scale
    if saved <= 0:
        return
    start = after.iteration_s * scale
    axes.axvspan(start, start + saved, facecolor=_SAVED, edgecolor="none", zorder=0)
    if saved / axes.get_xlim()[1] * axes.bbox.width / axes.figure.dpi > _SAVED_IN:
        low, high = axes.get_ylim()
        axes.text(
            start + saved / 2, (low + high) / 2, f"saved\n{saved:.2g} {unit}".rstrip(), ha="center", va="center", fontsize=10,
            fontweight="bold", color=GAIN,
        )  # fmt: skip


def legend_in(panel: Panel) -> float:
    """Return the height of a panel's legend in inches."""
    return 0.3 + 0.2 * -(-len(legend_handles(panel)) // _LEGEND_COLUMNS)


def write_legend(figure: Figure, panel: Panel, height_in: float, above_in: float = 0.0) -> None:
    """Write a panel's legend at the foot of the figure, or so many inches above it."""
    foot = (0.02 + above_in) / height_in
    figure.legend(
        handles=legend_handles(panel), loc="lower left", bbox_to_anchor=(0.005, foot), ncols=_LEGEND_COLUMNS, frameon=False,
        fontsize=9, labelcolor=INK, handlelength=1.3, columnspacing=1.3,
    )  # fmt: skip
