"""The same global batches on as many GPUs in other placements of their units: the rows of `headrace compare --placements`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.plan import LLM

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.cli.planning.problem import Problem
    from headrace.cli.progress_bar import ProgressBar
    from headrace.plan import StepPlan
    from headrace.reorder_service.planning.batch import Batch
    from headrace.reorder_service.planning.orchestration.candidate import Placement

PLACEMENT_NAMES: tuple[Placement, ...] = ("disaggregated", "nested", "encoders-first", "colocated")
AUTO = "auto"
_ALIKE = 5e-4  # of a step: what is not seen in the percentages of the table
NOTE = (
    "One layout of each placement, with the strategy that auto chose for it. Weights, links and the exchange of gradients are "
    "left out: headrace orchestrate looks through all layouts with them (docs/orchestrate.md)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRow:
    """The simulated steps of one placement, as means over global batches."""

    placement: Placement
    units: dict[str, tuple[int, int]]
    """By unit, replicas and stages; empty where every GPU has all units."""
    gpus: int
    microbatches: int
    chosen: tuple[str, ...]
    """The strategies that `auto` took, of all batches."""
    iteration_s: float
    speedup: float
    """How many times as fast a step is as with GPUs of its own for every unit."""
    bubble: float
    """Share of all GPUs' time in which they are idle."""
    peak_memory: float
    """Activations of the fullest GPU at the worst moment, in the unit of `Batch.memory`."""
    fits: bool

    def why_it_loses(self, best: PlacementRow) -> str:
        """Return in words why it cannot be had, or what it spends more of than the best one; nothing for that itself if it fits.

        All have the same samples and GPUs, so that a longer step is time in which GPUs wait, or what microbatches take besides
        their samples.
        """
        if not self.fits:
            return "holds more than the memory limit"
        if self is best:
            return ""
        longer_s = self.iteration_s - best.iteration_s
        waiting_s = self.bubble * self.iteration_s - best.bubble * best.iteration_s
        if longer_s <= _ALIKE * best.iteration_s:
            return "is as fast"
        if waiting_s > longer_s / 2:
            return f"its GPUs wait {self.bubble:.0%} of the time (the best: {best.bubble:.0%})"
        return "its microbatches take more besides their samples"

    def to_json(self, best: PlacementRow) -> dict[str, Any]:
        """Return the public JSON form, with why it loses."""
        return {
            "placement": self.placement,
            "gpus": self.gpus,
            **({"units": {unit: {"dp": dp, "pp": pp} for unit, (dp, pp) in self.units.items()}} if self.units else {}),
            "microbatches": self.microbatches,
            "chosen": ", ".join(self.chosen),
            "iteration_s": self.iteration_s,
            "speedup": self.speedup,
            "bubble": self.bubble,
            "peak_memory": self.peak_memory,
            "fits": self.fits,
            "loses": self.why_it_loses(best),
        }


