"""The picture of what a strategy does to one global batch: its microbatches beside its pipelines, as they arrive and as planned.

At the left, bars: what each microbatch takes in one stage of each unit. At the right, the same replicas over time. Pictures are
8 inches wide, so that their letters can be read where a page shows them 800 pixels wide.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from PIL import Image

from headrace.cli.planning.outcome import Outcome
from headrace.cli.planning.pipeline_panel import INK, QUIET, Panel, draw_panel, legend_handles, unit_colour
from headrace.cli.planning.timeline import UNKNOWN, empty_figure, mark_gain, time_unit
from headrace.reorder_service.planning.batch import Floats
from headrace.schedule import Kind

WIDTH_IN = 8.0
BARS = (0.075, 0.37)
"""Left and right edge of the bars, in widths of the figure."""
TIMES = (0.455, 0.985)
"""Left and right edge of the time axis, in widths of the figure."""
ROW_IN, HEAD_IN, LEGEND_IN = 0.21, 0.3, 0.5
_TITLE_IN, _LINE_IN = 0.55, 0.16
_MAX_ROWS = 8
_LETTERS = 112  # of a line of the subtitle
_DPI, _COLOURS = 125, 256
_MOST_NUMBERED = 16  # microbatches, from which on not every one has its number below its bars


def draw_strategy(out: Path, outcomes: Mapping[str, Outcome], *, title: str, subtitle: str, seconds: bool) -> Path:
    """Write a PNG with one plan, or with a plan and below it the one that is to be compared with it; return `out`.

    outcomes: one or two, by headline, of the same batch. seconds: whether costs are seconds; otherwise they are in a unit of
    their own.
    """
    panels = {name: Panel.of(outcome, _MAX_ROWS, row_in=ROW_IN, plain=True) for name, outcome in outcomes.items()}
    longest = max(outcome.predicted.iteration_s for outcome in outcomes.values()) or 1.0
    scale, unit = time_unit(longest) if seconds else (1.0, "")
    heaviest = max(float(_of_a_stage(outcome).max()) for outcome in outcomes.values()) * scale or 1.0
    figure, height, top_in = new_figure(sum(panel.height_in for panel in panels.values()), title, subtitle)
    for name, panel in panels.items():
        axes = figure.add_axes(place(height, top_in, panel.axes_in, TIMES))
        draw_panel(axes, panel, scale, longest * scale)
        _draw_bars(figure, height, top_in, panel, scale, heaviest, unit)
        write_head(figure, 1 - (top_in + 0.04) / height, name, _figures(panel, scale, unit))
        top_in += panel.height_in
    first, *_ = steps = list(outcomes.values())
    mark_gain(axes, first.predicted, steps[-1].predicted, scale, unit)
    axes.set_xlabel(f"time since the start of the step ({unit or UNKNOWN})", color=QUIET, fontsize=8.5)
    handles = {handle.get_label(): handle for panel in panels.values() for handle in legend_handles(panel)}
    write_legend(figure, list(handles.values()))
    return save(figure, out)


def new_figure(panels_in: float, title: str, subtitle: str) -> tuple[Figure, float, float]:
    """Return a figure with a title, its height, and where panels begin below its upper edge, all in inches."""
    lines = textwrap.wrap(subtitle, _LETTERS)
    top_in = _TITLE_IN + _LINE_IN * len(lines) + 0.1
    height = top_in + panels_in + LEGEND_IN
    return empty_figure(height, title, "\n".join(lines), WIDTH_IN), height, top_in


def place(height_in: float, top_in: float, axes_in: float, edges: tuple[float, float]) -> tuple[float, float, float, float]:
    """Return where axes of a panel are that begins `top_in` below the upper edge of the figure, in shares of the figure."""
    left, right = edges
    return left, (height_in - top_in - HEAD_IN - axes_in) / height_in, right - left, axes_in / height_in


def write_head(figure: Figure, y: float, name: str, figures: str) -> None:
    """Write above a panel which plan it shows, and its figures."""
    figure.text(BARS[0] - 0.06, y, name, fontsize=10.5, fontweight="bold", color=INK, va="top")
    figure.text(TIMES[0], y, figures, fontsize=9.5, color=INK, va="top")


def write_legend(figure: Figure, handles: Sequence[Patch | Line2D]) -> None:
    """Write a legend at the foot of the figure, in two rows if there are more than five entries."""
    figure.legend(
        handles=list(handles), loc="lower left", bbox_to_anchor=(0.005, 0.0), ncols=5 if len(handles) <= 5 else 3, frameon=False,
        fontsize=8.5, labelcolor=INK, handlelength=1.3, columnspacing=1.2,
    )  # fmt: skip


def save(figure: Figure, out: Path) -> Path:
    """Write a figure as a PNG with a palette, which takes a third of the bytes of one without; return `out`."""
    whole = io.BytesIO()
    figure.savefig(whole, dpi=_DPI, format="png")
    Image.open(whole).convert("RGB").quantize(_COLOURS, kmeans=1, dither=Image.Dither.NONE).save(out, optimize=True)
    return out


def style_bars(axes: Axes) -> None:
    """Give the axes of bars small letters and no frame."""
    axes.tick_params(colors=QUIET, labelsize=7.5, length=2, pad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)


def _of_a_stage(outcome: Outcome) -> Floats:
    """Return the (D, K, U) forward time of every microbatch in one stage of each unit."""
    stages = np.array(list(outcome.plan.topology.stages.values()), np.float64)
    loads: Floats = outcome.loads() / stages
    return loads


def _draw_bars(figure: Figure, height_in: float, top_in: float, panel: Panel, scale: float, heaviest: float, unit: str) -> None:
    """Draw a replica's microbatches beside its rows, for each replica of the panel."""
    loads, rows = _of_a_stage(panel.outcome) * scale, panel.rows()
    _, microbatches, units = loads.shape
    share, top_row = panel.axes_in / (float(np.nanmax(rows)) + 1.2), -0.6
    for replica in panel.replicas:
        mine = rows[panel.tracks.replica == replica]
        begin_in = top_in + HEAD_IN + (float(mine.min()) - 0.43 - top_row) * share
        size_in = (float(np.ptp(mine)) + 0.86) * share
        bottom = (height_in - begin_in - size_in) / height_in
        axes = figure.add_axes((BARS[0], bottom, BARS[1] - BARS[0], size_in / height_in))
        for u in range(units):
            x = np.arange(microbatches) + (u - (units - 1) / 2) * 0.8 / units
            axes.bar(x, loads[replica, :, u], 0.8 / units, color=unit_colour(u, Kind.FORWARD))
        axes.set_xlim(-0.6, microbatches - 0.4)
        axes.set_ylim(0, heaviest * 1.06)
        axes.yaxis.set_major_locator(MaxNLocator(3))
        if microbatches <= _MOST_NUMBERED:
            axes.set_xticks(range(microbatches))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        style_bars(axes)
        axes.set_ylabel(f"replica {replica}" + (f" ({unit})" if unit else ""), color=QUIET, fontsize=7.5)
        if replica == panel.replicas[-1]:
            axes.set_xlabel("microbatch", color=QUIET, fontsize=8.5, labelpad=1)
        else:
            axes.tick_params(labelbottom=False)


def _figures(panel: Panel, scale: float, unit: str) -> str:
    predicted, who = panel.outcome.predicted, "ranks" if panel.shares_ranks else "stages"
    drawn, replicas = len(panel.replicas), int(panel.tracks.replica.max()) + 1
    some = f"; the slowest {drawn} of {replicas} replicas" if drawn < replicas else ""
    return f"{predicted.iteration_s * scale:.3g} {unit}".rstrip() + f" a step, {who} idle {predicted.bubble:.0%}{some}"
