"""The picture of what planning gains: a bar for each strategy, above the pipelines in shuffled order and as best planned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from headrace.cli.planning.gain import Gain, best_of
from headrace.cli.planning.pipeline_panel import GAIN, IDLE, INK, LEFT, QUIET, RIGHT, Panel
from headrace.cli.planning.timeline import draw_pair, empty_figure, legend_in, write_legend

_TOP_IN, _BAR_IN, _BARS_EXTRA_IN = 0.95, 0.3, 0.3
_MAX_ROWS = 8  # stage rows of a panel: the bars speak for all replicas, the panels show why
_BUSY, _BUSY_BEST, _WAITING = "#9fb3c1", "#12807a", "#f0d9cf"


def draw_gains(out: Path, gains: Sequence[Gain], *, title: str, seconds: bool) -> Path:
    """Write a PNG with the gains of all strategies and the pipelines of one batch; return `out`.

    gains: the first is that of shuffled order, against which all are measured. seconds: whether costs are seconds; otherwise
    they are in a unit of their own. Of several batches, the one whose gain is the nearest to that of all is drawn.
    """
    best = best_of(gains)
    each, batch = best.speedups_over(gains[0]), best.typical_batch(gains[0])
    note = f"; batch {batch + 1} of {len(each)}: {each[batch]:.2f} x" if len(each) > 1 else ""
    panels = [Panel.of(gain.outcomes[batch], _MAX_ROWS) for gain in (gains[0], best)]
    bars_in = len(gains) * _BAR_IN + _BARS_EXTRA_IN
    height = _TOP_IN + bars_in + sum(panel.height_in for panel in panels) + legend_in(panels[1])
    rows = f"a row for each {'rank' if panels[1].shares_ranks else 'stage'}"
    subtitle = f"Above: GPU time of a step (shuffled order = 100). Below: one step, {rows}. Simulated, not measured."
    figure = empty_figure(height, title, subtitle)
    speedup = best.speedup_over(gains[0])
    headline = f"{speedup:.2f} x faster" if speedup > 1 else "no gain on this data"
    figure.text(RIGHT, 1 - 0.17 / height, headline, fontsize=14, fontweight="bold", color=GAIN, va="top", ha="right")
    axes_in = len(gains) * _BAR_IN
    draw_bars(figure.add_axes((LEFT, (height - _TOP_IN - axes_in) / height, RIGHT - LEFT, axes_in / height)), gains, best)
    draw_pair(figure, height, _TOP_IN + bars_in, panels, seconds=seconds, before="Shuffled order", note=note)
    write_legend(figure, panels[1], height)
    figure.savefig(out, dpi=130)
    return out


def draw_bars(axes: Axes, gains: Sequence[Gain], best: Gain) -> None:
    """Draw a bar for the step of each strategy, in hundredths of the first one's: what its stages work, and what they wait."""
    whole = gains[0].iteration_s or 1.0
    longest = 100 * max([1.0, *(gain.iteration_s / whole for gain in gains)])
    for row, gain in enumerate(gains):
        busy, all_of_it = 100 * gain.busy_s / whole, 100 * gain.iteration_s / whole
        axes.barh(row, busy, height=0.7, color=_BUSY_BEST if gain is best else _BUSY)
        axes.barh(row, all_of_it - busy, left=busy, height=0.7, color=_WAITING)
        words = f"{all_of_it:.0f}" if row == 0 else f"{all_of_it:.0f}   {gain.speedup_over(gains[0]):.2f} x"
        if not gain.fits:
            words += "   over the memory limit"
        weight = "bold" if gain is best else "normal"
        axes.text(all_of_it + longest * 0.006, row, words, va="center", fontsize=9.5, color=INK, fontweight=weight)
        if busy > 0.06 * longest:
            axes.text(busy - longest * 0.006, row, "stages work", va="center", ha="right", fontsize=8, color="white")
        if all_of_it - busy > 0.08 * longest:
            idle = f"wait {gain.bubble:.0%}"
            patch = {"facecolor": _WAITING, "edgecolor": "none", "pad": 1}  # keeps the lower bound's line off the words
            axes.text(busy + (all_of_it - busy) / 2, row, idle, va="center", ha="center", fontsize=8, color=INK, bbox=patch)
    _set_axes(axes, gains, longest)
    bound = 100 * gains[0].lower_bound_s / whole
    axes.axvline(bound, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    axes.annotate(
        "lower bound: no plan is faster", (bound, 1), (3, 1), xycoords=("data", "axes fraction"), textcoords="offset points",
        fontsize=8, color=QUIET,
    )  # fmt: skip


def _set_axes(axes: Axes, gains: Sequence[Gain], longest: float) -> None:
    axes.set_xlim(0, longest * 1.09)
    axes.set_ylim(len(gains) - 0.45, -0.55)
    names = [f"{gain.strategy} ({', '.join(gain.chosen)})" if gain.chosen else gain.strategy for gain in gains]
    axes.set_yticks(range(len(gains)), ["shuffled order", *names[1:]], fontsize=9, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(IDLE)
