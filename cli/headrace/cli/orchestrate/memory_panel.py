"""The part of a placement's picture that shows what GPUs hold over one global batch: for each unit, its fullest stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from headrace.cli.planning.pipeline_panel import IDLE, INK, LEFT, QUIET, RIGHT
from headrace.reorder_service.planning.orchestration.judgement import GIB, Judgement, RankMemory
from headrace.reorder_service.planning.orchestration.memory_curve import MemoryCurve

CURVES_IN = 1.35
"""Height of the axes in inches."""
_GAP = 0.035  # of the figure's width, between two units
_KINDS = {"weights": "#4a5b68", "optimizer": "#93a5b2", "gradients": "#cdd6dc", "activations": "#d9a441"}
"""What is held, by colour, from below."""
_LIMIT = "#b3362c"


def draw_memory(
    figure: Figure, height_in: float, top_in: float, judgement: Judgement, curves: Sequence[MemoryCurve], scale: float, unit: str
) -> None:
    """Draw the curves of the fullest stage of every unit, side by side, on the same axis of GiB.

    top_in: inches between the figure's upper edge and the axes. scale, unit: from seconds to the unit of the time axis.
    """
    of_rank = {(rank.unit, rank.stage): rank for rank in judgement.ranks}
    fullest: dict[str, MemoryCurve] = {}
    for curve in curves:
        if curve.unit not in fullest or curve.peak > fullest[curve.unit].peak:
            fullest[curve.unit] = curve
    width = (RIGHT - LEFT - _GAP * (len(fullest) - 1)) / len(fullest)
    bottom = (height_in - top_in - CURVES_IN) / height_in
    for place, curve in enumerate(fullest.values()):
        axes = figure.add_axes((LEFT + place * (width + _GAP), bottom, width, CURVES_IN / height_in))
        of_unit = sum(other.unit == curve.unit for other in curves)
        name = curve.unit if of_unit == 1 else f"{curve.unit} {curve.stage}, the fullest of {of_unit} stages"
        _draw_curve(axes, curve, of_rank[curve.unit, curve.stage], judgement.memory_bytes, scale, name)
        axes.set_xlabel(f"time since the start of the step ({unit})", color=QUIET, fontsize=9)
        if place == 0:
            axes.set_ylabel("GiB on a GPU", color=QUIET, fontsize=9)
        else:
            axes.set_yticklabels([])
    handles: list[Patch | Line2D] = [Patch(facecolor=colour, label=kind) for kind, colour in _KINDS.items()]
    handles.append(Line2D([], [], color=_LIMIT, linewidth=1.2, linestyle="--", label="what a GPU may hold"))
    handles.append(Line2D([], [], color=INK, linewidth=1.0, linestyle=":", label="most in any of the global batches"))
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.005, bottom - 0.68 / height_in), ncols=6, frameon=False, fontsize=9,
        labelcolor=INK, handlelength=1.3, columnspacing=1.3,
    )  # fmt: skip


def _draw_curve(axes: Axes, curve: MemoryCurve, rank: RankMemory, limit_bytes: float, scale: float, name: str) -> None:
    times = curve.time_s * scale
    below = np.zeros_like(times)
    for kind, colour in _KINDS.items():
        above = below + getattr(curve, kind) / GIB
        axes.fill_between(times, below, above, step="post", color=colour, linewidth=0)
        below = above
    limit = limit_bytes / GIB
    axes.axhline(limit, color=_LIMIT, linewidth=1.2, linestyle="--")
    axes.axhline(rank.total / GIB, color=INK, linewidth=1.0, linestyle=":")
    axes.set_xlim(0, times[-1] * 1.012)
    axes.set_ylim(0, 1.08 * max(limit, rank.total / GIB))
    axes.set_title(f"{name}: {rank.total / GIB:.1f} of {limit:.1f} GiB", loc="left", fontsize=10, color=INK)
    axes.tick_params(colors=QUIET, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(IDLE)
