"""The picture of one global batch on pipelines whose GPUs encoders share: what a few of them do over time."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from headrace.cli.planning.pipeline_panel import IDLE, INK, QUIET
from headrace.cli.planning.timeline import time_unit
from headrace.plan import GENERATOR, LLM
from headrace.reorder_service.planning.orchestration.candidate import Candidate
from headrace.reorder_service.planning.orchestration.judge import Simulated, sharing_of
from headrace.reorder_service.planning.simulation.list_schedule import CELL, KIND, STAGE, WIDTH
from headrace.reorder_service.planning.simulation.shared_ranks import simulate_shared
from headrace.schedule import Kind

COLOURS = ("#12807a", "#d1603d", "#6a4c93", "#3a6ea5", "#8a6d1d")
"""Of units, as in the panels of pipelines."""
_MOST_ROWS = 8


def draw_shared_ranks(axes: Axes, candidate: Candidate, step: Simulated) -> None:
    """Draw what the slowest of the GPUs and those that follow it do: all units, forth and back (pale), and waiting."""
    sharing = sharing_of(candidate)
    shared = simulate_shared(step.batch, step.slots, sharing)
    units = list(candidate.grids)
    unit_of_stage = np.repeat(np.arange(len(units)), [grid.pp for grid in candidate.grids.values()])
    begin, kinds, stages = (shared.actions[:, column] for column in (CELL, KIND, STAGE))
    end = begin + shared.actions[:, WIDTH]
    num_cells = int(end.max())
    first = min(int(begin[shared.end_s.argmax()]), max(0, num_cells - _MOST_ROWS))
    cells = range(first, min(num_cells, first + _MOST_ROWS))
    scale, unit = time_unit(step.step_s)
    axes.barh(np.arange(len(cells)), step.step_s * scale, height=0.8, color=IDLE)
    for kind in Kind:
        for stage in range(unit_of_stage.size):
            chosen = (kinds == kind) & (stages == stage)
            for row, cell in enumerate(cells):
                here = chosen & (begin <= cell) & (cell < end)
                spans = zip(shared.start_s[here] * scale, (shared.end_s - shared.start_s)[here] * scale, strict=True)
                colour = COLOURS[unit_of_stage[stage] % len(COLOURS)]
                axes.broken_barh(list(spans), (row - 0.4, 0.8), color=colour, alpha=1.0 if kind == Kind.FORWARD else 0.5)
    axes.set_xlim(0, step.step_s * scale * 1.012)
    axes.set_ylim(len(cells) - 0.4, -0.6)
    names = [_name(candidate, sharing.cell, cell) for cell in cells]
    axes.set_yticks(range(len(cells)), names, fontsize=8, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=QUIET, labelsize=8)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.set_xlabel(f"one global batch over time ({unit}): forward, backward (pale), waiting", color=QUIET, fontsize=9)
    handles = [Patch(facecolor=COLOURS[u % len(COLOURS)], label=name) for u, name in enumerate(units)]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 1.0), ncols=5, frameon=False, fontsize=9, labelcolor=INK,
        handlelength=1.2, borderaxespad=0.1,
    )  # fmt: skip


def _name(candidate: Candidate, width: int, cell: int) -> str:
    """Return the name of the GPUs of a cell: `width` of the LLM's, or behind these a slice group of a generator."""
    hosts = candidate.grids[LLM].gpus
    first, last = cell * width, (cell + 1) * width - 1
    if first >= hosts:
        own = candidate.grids[GENERATOR].tp
        first = hosts + (cell - hosts // width) * own
        last = first + own - 1
    return f"GPU {first}" if first == last else f"GPUs {first}-{last}"
