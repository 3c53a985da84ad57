"""`headrace compare`: what planning would gain on a data set, before anything is trained."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.dataset_costs import Estimator, add_model_arguments
from cli.inspect import add_reading_arguments, look, reading_spec
from cli.planning_options import (
    DEFAULT_MICROBATCHES,
    Problem,
    add_pipeline_arguments,
    check_numbers,
    check_strategies,
    execution_of,
    topology_of,
)
from headrace.errors import DatasetError, UserError

if TYPE_CHECKING:
    from cli.cost_table import CostTable
    from cli.gain import Gain
    from headrace.sample import Probe
    from reorder_service.planning.batch import Batch

BASELINE = "random"
NO_GAIN = 1.01
DEFAULT_GLOBAL_BATCH, DEFAULT_LIMIT = 512, 4096
MAX_BATCHES = 8  # enough for a mean; the rest of the samples would take longer and say the same
SAMPLES_PER_MICROBATCH = 4  # with as many, single samples no longer outweigh a microbatch in most data sets
_EPILOG = f"""\
DATASET is what `headrace inspect` takes, or a cost table (.parquet or .jsonl with columns cost_<unit>). Of a data set, headers
and texts are read, and the costs are counted in operations of --model. Samples are shuffled, dealt into global batches of
--global-batch, and every strategy plans each batch (at most {MAX_BATCHES}); the figures are those of all batches together.

examples:
  headrace compare /data/charts
  headrace compare s3://bucket/mixture --limit 4096 --model 8b --units vision,audio,llm --replicas 16 --num-stages 16
  headrace compare costs.parquet --schedule interleaved --chunks 2

