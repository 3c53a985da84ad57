"""`headrace train --emulate COSTS`: planned steps on real processes and messages, with sleeps for computing.

It shows what the simulator predicts for a cost table beside what the pipeline runtime measures. Every time is marked EMULATED.

Samples that go forward in one microbatch and, because of deferral, backward in several pass from stage to stage in portions. The
simulator, too, lets the next stage start as soon as these come fast enough (`parts_of_slots`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.former_names import also_called
from headrace.cli.planning.planning_options import STRATEGY_NAMES, add_pipeline_arguments, check_strategies, problem_of
from headrace.cli.planning.problem import count
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.cli.costs.cost_table import CostTable
    from headrace.cli.planning.emulated_ranks import MeasuredStep
    from headrace.cli.planning.outcome import Outcome


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `headrace train` that go with --emulate, among them those of the pipelines."""
    group = parser.add_argument_group("EMULATED run, with --emulate")
    group.add_argument(
        "--global-batch", type=int, metavar="N", help="rows of COSTS in a step, one batch after the other (default: all)"
    )
    also_called(group, "--global-batch", "--batch")
    group.add_argument("--steps", type=int, default=1, metavar="N", help="(default: %(default)s)")
    group.add_argument("--strategy", default="auto", metavar="NAME", help=f"{STRATEGY_NAMES} (default: %(default)s)")
    group.add_argument(
        "--time-scale", type=float, default=1.0, metavar="X", help="seconds that one unit of the costs takes (default: 1)"
    )
    group.add_argument("--trace", type=Path, metavar="FILE", help="write what was measured, for ui.perfetto.dev")
    group.add_argument("--out", type=Path, metavar="FILE", help="draw the last step as predicted and as measured")
    add_pipeline_arguments(parser, of=" in the EMULATED run")


def refuse_options(args: argparse.Namespace) -> None:
    """Raise UserError if an option of `add_options` is given; called for commands without --emulate."""
    options = argparse.ArgumentParser()
    add_options(options)
    for name, default in vars(options.parse_args([])).items():
        if getattr(args, name) != default:
            raise UserError(f"--{name.replace('_', '-')} goes with --emulate COSTS only: take it away, or add that")


def run(args: argparse.Namespace) -> int:
    """Run `headrace train --emulate`: plan and emulate every step, print the figures, and write the trace and the picture.

    Raises UserError.
    """
    from headrace.cli.costs.cost_table import read_cost_table
    from headrace.cli.planning.outcome import Outcome, plan_timed
    from headrace.cli.planning.problem import Problem
    from headrace.cli.progress_bar import ProgressBar
    from headrace.reorder_service.planning import warm_up

    _check(args)
    [strategy] = check_strategies([args.strategy])
    table = _scaled(read_cost_table(args.emulate), args.time_scale)
    whole = problem_of(args, table, strategy)
    execution = dataclasses.replace(whole.batch.execution, microbatch_s={})  # nobody sleeps for it

    from headrace.cli.planning.emulated_ranks import (
        EmulatedRanks,  # imported here: it takes three seconds, for which an error in the arguments should not wait
        pipeline_of,
    )
    from headrace.trainer.pipeline.emulated_stage import EMULATED

    warm_up()
    steps: list[tuple[Outcome, MeasuredStep]] = []
    say = args.format == "table"
    num_ranks = pipeline_of(whole.batch).world_size
    if say:
        print(
            f"{EMULATED}: {whole.size} a step on {count(num_ranks, 'rank')}, each a process that sleeps for computing",
            flush=True,
        )
    with EmulatedRanks(num_ranks) as ranks, ProgressBar() as bar:
        if not say:
            bar.begin("steps emulated", args.steps)
        for step in range(args.steps):
            rows = _rows(table, args.global_batch, step)
            batch = Problem.of(rows, whole.batch.topology, execution, seed=args.seed, pack_tokens=args.pack_tokens).batch
            outcome = Outcome.of(plan_timed(batch, strategy)[0], batch)
            if step == 0:
                ranks.warm_up(outcome)
            steps.append((outcome, ranks.run(outcome)))
            if say:
                print(_line(step, *steps[-1], EMULATED), flush=True)
            else:
                bar.advance()
    if args.trace is not None:
        _write_trace(args.trace, [measured for _, measured in steps], EMULATED)
    if args.out is not None:
        _draw(
            args.out,
            *steps[-1],
            title=f"One step of {Path(args.emulate).name} as predicted and as measured: {whole.size}",
            label=EMULATED,
        )
    if say:
        print(_summary([measured for _, measured in steps], EMULATED))
    else:
        print(json.dumps({"emulated": True, "time_scale": args.time_scale, "steps": [_row(*step) for step in steps]}))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.steps < 1:
        raise UserError(f"--steps must be at least 1, got {args.steps}")
    if not 0 < args.time_scale < math.inf:
        raise UserError(f"--time-scale must be positive and finite, got {args.time_scale}")
    if args.latency > 0 or args.bandwidth < math.inf:
        raise UserError("--latency and --bandwidth do not go with --emulate, whose messages really travel: take them away")
    if args.whole_backward:
        raise UserError("--whole-backward does not go with --emulate: the pipeline runtime splits backwards; take it away")
    if args.stage_loads or args.exchange:
        raise UserError("--stage-loads and --exchange do not go with --emulate, which sleeps for even stages: take them away")


