"""`headrace simulate`: what every strategy would make of one global batch, from a cost table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.plan import COST_TABLE_HELP
from cli.planning_options import STRATEGY_NAMES, add_pipeline_arguments, add_table_arguments, check_strategies, problem_of
from headrace.errors import UserError

if TYPE_CHECKING:
    from cli.outcome import Outcome
    from cli.planning_options import Problem

BASELINE = "random"
WIDTH = 120  # columns of the table where standard output is no terminal
_EPILOG = f"""\
{COST_TABLE_HELP}
example:
  headrace simulate costs.parquet --replicas 4 --microbatches 32 --encoder-stages 3 --llm-stages 5
  headrace simulate costs.parquet --strategies disttrain,joint --schedule interleaved --chunks 2

For each strategy, DIR gets timeline-<strategy>.png (all on the same time axis) and trace-<strategy>.json, which
ui.perfetto.dev opens: a process per replica, a thread per stage. How to read the table:
  x            how many times as fast as samples in arrival order (random)
  over bound   time over the lower bound: what no order and no schedule could beat
  idle         share of the time in which stages wait
  spread       of the microbatches' loads: standard deviation over mean, by unit
  memory       activations of the fullest stage at the worst moment
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = _EPILOG
    add_table_arguments(parser)
    parser.add_argument("--strategies", default="all", metavar="NAME,...", help=f"some of {STRATEGY_NAMES} (default: all)")
    add_pipeline_arguments(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("headrace-simulate"), metavar="DIR", help="pictures and traces (default: %(default)s)"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Plan with every strategy, and print, draw and trace what comes of it."""
    from cli.cost_table import read_cost_table
    from cli.outcome import Outcome, plan_timed
    from reorder_service.planning import warm_up

    names = check_strategies(name.strip() for name in args.strategies.split(","))
    problem = problem_of(args, read_cost_table(args.costs))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UserError(f"cannot write to {args.out}: {err.strerror}; name another folder with --out") from err
    warm_up()
    outcomes: list[Outcome] = []
    planning_s: list[float] = []
    for name in dict.fromkeys([BASELINE, *names]):
        try:
            plan, seconds = plan_timed(problem.batch, name)
        except UserError as err:
            if name == BASELINE:
                raise
            print(f"{name} is left out: {err}", file=sys.stderr)
            continue
        outcomes.append(Outcome.of(plan, problem.batch))
        planning_s.append(seconds)
    rows = [_row(outcome, outcomes[0], seconds) for outcome, seconds in zip(outcomes, planning_s, strict=True)]
    title, end = _title(args.costs, problem), max(row["iteration_s"] for row in rows)
    for row, outcome in zip(rows, outcomes, strict=True):
        row |= _draw(outcome, title, end, args.out)
    _print(problem, rows, args.format)
    return 0


def _row(outcome: Outcome, baseline: Outcome, planning_s: float) -> dict[str, Any]:
    """The public JSON form of one strategy, less its files."""
    predicted = outcome.predicted
    return {
        "strategy": outcome.plan.strategy,
        "chosen": outcome.plan.chosen,
        "iteration_s": predicted.iteration_s,
        "speedup": _ratio(baseline.predicted.iteration_s, predicted.iteration_s),
        "lower_bound_s": predicted.lower_bound_s,
        "over_bound": _ratio(predicted.iteration_s, predicted.lower_bound_s),
        "bubble": predicted.bubble,
        "spread": outcome.spread(),
        "peak_memory": float(outcome.peak_memory().max()),
        "deferred": outcome.num_deferred(),
        "planning_s": planning_s,
    }


def _ratio(above: float, below: float) -> float:
    """1 where nothing costs anything."""
    return above / below if below > 0 else 1.0


def _title(costs: str, problem: Problem) -> str:
    topology, source = problem.batch.topology, Path(costs).stem if costs != "-" else "standard input"
    return f"{source}: {problem.size} on {topology.replicas} replicas, {topology.microbatches} microbatches"


def _draw(outcome: Outcome, title: str, end: float, out: Path) -> dict[str, str]:
    from cli.timeline import draw_timeline
    from cli.trace import write_trace

    strategy = outcome.plan.strategy
    return {
        "picture": str(draw_timeline(out / f"timeline-{strategy}.png", outcome, end=end, title=title)),
        "trace": str(write_trace(out / f"trace-{strategy}.json", outcome)),
    }


def _print(problem: Problem, rows: list[dict[str, Any]], output: str) -> None:
    """On standard output, as `output` (`json` or `table`) says."""
    stages = problem.batch.topology.stages
    if output == "json":
        print(json.dumps({"samples": len(problem.samples.sample_ids), "stages": stages, "strategies": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    title = f"{problem.size}; stages: {', '.join(f'{unit} {count}' for unit, count in stages.items())}"
    spread = f"spread in %\n{' / '.join(stages)}"
    head = ("strategy", "step", "x", "over\nbound", "idle", spread, "memory", "deferred", "planned\nin ms")
    table = Table(*head, title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for column in table.columns:
        column.justify, column.no_wrap = "left" if column is table.columns[0] else "right", True
    fastest = min(row["iteration_s"] for row in rows)
    for row in rows:
        table.add_row(
            f"{row['strategy']}: {row['chosen']}" if row["chosen"] else row["strategy"],
            f"{row['iteration_s']:.4g}",
            f"{row['speedup']:.2f}",
            f"{row['over_bound']:.3f}",
            f"{row['bubble']:.0%}",
            " / ".join(f"{100 * value:.1f}" for value in row["spread"].values()),
            f"{row['peak_memory']:.3g}",
            f"{row['deferred']:,}",
            f"{row['planning_s'] * 1e3:.1f}",
            style="bold" if row["iteration_s"] == fastest else None,
        )
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    folder = Path(rows[0]["picture"]).parent
    console.print(f"pictures and traces (for ui.perfetto.dev) in {folder}/", markup=False, highlight=False, soft_wrap=True)