DIR gets compare.png: a bar for each strategy, and the pipelines in arrival order above those of the best strategy.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="DATASET", help="folder, file, glob or URL of shards, or a cost table")
    parser.add_argument(
        "--limit", type=int, metavar="N", help=f"use N samples, evenly spread over the data set (default: {DEFAULT_LIMIT})"
    )
    parser.add_argument(
        "--global-batch", type=int, metavar="N", help=f"samples of a step (default: {DEFAULT_GLOBAL_BATCH}, or all there are)"
    )
    add_reading_arguments(parser)
    add_model_arguments(parser.add_argument_group("costs of a data set"))
    add_pipeline_arguments(parser, microbatches=f"{SAMPLES_PER_MICROBATCH} samples in each, 32 at most")
    parser.add_argument(
        "--out", type=Path, default=Path("headrace-compare"), metavar="DIR", help="for the picture (default: %(default)s)"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Estimate costs, plan with every strategy, and say what is gained."""
    from cli.gain import measure
    from cli.gain_picture import draw_gains
    from reorder_service.planning import warm_up

    for flag, number in (("--limit", args.limit), ("--global-batch", args.global_batch)):
        if number is not None and number < 1:
            raise UserError(f"{flag} must be at least 1, got {number}")
    check_numbers(args)
    problems, seconds = _problems(args)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UserError(f"cannot write to {args.out}: {err.strerror}; name another folder with --out") from err
    warm_up()
    gains = [measure(BASELINE, problems)]
    for strategy in check_strategies(["all"]):
        if strategy != BASELINE:
            try:
                gains.append(measure(strategy, problems))
            except UserError as err:
                print(f"{strategy} is left out: {err}", file=sys.stderr)
    picture = str(draw_gains(args.out / "compare.png", gains, title=_title(args, problems), seconds=seconds))
    _print(args, problems, gains, picture)
    return 0


def _problems(args: argparse.Namespace) -> tuple[list[Problem], bool]:
    """The global batches on their pipelines, and whether their costs are seconds. Raises UserError."""
    from cli.cost_table import is_cost_table, read_cost_table

    if is_cost_table(args.path):
        table = read_cost_table(args.path)
        return _deal(args, table.take(slice(args.limit))), False
    probes, estimator, note = _probe(args)
    problems = _deal(args, estimator.table(probes))
    if args.checkpointing or args.frozen:  # they change what memory is kept, and are checked against the pipeline first
        backward = problems[0].batch.execution.backward
        table = estimator.table(probes, checkpointing=args.checkpointing.split(","), backward=backward)
        problems = _deal(args, table)
    print(note, file=sys.stderr)
    return problems, True


def _probe(args: argparse.Namespace) -> tuple[list[Probe], Estimator, str]:
    """At least one sample of the data set, what estimates their costs, and what was read, in words. Raises UserError."""
    from cli.survey import MeasuringJob
    from preprocessor.sources import list_shards

    spec = reading_spec(args)
    job = MeasuringJob(spec)
    job.shards = tuple(list_shards(spec))
    probes: list[Probe] = []
    try:
        estimator = Estimator(args, spec, job.pipeline.vocabulary.size)
        refused, left = look(job, args.limit or DEFAULT_LIMIT, probes.append)
    finally:
        job.close()
    if not probes:
        raise DatasetError(f"{args.path} holds no good sample; `headrace inspect {args.path}` says what is wrong")
    notes = [f"{len(refused):,} refused"] * bool(refused) + [f"{left:,} not looked at (--limit)"] * bool(left)
    return probes, estimator, ", ".join([f"read {len(probes):,} samples", *notes])


def _deal(args: argparse.Namespace, table: CostTable) -> list[Problem]:
    """Shuffled samples as global batches of equal size, at least one. Raises UserError."""
    import numpy as np

    num_samples = len(table.sample_ids)
    size = min(args.global_batch or DEFAULT_GLOBAL_BATCH, num_samples)
    topology = topology_of(args, table.totals())
    if args.microbatches is None:
        topology = dataclasses.replace(topology, microbatches=_microbatches(size / topology.replicas, topology.num_stages))
    execution = execution_of(args, topology, table)
    order = np.random.default_rng(args.seed).permutation(num_samples)
    num_batches = min(num_samples // size, MAX_BATCHES)
    return [Problem.of(table.take(order[b * size : (b + 1) * size]), topology, execution, args) for b in range(num_batches)]


def _microbatches(samples: float, num_stages: int) -> int:
    """Of a replica with so many samples: enough to fill the pipeline, but with samples enough in each."""
    wanted = max(samples / SAMPLES_PER_MICROBATCH, min(num_stages, samples))
    return max(1, min(DEFAULT_MICROBATCHES, int(wanted)))


def _title(args: argparse.Namespace, problems: Sequence[Problem]) -> str:
    topology = problems[0].batch.topology
    return f"{_last_part(args.path)}: {topology.replicas} replicas of {topology.num_stages} stages, {problems[0].size} a step"


def _last_part(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1][:60]


def _print(args: argparse.Namespace, problems: Sequence[Problem], gains: Sequence[Gain], picture: str) -> None:
    """On standard output, as `--format` says."""
    batch = problems[0].batch
    report = {
        "dataset": args.path,
        "batches": len(problems),
        "global_batch": len(problems[0].samples.sample_ids),
        "topology": {
            "replicas": batch.topology.replicas, "microbatches": batch.topology.microbatches, "stages": batch.topology.stages
        },
        "best": min(gains, key=lambda gain: gain.iteration_s).strategy,
        "strategies": [_row(gain, gains[0]) for gain in gains],
        "picture": picture,
    }  # fmt: skip
    if args.format == "json":
        print(json.dumps(report))
        return
    from rich.console import Console
    from rich.table import Table

    stages = ", ".join(f"{unit} {count}" for unit, count in batch.topology.stages.items())
    batches = f"{len(problems)} global batches" if len(problems) > 1 else "1 global batch"
    title = (
        f"{args.path}: {batches} of {problems[0].size} on {batch.topology.replicas} replicas x "
        f"{batch.topology.microbatches} microbatches; stages: {stages}"
    )
    table = Table("strategy", "speed-up", "stages idle", "100 GPU hours become", "planned in", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report["strategies"]:
        name = "arrival order" if row["strategy"] == BASELINE else ": ".join([row["strategy"], *row["chosen"]])
        table.add_row(
            name, f"{row['speedup']:.2f} x", f"{row['bubble']:.1%}", f"{100 / row['speedup']:.1f}",
            f"{row['planning_s'] * 1e3:.1f} ms", style="bold" if row["strategy"] == report["best"] else None,
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    console.print(_in_words(batch, gains), markup=False)
    console.print(f"picture: {picture}", markup=False, soft_wrap=True)


def _row(gain: Gain, baseline: Gain) -> dict[str, Any]:
    """The public JSON form of one strategy."""
    return {
        "strategy": gain.strategy,
        "chosen": list(gain.chosen),
        "iteration_s": gain.iteration_s,
        "speedup": gain.speedup_over(baseline),
        "bubble": gain.bubble,
        "lower_bound_s": gain.lower_bound_s,
        "planning_s": gain.planning_s,
    }


def _in_words(batch: Batch, gains: Sequence[Gain]) -> str:
    """What the table comes to."""
    arrival, best = gains[0], min(gains, key=lambda gain: gain.iteration_s)
    speedup = best.speedup_over(arrival)
    if speedup < NO_GAIN:
        return (
            "Planning gains less than 1 % here: a step has too few samples or microbatches to choose from, or one sample "
            "outweighs all others."
        )
    stages = batch.topology.num_stages
    passes = batch.topology.microbatches * batch.execution.chunks
    fill = (stages - 1) / (passes + stages - 1)
    return (
        f"With {best.strategy}, what takes 100 GPU hours in arrival order takes {100 / speedup:.0f}: stages idle "
        f"{best.bubble:.0%} of the time instead of {arrival.bubble:.0%}. With equal microbatches, filling and draining {stages} "
        f"stages alone would cost {fill:.0%}."
    )
