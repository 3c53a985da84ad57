"""Histograms of the quantities that a survey measured in a data set, and their picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from headrace.cli.costs.survey import Values

MAX_BINS = 40
PERCENTILES = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}
_LOG_SPREAD = 20.0  # ratio of largest to smallest from which a linear axis would press most samples into a few bins
_INK, _QUIET, _GRID = "#22303c", "#66757f", "#e9edf0"
_TEXT, _IMAGE, _AUDIO, _ALL = "#d1603d", "#12807a", "#6a4c93", "#3a6ea5"
_SHARES = {
    "text": _TEXT,
    "image": _IMAGE,
    "audio": _AUDIO,
    "text+image": "#93d1cb",
    "text+audio": "#f5bfa8",
    "image+audio": "#c8b6e2",
    "text+image+audio": "#b3cde8",
}
_WIDTH_IN, _PANEL_IN, _HEAD_IN, _COLUMNS = 13.0, 2.75, 1.75, 3
_LEFT, _RIGHT = 0.045, 0.985
_LETTER, _OVERHANG = 0.017, 0.04  # fractions of a panel's width: of a letter, and how far labels may pass its ends
_TITLE_LETTERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A quantity that a histogram shows, with its labels and colour."""

    title: str
    unit: str
    axis: str
    of: str
    """What is counted: `samples` (those that have the quantity) or `images`."""
    colour: str


QUANTITIES = {
    "image_side_px": Quantity(title="Image size", unit="px", axis="longer side of an image (px)", of="images", colour=_IMAGE),
    "image_tokens": Quantity(title="Image tokens", unit="tokens", axis="tokens of a sample", of="samples", colour=_IMAGE),
    "audio_s": Quantity(title="Audio", unit="s", axis="seconds of a sample", of="samples", colour=_AUDIO),
    "text_tokens": Quantity(title="Text tokens", unit="tokens", axis="tokens of a sample", of="samples", colour=_TEXT),
    "tokens": Quantity(title="All tokens", unit="tokens", axis="tokens of a sample", of="samples", colour=_ALL),
    "target_tokens": Quantity(title="Targets", unit="tokens", axis="tokens with loss of a sample", of="samples", colour=_ALL),
}


def percentiles(values: Values) -> dict[str, float]:
    """Return min, p10, p50, p90, p99 and max of at least one value; each is a value that occurs."""
    found = np.percentile(values, list(PERCENTILES.values()), method="inverted_cdf")
    return dict(zip(PERCENTILES, found.tolist(), strict=True))


def bin_edges(values: Values) -> NDArray[np.float64]:
    """Return the increasing edges, (bins + 1,), of 1 to MAX_BINS bins that hold all values, at least one.

    Bins have equal ratios where the values are positive and widely spread, else equal widths. Edges between whole numbers lie
    half-way, so that no bin is empty for lack of a whole number in it.
    """
    low, high = float(values.min()), float(values.max())
    if suits_log_axis(values):
        edges = np.geomspace(low, high, MAX_BINS + 1)
    elif values.dtype.kind == "i":
        edges = np.linspace(low, high + 1, min(MAX_BINS, int(high - low) + 1) + 1)
    else:
        edges = np.linspace(low, high, MAX_BINS + 1) if high > low else np.array([low - 0.5, low + 0.5])
    if values.dtype.kind == "i":
        edges = np.unique(np.floor(edges)) - 0.5
        edges[-1] = max(edges[-1], high + 0.5)
    return edges


def suits_log_axis(values: Values) -> bool:
    """Whether all values are positive, and spread by a factor of _LOG_SPREAD or more."""
    return bool(values.min() > 0 and values.max() >= _LOG_SPREAD * values.min())


