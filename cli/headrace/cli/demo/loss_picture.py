"""Picture of the loss curves of two runs: one undisturbed, one in which a node was killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from headrace.cli.planning.pipeline_panel import INK, LEFT, QUIET, RIGHT
from headrace.cli.planning.timeline import empty_figure

_HEIGHT_IN = 4.6
_UNDISTURBED, _KILLED, _MARK = "#9fb3c1", "#12807a", "#c2452d"


def draw_losses(
    out: Path, undisturbed: Sequence[float], disturbed: Sequence[float], killed_after: int | None, words: str
) -> Path:
    """Draw the losses of two runs, by step and in nats, as a PNG; return `out`.

    killed_after: number of steps before the kill, or None for no mark. words: the subtitle, on how training went on.
    """
    figure = empty_figure(_HEIGHT_IN, "Training loss by step: a node killed on the way, and undisturbed", words)
    axes = figure.add_axes((LEFT, 0.13, RIGHT - LEFT, 0.66))
    axes.plot(undisturbed, color=_UNDISTURBED, linewidth=6, label="undisturbed", solid_capstyle="round")
    axes.plot(disturbed, color=_KILLED, linewidth=1.8, marker="o", markersize=3.5, label="a node killed on the way")
    if killed_after is not None:
        axes.axvline(killed_after - 0.5, color=_MARK, linewidth=1.2, linestyle="--")
        axes.text(killed_after - 0.4, 0.97, "SIGKILL", color=_MARK, fontsize=9, va="top", transform=axes.get_xaxis_transform())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step", color=QUIET, fontsize=9)
    axes.set_ylabel("loss (nats)", color=QUIET, fontsize=9)
    axes.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(out, dpi=130)
    return out