def _scaled(table: CostTable, time_scale: float) -> CostTable:
    """Return the cost table with costs in seconds, `time_scale` per unit of the table, and the memory that it had."""
    costs = {unit: column * time_scale for unit, column in table.costs.items()}
    return dataclasses.replace(table, costs=costs, memory=table.memory or table.costs, time_unit="s")


def _rows(table: CostTable, batch: int | None, step: int) -> CostTable:
    """Return the rows of one step: steps take one batch of rows after the other, and start over where the table ends."""
    import numpy as np

    size = batch or len(table.sample_ids)
    return table.take((np.arange(size) + step * size) % len(table.sample_ids))


def _row(outcome: Outcome, measured: MeasuredStep) -> dict[str, Any]:
    """Return the public JSON form of an emulated step."""
    return {
        "strategy": outcome.plan.chosen or outcome.plan.strategy,
        "samples": len(outcome.batch.sample_ids),
        "predicted_s": outcome.predicted.iteration_s,
        "measured_s": measured.iteration_s,
        "overhead_per_action_s": statistics.median(measured.overheads_s),
        "oversleep": measured.oversleep,
    }


def _line(step: int, outcome: Outcome, measured: MeasuredStep, label: str) -> str:
    predicted_s, measured_s = outcome.predicted.iteration_s, measured.iteration_s
    difference = f" ({measured_s / predicted_s - 1:+.1%})" if predicted_s else ""
    return (
        f"{label} step {step} by {outcome.plan.chosen or outcome.plan.strategy}: "
        f"predicted {predicted_s:.4g} s, measured {measured_s:.4g} s{difference}"
    )


def _summary(measured: list[MeasuredStep], label: str) -> str:
    overhead_s = statistics.median(itertools.chain.from_iterable(step.overheads_s for step in measured))
    oversleep = statistics.mean(step.oversleep for step in measured)
    return f"{label} overhead of an action {overhead_s * 1e6:.0f} µs (median); sleeps are {oversleep:.2%} too long"


def _write_trace(path: Path, measured: list[MeasuredStep], label: str) -> None:
    from headrace.trainer.pipeline.events import trace

    document = trace((recording for step in measured for recording in step.recordings), label=label)
    try:
        path.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    except OSError as err:
        raise UserError(f"cannot write to {path}: {err.strerror}; name another file with --trace") from err


def _draw(path: Path, outcome: Outcome, measured: MeasuredStep, *, title: str, label: str) -> None:
    from headrace.cli.planning.pipeline_panel import Panel
    from headrace.cli.planning.timeline import draw_measured

    predicted = Panel.of(outcome)
    timeline, tracks = measured.timeline(outcome)
    reached = dataclasses.replace(outcome, predicted=measured.to_predicted(outcome))
    real = dataclasses.replace(predicted, outcome=reached, timeline=timeline, tracks=tracks)
    try:
        draw_measured(path, predicted, real, title=f"{title}, {outcome.plan.strategy}{outcome.who_shares}", label=label)
    except OSError as err:
        raise UserError(f"cannot write to {path}: {err.strerror}; name another file with --out") from err