def add_placements_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the placements."""
    parser.add_argument(
        "--placements",
        default="",
        metavar="NAME,...",
        help=f"compare the placements of units on as many GPUs too: all, or some of {', '.join(PLACEMENT_NAMES)} (default: none)",
    )


def placements_asked(args: argparse.Namespace) -> list[Placement]:
    """Return the names that the option gives, each once, the first that against which all are measured. Raises UserError."""
    given = [name.strip() for name in args.placements.split(",") if name.strip()]
    for name in given:
        if name not in (*PLACEMENT_NAMES, "all"):
            raise UserError(f"no placement {name!r}; there are {', '.join(PLACEMENT_NAMES)}, and all")
    for flag, value in (("--on-llm", args.on_llm), ("--exchange", args.exchange), ("--stage-loads", args.stage_loads)):
        if given and value:
            raise UserError(f"{flag} is of one layout, and --placements compares several: take either away")
    return [name for name in PLACEMENT_NAMES if given and (name == PLACEMENT_NAMES[0] or name in given or "all" in given)]


def placement_rows(
    names: Sequence[Placement], problems: Sequence[Problem], most_stages: int | None, bar: ProgressBar
) -> list[PlacementRow]:
    """Plan and simulate global batches in the named placements, and say on standard error which cannot have them.

    most_stages: of the LLM, if its layers are known. bar: shows how far it is.
    """
    from headrace.cli.planning.outcome import time_ratio
    from headrace.reorder_service.planning.orchestration.same_gpus import gpus_of, placed
    from headrace.reorder_service.planning.strategies import plan_of

    rows: list[PlacementRow] = []
    bar.begin("placements simulated", len(names))
    for name in names:
        bar.advance()
        try:
            batches = [placed(problem.batch, name, most_stages) for problem in problems]
            plans = [plan_of(AUTO, batch) for batch in batches]
        except ValueError as err:
            print(f"{name} is left out: {err}", file=sys.stderr)
            continue
        predicted = [plan.predicted for plan in plans if plan.predicted is not None]
        total = sum(one.iteration_s for one in predicted)
        mean = total / len(predicted)
        batch, peak = batches[0], max(_peak_memory(plan, batch) for plan, batch in zip(plans, batches, strict=True))
        counts = zip(batch.units, batch.unit_replicas, batch.topology.stages.values(), strict=True)
        rows.append(
            PlacementRow(
                placement=name,
                units={} if batch.execution.colocated else {unit: (dp, pp) for unit, dp, pp in counts},
                gpus=sum(gpus_of(problems[0].batch).values()),
                microbatches=batch.topology.microbatches,
                chosen=tuple(sorted({plan.chosen for plan in plans})),
                iteration_s=mean,
                speedup=time_ratio(rows[0].iteration_s, mean) if rows else 1.0,
                bubble=sum(one.iteration_s * one.bubble for one in predicted) / total if total > 0 else 0.0,
                peak_memory=peak,
                fits=peak <= problems[0].batch.execution.memory_limit,
            )
        )
    return rows


def best_placement(rows: Sequence[PlacementRow]) -> PlacementRow:
    """Return the row with the shortest step of those that fit the memory, if any does."""
    return min(rows, key=lambda row: (not row.fits, row.iteration_s))


def placements_table(rows: Sequence[PlacementRow], problem: Problem) -> Table:
    """Return the table that is printed below that of the strategies."""
    from rich.table import Table

    title = f"SIMULATED placements on the same {rows[0].gpus:,} GPUs; units: replicas x stages"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    texts = ("placement", "units", "auto took", "why it loses")
    for name in ("placement", "units", "K", "auto took", "step", "x", "idle", "memory", "why it loses"):
        table.add_column(name, justify="left" if name in texts else "right", no_wrap=True)
    best = best_placement(rows)
    for row in rows:
        memory = problem.memory_in_words(row.peak_memory)
        table.add_row(
            row.placement,
            ", ".join(f"{unit} {dp} x {pp}" for unit, (dp, pp) in row.units.items()) or "all on every GPU (FSDP)",
            str(row.microbatches),
            ", ".join(row.chosen),
            f"{row.iteration_s:.4g}",
            f"{row.speedup:.2f}",
            f"{row.bubble:.0%}",
            memory,
            row.why_it_loses(best),
            style="bold" if row is best and row.fits else None,
        )
    return table


def _peak_memory(plan: StepPlan, batch: Batch) -> float:
    """Return the most activations that a GPU holds, in the unit of `Batch.memory`: on one that has all units, of a microbatch."""
    import numpy as np

    from headrace.cli.planning.outcome import Outcome
    from headrace.reorder_service.planning.batch import slots_of

    if not batch.execution.colocated:
        return float(Outcome.of(plan, batch).peak_memory().max())
    keeps = np.array([batch.execution.backward_factor(unit) > 0 for unit in batch.units])
    slots = slots_of(plan, batch.sample_ids)[batch.units.index(LLM)]
    return float(np.bincount(slots, weights=(batch.memory * keeps[:, None]).sum(axis=0)).max())
