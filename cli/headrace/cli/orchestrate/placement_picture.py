"""The picture of a placement: who has which GPUs, what every search reaches, and one batch over time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from headrace.cli.orchestrate.memory_panel import CURVES_IN, draw_memory
from headrace.cli.orchestrate.placement_report import Report
from headrace.cli.orchestrate.shared_picture import COLOURS as _COLOURS
from headrace.cli.orchestrate.shared_picture import draw_shared_ranks
from headrace.cli.planning.outcome import Outcome
from headrace.cli.planning.pipeline_panel import GAIN, IDLE, INK, LEFT, QUIET, RIGHT, Panel, draw_panel, write_headline
from headrace.cli.planning.timeline import empty_figure, legend_in, time_unit, write_legend
from headrace.reorder_service.planning.orchestration.judge import Simulated
from headrace.reorder_service.planning.orchestration.judgement import Judgement
from headrace.reorder_service.planning.strategies import plan_of

_TOP_IN, _GPUS_IN, _BAR_IN, _GAP_IN = 0.95, 1.5, 0.28, 0.66
_MAX_ROWS = 12
_MOST_RANKS, _RANKS_IN = 8, 1.9
_TIME_AXIS_IN = 0.45
_MEMORY_HEAD_IN, _MEMORY_FOOT_IN = 0.3, 0.72
_MEMORY_IN = _MEMORY_HEAD_IN + CURVES_IN + _MEMORY_FOOT_IN
_MOST_LABELLED = 96  # GPUs whose replicas and stages are written into their boxes


def draw_placement(out: Path, report: Report) -> Path:
    """Write a PNG with the GPUs of the best placement, the throughput of all searches, and one batch on it, with what its GPUs
    hold meanwhile; return `out`.
    """
    best, problem = report.found.best, report.problem
    panel = _panel(report) if best.candidate.placement == "disaggregated" else None
    bars_in = _BAR_IN * len(report.judged)
    batch_in = _RANKS_IN + 0.55 if panel is None else panel.axes_in + _TIME_AXIS_IN + legend_in(panel)
    memory_in = _MEMORY_IN if report.curves else 0.0
    height = _TOP_IN + _GPUS_IN + bars_in + 2 * _GAP_IN + batch_in + memory_in
    cluster = problem.demand.cluster
    rate = problem.demand.global_batch / best.step_s
    title = f"Placement of {problem.model} on {cluster.num_gpus} x {cluster.name}: {rate:.1f} samples/s"
    subtitle = "Which GPUs each unit gets, how fast that is, and what happens in a step. Simulated, not measured."
    figure = empty_figure(height, title, subtitle)
    speedup = report.speedup(best)
    if speedup is not None:
        words = f"{speedup:.2f} x megatron"
        figure.text(RIGHT, 1 - 0.17 / height, words, fontsize=14, fontweight="bold", color=GAIN, va="top", ha="right")
    _draw_gpus(_axes(figure, height, _TOP_IN, _GPUS_IN), report, best)
    _draw_bars(_axes(figure, height, _TOP_IN + _GPUS_IN + _GAP_IN, bars_in), report)
    top_in = _TOP_IN + _GPUS_IN + bars_in + 2 * _GAP_IN
    scale, unit = time_unit(report.step.step_s)
    if panel is None:
        axes = _axes(figure, height, top_in, _RANKS_IN)
        if best.candidate.sharing is None:
            _draw_ranks(axes, report.step)
        else:
            draw_shared_ranks(axes, best.candidate, report.step)
    else:
        axes = _axes(figure, height, top_in, panel.axes_in)
        predicted = panel.outcome.predicted
        draw_panel(axes, panel, scale, report.step.step_s * scale)
        figures = f"{report.step.step_s * scale:.3g} {unit} per step, stages idle {predicted.bubble:.0%} of the time"
        write_headline(axes, panel, f"One global batch ({best.strategy})", figures)
        axes.set_xlabel(f"time since the start of the step ({unit})", color=QUIET, fontsize=9)
        write_legend(figure, panel, height, above_in=memory_in)
    if report.curves:
        draw_memory(figure, height, top_in + batch_in + _MEMORY_HEAD_IN, best, report.curves, scale, unit)
    figure.savefig(out, dpi=130)
    return out


def _panel(report: Report) -> Panel:
    """Return the panel of the first global batch, with the slowest of the replicas whose number every unit has."""
    best = report.found.best
    step = report.step
    outcome = Outcome.of(plan_of(step.strategy, step.batch), step.batch)
    panel = Panel.of(outcome)
    whole = min(grid.dp for grid in best.candidate.grids.values())
    most = max(1, _MAX_ROWS // outcome.plan.topology.num_stages)
    ends_s = np.zeros(outcome.batch.most_replicas)
    np.maximum.at(ends_s, panel.timeline.replica, panel.timeline.end_s)
    slowest = np.argsort(-ends_s[:whole], kind="stable")[:most]
    return replace(panel, replicas=sorted(slowest.tolist()))


def _axes(figure: Figure, height_in: float, top_in: float, axes_in: float) -> Axes:
    return figure.add_axes((LEFT, (height_in - top_in - axes_in) / height_in, RIGHT - LEFT, axes_in / height_in))


def _draw_gpus(axes: Axes, report: Report, best: Judgement) -> None:
    """Draw a box for each GPU, a column for each node, in the order of ranks."""
    cluster, candidate = report.problem.demand.cluster, best.candidate
    names = [unit.name for unit in report.problem.demand.units]
    labels: list[str] = []
    colours: list[str] = []
    if candidate.placement == "colocated":
        labels = [str(rank) for rank in range(candidate.gpus)]
        colours = ["#5c6f7b"] * candidate.gpus
    else:
        for colour, name in zip(_COLOURS, names, strict=False):
            if name in candidate.guests:
                continue
            grid = candidate.grids[name]
            labels += [f"{r}.{s}" for r in range(grid.dp) for s in range(grid.pp) for _ in range(grid.tp)]
            colours += [colour] * grid.gpus
    idle = cluster.num_gpus - len(colours)
    colours, labels = colours + [IDLE] * idle, labels + [""] * idle
    rows = cluster.gpus_per_node
    place = np.arange(cluster.num_gpus)
    boxes = [Rectangle((x + 0.04, y + 0.06), 0.92, 0.88) for x, y in zip(place // rows, place % rows, strict=True)]
    axes.add_collection(PatchCollection(boxes, facecolors=colours, edgecolors="none"))
    if cluster.num_gpus <= _MOST_LABELLED:
        for x, y, label in zip(place // rows, place % rows, labels, strict=True):
            axes.text(x + 0.5, y + 0.5, label, ha="center", va="center", fontsize=6.5, color="white")
    axes.set_xlim(0, max(cluster.nodes, 4))
    axes.set_ylim(rows, 0)
    axes.set_axis_off()
    if candidate.placement == "colocated":
        handles = [Patch(facecolor="#5c6f7b", label=f"{', '.join(names)} together on each of {candidate.gpus} ranks")]
    else:
        handles = [
            Patch(
                facecolor="none" if name in candidate.guests else colour,
                label=f"{name}: {'the same' if name in candidate.guests else grid.gpus} GPUs, "
                f"{grid.dp} replicas x {grid.tp} slices x {grid.pp} stages",
            )
            for colour, (name, grid) in zip(_COLOURS, candidate.grids.items(), strict=False)
        ]
    if idle:
        handles.append(Patch(facecolor=IDLE, label=f"no unit: {idle} GPUs"))
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 1.0), ncols=4, frameon=False, fontsize=9, labelcolor=INK,
        handlelength=1.2, borderaxespad=0.1,
    )  # fmt: skip
    numbers = "ranks" if candidate.placement == "colocated" else "replica.stage"
    axes.text(0, rows + 0.15, f"a column is a node; numbers are {numbers}", fontsize=8, color=QUIET, va="top")


def _draw_bars(axes: Axes, report: Report) -> None:
    batch = report.problem.demand.global_batch
    rates = [batch / report.seconds(judgement) for judgement in report.judged.values()]
    for row, ((_, judgement), rate) in enumerate(zip(report.judged.items(), rates, strict=True)):
        best = judgement is report.found.best
        axes.barh(row, rate, height=0.7, color="#12807a" if best else "#9fb3c1")
        words = f"{rate:.1f}" + ("" if judgement.fits else "   over the memory")
        axes.text(rate + max(rates) * 0.006, row, words, va="center", fontsize=9.5, color=INK)
    axes.set_title("Samples a second, by search", loc="left", fontsize=11.5, fontweight="bold", color=INK)
    axes.set_xlim(0, max(rates) * 1.09)
    axes.set_ylim(len(rates) - 0.45, -0.55)
    axes.set_yticks(range(len(rates)), list(report.judged), fontsize=9, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(IDLE)


def _draw_ranks(axes: Axes, step: Simulated) -> None:
    """Draw what the slowest and the other first ranks do in one global batch: all units forth and back, and then they wait."""
    batch = step.batch
    forward = batch.loads(step.slots)
    backward = forward * (batch.step_factors - 1)
    busy = (forward + backward).sum(axis=(1, 2))
    shown = np.sort(np.argsort(-busy, kind="stable")[:_MOST_RANKS])
    scale, unit = time_unit(step.step_s)
    axes.barh(np.arange(shown.size), step.step_s * scale, height=0.8, color=IDLE)
    of_microbatch = (forward + backward).sum(axis=2).max(axis=0)
    starts = np.cumsum([0.0, *(of_microbatch * step.step_s / (of_microbatch.sum() or 1.0))])
    for row, rank in enumerate(shown.tolist()):
        for k in range(batch.topology.microbatches):
            left = float(starts[k])
            for u, alpha, seconds in (
                *((u, 1.0, forward[rank, k, u]) for u in range(len(batch.units))),
                *((u, 0.5, backward[rank, k, u]) for u in reversed(range(len(batch.units)))),
            ):
                axes.barh(row, seconds * scale, left=left * scale, height=0.8, color=_COLOURS[u % len(_COLOURS)], alpha=alpha)
                left += float(seconds)
    axes.set_xlim(0, step.step_s * scale * 1.012)
    axes.set_ylim(shown.size - 0.4, -0.6)
    axes.set_yticks(range(shown.size), [f"rank {rank}" for rank in shown.tolist()], fontsize=8, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=QUIET, labelsize=8)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.set_xlabel(
        f"one global batch over time ({unit}): forward, backward (pale), then waiting and exchanging", color=QUIET, fontsize=9
    )
    handles = [Patch(facecolor=_COLOURS[u % len(_COLOURS)], label=name) for u, name in enumerate(batch.units)]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.005, 1.0), ncols=5, frameon=False, fontsize=9, labelcolor=INK,
        handlelength=1.2, borderaxespad=0.1,
    )  # fmt: skip