def draw_histograms(
    out: Path, columns: Mapping[str, Values], combinations: Mapping[str, int], *, title: str, subtitle: str
) -> Path:
    """Draw the shares of the modalities above one histogram for each column, as a PNG; return `out`.

    columns: values by the names of QUANTITIES, (n,) each, n >= 1. combinations: number of samples, at least one, by the
    modalities they have.
    """
    rows = -(-len(columns) // _COLUMNS)
    height = _HEAD_IN + rows * _PANEL_IN
    figure = Figure(figsize=(_WIDTH_IN, height), facecolor="white")
    FigureCanvasAgg(figure)
    shown = title if len(title) <= _TITLE_LETTERS else f"…{title[-_TITLE_LETTERS:]}"
    figure.text(0.012, 1 - 0.17 / height, shown, fontsize=14, fontweight="bold", color=_INK, va="top", parse_math=False)
    figure.text(0.012, 1 - 0.48 / height, subtitle, fontsize=10, color=_QUIET, va="top", parse_math=False)
    _draw_shares(figure.add_axes((0.012, 1 - 1.15 / height, _RIGHT - 0.012, 0.25 / height)), combinations)
    step = (_RIGHT - _LEFT + 0.04) / _COLUMNS
    for index, (name, values) in enumerate(columns.items()):
        row, column = divmod(index, _COLUMNS)
        bottom = height - _HEAD_IN - (row + 1) * _PANEL_IN + 0.5
        axes = figure.add_axes((_LEFT + column * step, bottom / height, step - 0.04, (_PANEL_IN - 0.95) / height))
        _draw_histogram(axes, QUANTITIES[name], values)
    figure.savefig(out, dpi=130)
    return out


def _draw_shares(axes: Axes, combinations: Mapping[str, int]) -> None:
    """Draw one bar divided by combination of modalities, the largest first, with a legend below it."""
    total, left = sum(combinations.values()), 0
    for name, count in sorted(combinations.items(), key=lambda item: -item[1]):
        label = f"{name.replace('+', ' + ')}: {count:,} ({count / total:.0%})"
        axes.barh(0, count, left=left, color=_SHARES[name], edgecolor="white", linewidth=1, label=label)
        left += count
    axes.set_xlim(0, total)
    axes.set_axis_off()
    axes.legend(
        loc="upper left", bbox_to_anchor=(-0.004, -0.1), ncols=5 if len(combinations) <= 5 else 4, frameon=False, fontsize=9,
        labelcolor=_INK, handlelength=1.3, columnspacing=1.6, borderaxespad=0,
    )  # fmt: skip


def _draw_histogram(axes: Axes, quantity: Quantity, values: Values) -> None:
    edges = bin_edges(values)
    axes.hist(values, bins=edges.tolist(), color=quantity.colour, edgecolor="white", linewidth=0.6, zorder=2)
    axes.set_xlim(edges[0], edges[-1])
    _set_ticks(axes, suits_log_axis(values))
    found = percentiles(values)
    _mark(axes, found)
    figures = f"{len(values):,} {quantity.of}, {_short(found['min'])} to {_short(found['max'])} {quantity.unit}"
    axes.annotate(
        quantity.title, (0, 1), (0, 17), xycoords="axes fraction", textcoords="offset points", fontsize=11.5,
        fontweight="bold", color=_INK,
    )  # fmt: skip
    axes.annotate(
        figures, (1, 1), (0, 17), xycoords="axes fraction", textcoords="offset points", fontsize=9, color=_QUIET, ha="right"
    )
    axes.set_xlabel(quantity.axis, color=_QUIET, fontsize=9)


def _set_ticks(axes: Axes, wide: bool) -> None:
    if wide:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.tick_params(colors=_QUIET, labelsize=8, length=0)
    axes.grid(axis="y", color=_GRID, zorder=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)


def _mark(axes: Axes, found: Mapping[str, float]) -> None:
    """Draw lines at p50, p90 and p99, each labelled if there is room beside the label before it."""
    free_from = -_OVERHANG
    for name in ("p50", "p90", "p99"):
        axes.axvline(found[name], color=_INK, linewidth=0.9, linestyle=(0, (3, 2)), zorder=3)
        at = float(axes.transAxes.inverted().transform(axes.transData.transform((found[name], 0)))[0])
        label = f"{name} {_short(found[name])}"
        width = _LETTER * len(label)
        start = min(max(at - width / 2, -_OVERHANG), 1 + _OVERHANG - width)
        start = max(start, free_from)
        if start < at and start + width <= 1 + _OVERHANG:
            axes.annotate(
                label, (start + width / 2, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", fontsize=8,
                color=_INK, ha="center",
            )  # fmt: skip
            free_from = start + width + _LETTER


def _short(value: float) -> str:
    """Format a number in few characters: 0.25, 12, 1,500, 15.3k, 20M."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.3g}{letter}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
