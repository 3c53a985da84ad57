"""`headrace simulate`: plans one global batch of a cost table with every strategy, and simulates the plans."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.output import attempted, make_folder
from headrace.cli.planning.baseline_rows import add_baselines_argument, baseline_rows, baselines_asked, baselines_table
from headrace.cli.planning.plan import COST_TABLE_HELP, none_fits_message, print_uncut
from headrace.cli.planning.planning_options import (
    STRATEGY_NAMES,
    add_pipeline_arguments,
    add_table_arguments,
    check_strategies,
    problem_of,
)
from headrace.cli.planning.problem import count
from headrace.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.cli.planning.outcome import Outcome
    from headrace.cli.planning.problem import Problem

BASELINE = "random"
_EPILOG = f"""\
{COST_TABLE_HELP}
examples:
  headrace simulate costs.parquet --replicas 4 --microbatches 32 --encoder-stages 3 --llm-stages 5
  headrace simulate costs.parquet --strategies disttrain,joint --schedule interleaved --chunks 2
  headrace simulate costs.parquet --replicas 2 --stages encoder=1,llm=4 --dp encoder=8 --on-llm encoder

For each strategy, DIR gets timeline-<strategy>.png (all on the same time axis) and trace-<strategy>.json, which
ui.perfetto.dev opens: a process per replica, a thread per stage; those of auto are the ones of the strategy that it took.
With --on-llm, a row and a thread per rank, which takes turns between its units; in the JSON, `ranks` has these turns
(docs/simulate.md).
How to read the table:
  x            how many times as fast as samples in arrival order (random)
  over bound   time over the lower bound: what no order and no schedule could beat
  idle         share of the time in which stages wait
  spread       of the microbatches' loads: standard deviation over mean, by unit
  memory       activations of the fullest stage at the worst moment, and whether that is over --memory-limit
  filled       microbatches that hold samples, of all replicas
  deferred     samples (or packs) whose next unit takes them in a later microbatch
  moved        those whose units lie on different replicas: what a unit makes of them travels
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace simulate` to its parser."""
    parser.epilog = _EPILOG
    add_table_arguments(parser)
    parser.add_argument("--strategies", default="all", metavar="NAME,...", help=f"some of {STRATEGY_NAMES} (default: all)")
    add_baselines_argument(parser)
    add_pipeline_arguments(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("headrace-simulate"), metavar="DIR", help="pictures and traces (default: %(default)s)"
    )
    parser.add_argument("--no-pictures", action="store_true", help="write nothing to DIR, neither pictures nor traces")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run `headrace simulate`: plan with every strategy, and print, draw and trace the simulated steps. Raises UserError."""
    from headrace.cli.costs.cost_table import read_cost_table
    from headrace.cli.planning.outcome import Outcome, plan_timed
    from headrace.cli.progress_bar import ProgressBar
    from headrace.reorder_service.planning import warm_up

    names = check_strategies(name.strip() for name in args.strategies.split(","))
    asked = baselines_asked(args)
    problem = problem_of(args, read_cost_table(args.costs))
    if not args.no_pictures:
        make_folder(args.out)
    outcomes: list[Outcome] = []
    planning_s: list[float] = []
    with ProgressBar() as bar:
        strategies = dict.fromkeys([BASELINE, *names])
        bar.begin("strategies planned", len(strategies))
        warm_up()
        for name in strategies:
            try:
                plan, seconds = plan_timed(problem.batch, name)
                outcomes.append(Outcome.of(plan, problem.batch))
                planning_s.append(seconds)
            except UserError as err:
                if name == BASELINE:
                    raise
                print(f"{name} is left out: {err}", file=sys.stderr)
            bar.advance()
        rows = [_row(outcome, outcomes[0], seconds) for outcome, seconds in zip(outcomes, planning_s, strict=True)]
        best_s = min(rows, key=lambda row: (not row["fits"], row["iteration_s"]))["iteration_s"]
        baselines = baseline_rows(asked, [problem.batch], arrival_s=rows[0]["iteration_s"], best_s=best_s, bar=bar)
    failure = None
    if not args.no_pictures:
        source = Path(args.costs).stem if args.costs != "-" else "standard input"
        _, failure = attempted(args.out, lambda: _draw_all(rows, outcomes, source, problem, args.out))
    if not any(row["fits"] for row in rows):
        print(none_fits_message(problem, [(row["strategy"], row["peak_memory"]) for row in rows]), file=sys.stderr)
    if args.format == "json":
        compared = {"baselines": [row.to_json() for row in baselines]} if asked else {}
        print(json.dumps(_settings(problem) | {"strategies": rows} | compared))
    else:
        print_uncut(_table(problem, rows))
        if baselines:
            print_uncut(baselines_table(baselines))
        if not args.no_pictures and failure is None:
            print(f"pictures and traces (for ui.perfetto.dev) in {args.out}/")
    if failure is not None:
        raise failure
    return 0


def _row(outcome: Outcome, baseline: Outcome, planning_s: float) -> dict[str, Any]:
    """Return the public JSON form of one strategy, except for the files that are written."""
    from headrace.cli.planning.outcome import time_ratio
    from headrace.cli.planning.rank_actions import ranks_json

    predicted = outcome.predicted
    return {
        "strategy": outcome.plan.strategy,
        **({"chosen": outcome.plan.chosen} if outcome.plan.chosen else {}),
        "iteration_s": predicted.iteration_s,
        "speedup": time_ratio(baseline.predicted.iteration_s, predicted.iteration_s),
        "lower_bound_s": predicted.lower_bound_s,
        "over_bound": time_ratio(predicted.iteration_s, predicted.lower_bound_s),
        "bubble": predicted.bubble,
        "spread": outcome.spread(),
        "peak_memory": float(outcome.peak_memory().max()),
        "fits": outcome.fits,
        "filled": outcome.num_filled(),
        "deferred": outcome.num_deferred(),
        "moved": outcome.num_moved(),
        **({"heaviest_between_nodes": heaviest} if (heaviest := outcome.heaviest_between_nodes()) else {}),
        "planning_s": planning_s,
        **ranks_json(outcome),
    }


def _settings(problem: Problem) -> dict[str, Any]:
    """Return the public JSON form of the settings that all strategies share, without those that are unknown or not asked for."""
    batch = problem.batch
    limit, packs = batch.execution.memory_limit, problem.packs
    return {
        "samples": len(problem.samples.sample_ids),
        **({} if packs is None else {"packs": len(batch.sample_ids), "pack_fill": problem.pack_fill}),
        "replicas": batch.topology.replicas,
        **({"dp": dict(batch.execution.unit_replicas)} if batch.execution.unit_replicas else {}),
        "microbatches": batch.topology.microbatches,
        "stages": batch.topology.stages,
        "schedule": batch.execution.schedule,
        **({"on_llm": sorted(sharing.guests), "sharing": sharing.order} if (sharing := batch.execution.sharing) else {}),
        "seed": batch.seed,
        **({"memory_limit": limit} if limit < math.inf else {}),
        **({"memory_unit": problem.memory_unit} if problem.memory_unit else {}),
        **({"time_unit": problem.time_unit} if problem.time_unit else {}),
    }


def _draw_all(rows: list[dict[str, Any]], outcomes: Sequence[Outcome], source: str, problem: Problem, out: Path) -> None:
    """Write the picture and the trace of every plan, and add their names to the rows.

    A plan that has been drawn already is not drawn again for `auto`.
    """
    from headrace.cli.planning.timeline import draw_timeline
    from headrace.cli.planning.trace_events import write_trace

    end = max(row["iteration_s"] for row in rows)
    files: dict[str, dict[str, str]] = {}
    for row, outcome in zip(rows, outcomes, strict=True):
        name = row["strategy"]
        if row.get("chosen") not in files:
            picture, title = out / f"timeline-{name}.png", _title(source, problem, outcome)
            draw_timeline(picture, outcome, end=end, title=title, unit=problem.time_unit)
            files[name] = {"picture": str(picture), "trace": str(write_trace(out / f"trace-{name}.json", outcome))}
        row |= files[row["chosen"] if row.get("chosen") in files else name]


def _title(source: str, problem: Problem, outcome: Outcome) -> str:
    topology = problem.batch.topology
    microbatches = count(topology.microbatches, "microbatch")
    if outcome.num_filled() < problem.batch.num_slots:
        microbatches = f"up to {microbatches}"
    return f"One step of {source}: {problem.size} on {count(topology.replicas, 'replica')}, {microbatches}{outcome.who_shares}"


def _table(problem: Problem, rows: Sequence[dict[str, Any]]) -> Table:
    from rich.table import Table

    stages = problem.batch.topology.stages
    title = f"SIMULATED: {problem.size}; stages: {', '.join(f'{unit} {number}' for unit, number in stages.items())}"
    spread = f"spread in %\n{' / '.join(stages)}"
    filled = f"filled\nof {problem.batch.num_slots:,}"
    head = ("strategy", "step", "x", "over\nbound", "idle", spread, "memory", filled, "deferred", "moved", "planned\nin ms")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in head:
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    best = min(rows, key=lambda row: (not row["fits"], row["iteration_s"]))
    for row in rows:
        memory = problem.memory_in_words(row["peak_memory"])
        table.add_row(
            f"{row['strategy']}: {row['chosen']}" if "chosen" in row else row["strategy"],
            f"{row['iteration_s']:.4g}",
            f"{row['speedup']:.2f}",
            f"{row['over_bound']:.3f}",
            f"{row['bubble']:.0%}",
            " / ".join(f"{100 * value:.1f}" for value in row["spread"].values()),
            memory if row["fits"] else f"{memory}, over the limit",
            f"{row['filled']:,}",
            f"{row['deferred']:,}",
            f"{row['moved']:,}",
            f"{row['planning_s'] * 1e3:.1f}",
            style="bold" if (row["fits"], row["iteration_s"]) == (best["fits"], best["iteration_s"]) else None,
        )
    return table
