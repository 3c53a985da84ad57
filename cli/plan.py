"""`headrace plan`: the plan of one global batch, from a cost table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from cli.planning_options import STRATEGY_NAMES, add_pipeline_arguments, add_table_arguments, check_strategies, problem_of
from headrace.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from cli.outcome import Outcome

MAX_REPLICAS, MAX_MICROBATCHES = 16, 64  # rows of the tables
COST_TABLE_HELP = """\
A cost table has a column sample_id (int64, all different) and one column cost_<unit> for each unit: how long the whole
unit takes for the forward of that sample, in any one unit of time. Optional: memory_<unit> (activations that the unit
keeps), bytes_<unit> (what its stages pass on) and tokens. `headrace inspect DATASET --costs FILE` makes one.
"""
_EPILOG = f"""\
{COST_TABLE_HELP}
example:
  headrace inspect /data/charts --costs costs.parquet
  headrace plan costs.parquet --strategy joint --replicas 4 --microbatches 32 --encoder-stages 3 --llm-stages 5
  headrace plan costs.parquet --stages vision=2,audio=1,llm=5 --format json > plan.json

The JSON names, for each replica and microbatch, the samples of each unit; `predicted` is what the simulator expects, and
`planning_s` how many seconds planning took, compiled and without reading the table.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = _EPILOG
    add_table_arguments(parser)
    parser.add_argument("--strategy", default="auto", metavar="NAME", help=f"{STRATEGY_NAMES} (default: %(default)s)")
    add_pipeline_arguments(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="the plan is JSON (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there too")


def run(args: argparse.Namespace) -> int:
    """Plan, and print the plan."""
    from cli.cost_table import read_cost_table
    from cli.outcome import Outcome, plan_timed
    from reorder_service.planning import warm_up

    [strategy] = check_strategies([args.strategy])
    problem = problem_of(args, read_cost_table(args.costs))
    warm_up()
    plan, planning_s = plan_timed(problem.batch, strategy)
    document = json.dumps(problem.of_samples(plan).to_json() | {"planning_s": planning_s})
    if args.out is not None:
        try:
            args.out.write_text(document + "\n", encoding="utf-8")
        except OSError as err:
            raise UserError(f"cannot write to {args.out}: {err.strerror}; name another file with --out") from err
    if args.format == "json":
        print(document)
    else:
        _print_tables(Outcome.of(plan, problem.batch), problem.size, planning_s)
    return 0


def _print_tables(outcome: Outcome, size: str, planning_s: float) -> None:
    from rich.console import Console

    console = Console()
    console.print(_summary(outcome, size, planning_s))
    console.print(_replicas(outcome))
    console.print(_microbatches(outcome, outcome.slowest(1)[0]))


def _summary(outcome: Outcome, size: str, planning_s: float) -> Table:
    from rich.table import Table

    plan, predicted = outcome.plan, outcome.predicted
    stages = ", ".join(f"{unit} {count}" for unit, count in plan.topology.stages.items())
    spread = ", ".join(f"{unit} {value:.1%}" for unit, value in outcome.spread().items())
    table = Table(title=f"{size} planned by {plan.strategy}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if plan.chosen:
        table.add_row("strategy chosen", plan.chosen)
    table.add_row("pipelines", f"{plan.topology.replicas} replicas x {plan.topology.microbatches} microbatches")
    table.add_row("stages", stages)
    table.add_row("step", f"{predicted.iteration_s:.4g}, lower bound {predicted.lower_bound_s:.4g} (in the unit of the costs)")
    table.add_row("stages idle", f"{predicted.bubble:.1%} of the time")
    table.add_row("microbatches differ by", f"{spread} (standard deviation over mean)")
    table.add_row("deferred", f"{outcome.num_deferred():,} of {len(outcome.batch.sample_ids):,}")
    table.add_row("peak memory", f"{outcome.peak_memory().max():.4g} on the fullest stage")
    table.add_row("planned in", f"{planning_s * 1e3:.2f} ms")
    return table


def _replicas(outcome: Outcome) -> Table:
    from rich.table import Table

    units, loads = outcome.batch.units, outcome.loads()
    filled, samples = outcome.batch.occupied(outcome.slots).sum(axis=1), outcome.samples().sum(axis=2)
    deferred = outcome.samples(outcome.deferred()).sum(axis=(0, 2))
    memory = outcome.peak_memory().max(axis=1)
    table = Table("replica", "samples", "filled", *units, "deferred", "memory", title="Replicas: loads", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for r in range(min(len(loads), MAX_REPLICAS)):
        totals = [f"{load:.4g}" for load in loads[r].sum(axis=0)]
        count = str(samples[units.index("llm"), r])
        table.add_row(str(r), count, str(filled[r]), *totals, str(deferred[r]), f"{memory[r]:.4g}")
    _say_rest(table, len(loads) - MAX_REPLICAS)
    return table


def _microbatches(outcome: Outcome, replica: int) -> Table:
    from rich.table import Table

    units, loads = outcome.batch.units, outcome.loads()[replica]
    samples = outcome.samples()[:, replica]
    deferred = outcome.samples(outcome.deferred())[:, replica].sum(axis=0)
    title = f"Microbatches of replica {replica}, the slowest: load (samples)"
    table = Table("microbatch", *units, "deferred", title=title, title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for k in range(min(len(loads), MAX_MICROBATCHES)):
        cells = [f"{loads[k, u]:.4g} ({samples[u, k]})" for u in range(len(units))]
        table.add_row(str(k), *cells, str(deferred[k]))
    _say_rest(table, len(loads) - MAX_MICROBATCHES)
    return table


def _say_rest(table: Table, rest: int) -> None:
    if rest > 0:
        table.caption = f"and {rest:,} more"
