"""`headrace plan`: plans one global batch from a cost table."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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

MAX_REPLICAS, MAX_MICROBATCHES = 16, 64  # most rows of the two tables that are printed
COST_TABLE_HELP = """\
A cost table has a column sample_id (int64, all different) and one column cost_<unit> for each unit: how long the whole
unit takes for the forward of that sample, in any one unit of time. Optional: memory_<unit> (activations that the unit
keeps; without them, the costs stand in), bytes_<unit> (what its stages pass on) and tokens. `headrace inspect DATASET
--costs FILE` makes one.
"""
_EPILOG = f"""\
{COST_TABLE_HELP}
examples:
  headrace inspect /data/charts --costs costs.parquet
  headrace plan costs.parquet --strategy joint --replicas 4 --microbatches 32 --encoder-stages 3 --llm-stages 5
  headrace plan costs.parquet --stages vision=2,audio=1,llm=5 --format json > plan.json

Deferred samples (or packs) wait: their next unit takes them in a later microbatch. Moved ones have their units on different
replicas, and what one unit makes of them travels. The JSON names, for each replica and microbatch, the samples of each unit;
`predicted` is what the simulator expects, and `planning_s` how many seconds planning took, compiled and without reading.
With --on-llm, `ranks` has what each rank does in turn (docs/simulate.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace plan` to its parser."""
    parser.epilog = _EPILOG
    add_table_arguments(parser)
    parser.add_argument("--strategy", default="auto", metavar="NAME", help=f"{STRATEGY_NAMES} (default: %(default)s)")
    add_pipeline_arguments(parser)
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="of what is printed; json is the whole plan (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there too")


def run(args: argparse.Namespace) -> int:
    """Run `headrace plan`: plan the global batch, and print and write the plan. Raises UserError."""
    from headrace.cli.costs.cost_table import read_cost_table
    from headrace.cli.planning.outcome import Outcome, plan_timed
    from headrace.cli.planning.rank_actions import ranks_json
    from headrace.cli.progress_bar import working
    from headrace.reorder_service.planning import warm_up

    [strategy] = check_strategies([args.strategy])
    problem = problem_of(args, read_cost_table(args.costs), strategy)
    with working(f"planning by {strategy}"):
        warm_up()
        plan, planning_s = plan_timed(problem.batch, strategy)
        outcome = Outcome.of(plan, problem.batch)
    document = json.dumps(problem.of_samples(plan).to_json() | {"planning_s": planning_s} | ranks_json(outcome))
    if args.out is not None:
        try:
            args.out.write_text(document + "\n", encoding="utf-8")
        except OSError as err:
            raise UserError(f"cannot write to {args.out}: {err.strerror}; name another file with --out") from err
    if not outcome.fits:
        print(none_fits_message(problem, [(strategy, float(outcome.peak_memory().max()))]), file=sys.stderr)
    if args.format == "json":
        print(document)
    else:
        print_uncut(_summary(outcome, problem, planning_s))
        print_uncut(_replicas(outcome, problem))
        print_uncut(_microbatches(outcome, problem, outcome.slowest(1)[0]))
    return 0


def print_uncut(table: Table) -> None:
    """Print a table on standard output without cutting off numbers.

    It is wider than the terminal if columns that do not wrap need that.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)
    needed = Measurement.get(console, console.options.update(max_width=1000), table)
    wraps = any(not column.no_wrap for column in table.columns)
    console.width = max(console.width, needed.minimum if wraps else needed.maximum)
    console.print(table)


def none_fits_message(problem: Problem, peaks: Sequence[tuple[str, float]]) -> str:
    """Say how much memory the plan that needs least would take, and what helps.

    peaks: (strategy, peak memory) of every plan.
    """
    strategy, least = min(peaks, key=lambda peak: peak[1])
    limit = problem.memory_in_words(problem.batch.execution.memory_limit)
    return (
        f"nothing fits into --memory-limit {limit}: the fullest stage needs {problem.memory_in_words(least)} with {strategy}; "
        "give the pipelines more stages, more microbatches or --checkpointing, or raise the limit"
    )


def _summary(outcome: Outcome, problem: Problem, planning_s: float) -> Table:
    from rich.table import Table

    plan, predicted = outcome.plan, outcome.predicted
    stages = ", ".join(f"{unit} {number}" for unit, number in plan.topology.stages.items())
    spread = ", ".join(f"{unit} {value:.1%}" for unit, value in outcome.spread().items())
    planned, limit = f"{len(outcome.batch.sample_ids):,} {problem.planned_noun}", problem.batch.execution.memory_limit
    table = Table(title=f"{problem.size} planned by {plan.strategy}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if plan.chosen:
        table.add_row("strategy chosen", plan.chosen)
    own = "".join(f", {unit} {count(number, 'replica')}" for unit, number in outcome.batch.execution.unit_replicas.items())
    pipelines = f"{count(plan.topology.replicas, 'replica')} x {count(plan.topology.microbatches, 'microbatch')}"
    table.add_row("pipelines", pipelines + own)
    table.add_row("stages", stages)
    unit = f" {problem.time_unit}" if problem.time_unit else " (in the unit of the costs)"
    table.add_row("step", f"{predicted.iteration_s:.4g}, lower bound {predicted.lower_bound_s:.4g}{unit}")
    table.add_row("stages idle", f"{predicted.bubble:.1%} of the time")
    table.add_row("microbatches differ by", f"{spread} (standard deviation over mean)")
    table.add_row("deferred", f"{outcome.num_deferred():,} of {planned}")
    table.add_row("moved", f"{outcome.num_moved():,} of {planned} between replicas")
    if heaviest := outcome.heaviest_between_nodes():
        volumes = ", ".join(f"{unit} {volume:.4g}" for unit, volume in heaviest.items())
        table.add_row("to other nodes", f"{volumes} at most from one rank")
    peak = f"{problem.memory_in_words(float(outcome.peak_memory().max()))} on the fullest stage"
    if limit < math.inf:
        peak += f", {'within' if outcome.fits else 'over'} the limit of {problem.memory_in_words(limit)}"
    table.add_row("peak memory", peak)
    table.add_row("planned in", f"{planning_s * 1e3:.2f} ms")
    return table


def _replicas(outcome: Outcome, problem: Problem) -> Table:

    units, loads = outcome.batch.units, outcome.loads()
    filled, samples = outcome.batch.occupied(outcome.slots).sum(axis=1), outcome.num_samples().sum(axis=2)
    deferred = outcome.num_samples(outcome.deferred()).sum(axis=(0, 2))
    memory = outcome.peak_memory().max(axis=1)
    head = ("replica", problem.planned_noun, "filled", *units, "deferred", "memory")
    table = _table_of_numbers("Replicas: loads", head)
    for r in outcome.slowest(MAX_REPLICAS):
        totals = [f"{load:.4g}" for load in loads[r].sum(axis=0)]
        held = str(samples[units.index("llm"), r])
        table.add_row(str(r), held, str(filled[r]), *totals, str(deferred[r]), problem.memory_in_words(float(memory[r])))
    if len(loads) > MAX_REPLICAS:
        table.caption = f"the slowest {MAX_REPLICAS} of {len(loads):,}"
    return table


def _microbatches(outcome: Outcome, problem: Problem, replica: int) -> Table:
    units, loads = outcome.batch.units, outcome.loads()[replica]
    samples = outcome.num_samples()[:, replica]
    deferred = outcome.num_samples(outcome.deferred())[:, replica].sum(axis=0)
    title = f"Microbatches of replica {replica}, the slowest: load ({problem.planned_noun})"
    table = _table_of_numbers(title, ("microbatch", *units, "deferred"))
    for k in range(min(len(loads), MAX_MICROBATCHES)):
        cells = [f"{loads[k, u]:.4g} ({samples[u, k]})" for u in range(len(units))]
        table.add_row(str(k), *cells, str(deferred[k]))
    if len(loads) > MAX_MICROBATCHES:
        table.caption = f"and {len(loads) - MAX_MICROBATCHES:,} more"
    return table


def _table_of_numbers(title: str, head: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, justify="right", no_wrap=True)
    return table
