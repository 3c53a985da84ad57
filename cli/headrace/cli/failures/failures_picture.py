"""Picture of an availability trace: the throughput of every policy over time, above the number of available nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from headrace.cli.planning.pipeline_panel import GAIN, IDLE, INK, QUIET
from headrace.cli.planning.timeline import empty_figure
from headrace.reorder_service.recovery.forecast.availability import Trace
from headrace.reorder_service.recovery.forecast.availability_replay import Run

_HEIGHT_IN, _THROUGHPUT_BOTTOM_IN, _THROUGHPUT_IN, _NODES_BOTTOM_IN, _NODES_IN = 6.4, 1.85, 3.65, 0.5, 1.1
_AXES_LEFT, _AXES_RIGHT, _NAMES_LEFT = 0.055, 0.79, 0.805
_LINE_IN = 0.56  # height of a policy's name and figures at the right
_POINTS = 180
_BOUND = "#dfe6ea"
_COLOURS = (GAIN, "#d1603d", "#c2407f", "#6a4c93", "#3a6ea5", "#8a6d1d")


def draw_failures(out: Path, runs: Sequence[Run], bound: Run, trace: Trace, *, title: str) -> Path:
    """Draw the throughput of the runs and the available nodes, as PNG or SVG by the suffix of `out`; return `out`.

    The first of the runs is Headrace's, which is emphasised; `bound` is the throughput that the available nodes allow.
    """
    edges = np.linspace(0.0, trace.end_s, _POINTS + 1)
    subtitle = (
        f"SIMULATED, not measured. Means over {edges[1] / 60:.3g} minutes each; work that was lost afterwards does not count."
    )
    figure = empty_figure(_HEIGHT_IN, title, subtitle)
    _draw_throughput(_axes(figure, _THROUGHPUT_BOTTOM_IN, _THROUGHPUT_IN, trace), runs, bound, edges)
    _write_names(figure, runs, bound)
    nodes = _axes(figure, _NODES_BOTTOM_IN, _NODES_IN, trace)
    counts = trace.counts()
    nodes.stairs([count for _, _, count in counts], [0.0, *(end_s / 3600 for _, end_s, _ in counts)], fill=True, color=_BOUND)
    nodes.set_ylim(0, max(count for _, _, count in counts) * 1.1)
    nodes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    nodes.set_ylabel("nodes there", color=QUIET, fontsize=9)
    nodes.set_xlabel("hours", color=QUIET, fontsize=9)
    figure.savefig(out, dpi=130)
    return out


def _axes(figure: Figure, bottom_in: float, height_in: float, trace: Trace) -> Axes:
    axes = figure.add_axes((_AXES_LEFT, bottom_in / _HEIGHT_IN, _AXES_RIGHT - _AXES_LEFT, height_in / _HEIGHT_IN))
    axes.set_xlim(0, trace.end_s / 3600)
    axes.tick_params(colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(IDLE)
    return axes


def _draw_throughput(axes: Axes, runs: Sequence[Run], bound: Run, edges: NDArray[np.float64]) -> None:
    axes.stairs(_means(bound, edges), edges / 3600, fill=True, color=_BOUND)
    for run, colour in reversed(list(zip(runs, _COLOURS, strict=False))):
        width = 1.9 if run is runs[0] else 1.1
        axes.stairs(_means(run, edges), edges / 3600, color=colour, linewidth=width, baseline=None)
    axes.set_ylim(0, None)
    axes.set_ylabel("samples per second", color=QUIET, fontsize=9)


def _means(run: Run, edges: NDArray[np.float64]) -> list[float]:
    return [run.mean_over(start_s, end_s) for start_s, end_s in itertools.pairwise(edges)]


def _write_names(figure: Figure, runs: Sequence[Run], bound: Run) -> None:
    """Write the policies' names and figures at the right, the fastest first, each in the colour of its line."""
    named = sorted(zip(runs, _COLOURS, strict=False), key=lambda pair: -pair[0].samples)
    lines = [(bound.name, "as fast as the nodes there could be", QUIET)]
    for run, colour in named:
        stopped = "; stops" if run.stopped else ""
        lines.append((run.name, f"{run.share_of(bound):.1%} of it: {run.samples_per_s:.3g} samples/s{stopped}", colour))
    top_in = _THROUGHPUT_BOTTOM_IN + _THROUGHPUT_IN
    for row, (name, words, colour) in enumerate(lines):
        y = (top_in - row * _LINE_IN) / _HEIGHT_IN
        figure.text(_NAMES_LEFT, y, name, fontsize=10.5, fontweight="bold", color=colour, va="top")
        figure.text(_NAMES_LEFT, y - 0.2 / _HEIGHT_IN, words, fontsize=8.5, color=INK, va="top")
