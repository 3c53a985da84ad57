"""`headrace compare`: simulates what planning would gain on a data set, before anything is trained."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.costs.dataset_costs import DEFAULT_MODEL, Estimator
from headrace.cli.costs.model_options import MODEL_OPTIONS, add_model_arguments, estimator_of, refuse_options
from headrace.cli.costs.reading_options import READING_OPTIONS, add_reading_arguments, reading_spec, shown_source
from headrace.cli.output import attempted, make_folder, writing
from headrace.cli.planning.baseline_rows import (
    BaselineRow,
    add_baselines_argument,
    baseline_rows,
    baselines_asked,
    baselines_table,
)
from headrace.cli.planning.placement_rows import (
    NOTE,
    PlacementRow,
    add_placements_argument,
    best_placement,
    placement_rows,
    placements_asked,
    placements_table,
)
from headrace.cli.planning.plan import none_fits_message, print_uncut
from headrace.cli.planning.planning_options import (
    DEFAULT_MICROBATCHES,
    add_pipeline_arguments,
    check_numbers,
    check_strategies,
    execution_of,
    most_stages,
    topology_of,
    with_fastest_stages,
)
from headrace.cli.planning.problem import Problem, count
from headrace.errors import UserError
from headrace.plan import LLM

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.cli.costs.cost_table import CostTable
    from headrace.cli.planning.gain import Gain
    from headrace.reorder_service.planning.batch import Batch
    from headrace.sample import Probe

BASELINE, SHUFFLED = "random", "shuffled order"  # `random` keeps the order, and samples are shuffled before they are dealt
NO_GAIN = 1.01  # a lower speed-up is reported as no gain
DEFAULT_GLOBAL_BATCH, DEFAULT_LIMIT = 512, 4096
MAX_BATCHES = 8  # enough for a mean: more batches would take longer and change little
SAMPLES_PER_MICROBATCH = 4  # enough that in most data sets no single sample outweighs a microbatch
_EPILOG = f"""\
DATASET is what `headrace inspect` takes, or a cost table (.parquet or .jsonl with columns
cost_<unit>). Of a data set, headers and texts are read, and the costs are counted in operations of
--model. Samples are shuffled, dealt into global batches of --global-batch, and every strategy plans
each batch (at most {MAX_BATCHES}); the figures are those of all batches together.

examples:
  headrace compare /data/charts
  headrace compare /data/films --mapping text=title --mapping ignore=mp4
  headrace compare --spec job.yaml --model 7b
  headrace compare s3://bucket/mixture --limit 4096 --model 8b --replicas 16 --num-stages 16
  headrace compare costs.parquet --schedule interleaved --chunks 2
  headrace compare costs.parquet --placements all     # on GPUs of their own, on the LLM's, FSDP

DIR gets compare.png: a bar for each strategy, and the pipelines of one batch in shuffled order
above those of the best strategy: of the batch whose gain is the nearest to the mean.
--strategy-pictures DIR draws what every strategy does to one batch (docs/strategies.md).
--placements compares one layout each: the LLM's stages are those that divide the GPUs, and every
GPU has whole encoders. To have all of them searched, with weights, links and gradients:
headrace orchestrate.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace compare` to its parser."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "path",
        nargs="?",
        metavar="DATASET",
        help="folder, file, glob or URL of shards, or a cost table (- for JSONL); a source's name with --spec",
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=f"use N samples, spread as by `headrace inspect` (default: {DEFAULT_LIMIT} of a data set, all of a cost table)",
    )
    parser.add_argument(
        "--global-batch", type=int, metavar="N", help=f"samples of a step (default: {DEFAULT_GLOBAL_BATCH}, or all there are)"
    )
    add_reading_arguments(parser)
    add_model_arguments(parser.add_argument_group("costs of a data set"))
    add_baselines_argument(parser)
    add_placements_argument(parser)
    add_pipeline_arguments(parser, microbatches=f"{SAMPLES_PER_MICROBATCH} samples in each, 32 at most")
    parser.add_argument(
        "--out", type=Path, default=Path("headrace-compare"), metavar="DIR", help="for the picture (default: %(default)s)"
    )
    parser.add_argument(
        "--strategy-pictures", type=Path, metavar="DIR", help="also a picture of what each strategy does to the first batch"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run `headrace compare`: estimate costs, plan with every strategy, and report what is gained. Raises UserError."""
    from headrace.cli.costs.cost_table import SECONDS
    from headrace.cli.planning.gain import best_of, measure
    from headrace.cli.planning.gain_picture import draw_gains
    from headrace.cli.progress_bar import ProgressBar
    from headrace.reorder_service.planning import warm_up

    for flag, number in (("--limit", args.limit), ("--global-batch", args.global_batch)):
        if number is not None and number < 1:
            raise UserError(f"{flag} must be at least 1, got {number}")
    check_numbers(args)
    asked, placements = baselines_asked(args), placements_asked(args)
    problems, num_samples, layers = _problems(args)
    make_folder(args.out)
    with ProgressBar() as bar:
        others = [strategy for strategy in check_strategies(["all"]) if strategy != BASELINE]
        bar.begin("strategies simulated", 1 + len(others))
        warm_up()
        gains = [measure(BASELINE, problems)]
        for strategy in others:
            bar.advance()
            try:
                gains.append(measure(strategy, problems))
            except UserError as err:
                print(f"{strategy} is left out: {err}", file=sys.stderr)
        batches, best_s = [problem.batch for problem in problems], best_of(gains).iteration_s
        baselines = baseline_rows(asked, batches, arrival_s=gains[0].iteration_s, best_s=best_s, bar=bar)
        placed = placement_rows(placements, problems, most_stages(args, layers).get(LLM), bar)
    seconds = problems[0].time_unit == SECONDS
    title = _title(args, problems)
    picture, failure = attempted(args.out, lambda: draw_gains(args.out / "compare.png", gains, title=title, seconds=seconds))
    pictures = _strategy_pictures(args, problems[0])
    if not any(gain.fits for gain in gains):
        print(none_fits_message(problems[0], [(gain.strategy, gain.peak_memory) for gain in gains]), file=sys.stderr)
    report = _report(args, problems, gains, num_samples) | {"picture": str(picture) if picture else None}
    if pictures:
        report["strategy_pictures"] = [str(path) for path in pictures]
    if args.format == "json":
        compared = {"baselines": [row.to_json() for row in baselines]} if asked else {}
        compared |= {"placements": [row.to_json(best_placement(placed)) for row in placed]} if placements else {}
        print(json.dumps(report | compared))
    else:
        _print(args, problems, gains, report, baselines, placed)
    if failure is not None:
        raise failure
    return 0


def _strategy_pictures(args: argparse.Namespace, problem: Problem) -> list[Path]:
    """Write the pictures of the strategies, if they are asked for, and return them. Raises UserError."""
    if args.strategy_pictures is None:
        return []
    from headrace.cli.planning.strategy_pictures import draw_strategies

    with writing(args.strategy_pictures, "--strategy-pictures"):
        args.strategy_pictures.mkdir(parents=True, exist_ok=True)
        return draw_strategies(args.strategy_pictures, problem, _short_source(args, parts=2))


def _problems(args: argparse.Namespace) -> tuple[list[Problem], int, Mapping[str, int]]:
    """Return the global batches to plan, the number of samples from which they were chosen, and the layers of the model's units
    as far as they are known. Raises UserError."""
    from headrace.cli.costs.cost_table import read_cost_table
    from headrace.cli.costs.sample_choice import evenly_spaced_samples

    if _is_table(args):
        refuse_options(args, (*MODEL_OPTIONS, *READING_OPTIONS), "is for data sets; a cost table has its costs already")
        table = read_cost_table(args.path)
        num_samples = len(table.sample_ids)
        return _deal(args, table.take(evenly_spaced_samples([num_samples], args.limit)[1])), num_samples, {}
    probes, estimator, num_samples, note = _probe(args)
    problems = _deal(args, estimator.table(probes), estimator.layers())
    if args.checkpointing or args.frozen:  # these change the memory kept, and must be checked against the pipeline first
        backward_factors = problems[0].batch.execution.backward_factors
        table = estimator.table(probes, checkpointing=args.checkpointing.split(","), backward_factors=backward_factors)
        problems = _deal(args, table, estimator.layers())
    print(note, file=sys.stderr)
    return problems, num_samples, estimator.layers()


def _probe(args: argparse.Namespace) -> tuple[Sequence[Probe], Estimator, int, str]:
    """Probe samples of the data set.

    Returns at least one probe, the estimator of their costs, the number of samples in the data set as far as it is known, and a
    note that says what was read. Raises UserError.
    """
    from headrace.cli.costs.probed_data import probe_data

    spec = reading_spec(args, {"name": "compare"}, {"path": args.path})
    told = f"--spec {args.spec}" if args.path is None else args.path if args.spec is None else f"{args.path} --spec {args.spec}"
    estimators: list[Estimator] = []
    data = probe_data(
        spec,
        args.limit or DEFAULT_LIMIT,
        shown=shown_source(args),
        told=told,
        check=lambda vocab: estimators.append(estimator_of(args, spec, vocab)),
    )
    return data.probes, estimators[0], data.num_samples, data.note


def _deal(args: argparse.Namespace, table: CostTable, layers: Mapping[str, int] | None = None) -> list[Problem]:
    """Shuffle the samples of a cost table and deal them into global batches of equal size, 1 to MAX_BATCHES. Raises UserError."""
    import numpy as np

    num_samples = len(table.sample_ids)
    if args.global_batch is not None and args.global_batch > num_samples:
        raise UserError(f"--global-batch must be from 1 to the {count(num_samples, 'sample')} there are, got {args.global_batch}")
    size = min(args.global_batch or DEFAULT_GLOBAL_BATCH, num_samples)
    topology = topology_of(args, table, layers)
    if args.microbatches is None:
        topology = dataclasses.replace(topology, microbatches=_microbatches(size / topology.replicas, topology.num_stages))
    execution = execution_of(args, topology, table)
    order = np.random.default_rng(args.seed).permutation(num_samples)
    num_batches = min(num_samples // size, MAX_BATCHES)
    problems = [
        Problem.of(
            table.take(order[b * size : (b + 1) * size]), topology, execution, seed=args.seed, pack_tokens=args.pack_tokens
        )
        for b in range(num_batches)
    ]
    if problems[0].hint_on_empty_microbatches:
        print(problems[0].hint_on_empty_microbatches, file=sys.stderr)
    return with_fastest_stages(args, problems, layers=layers)


def _microbatches(samples: float, num_stages: int) -> int:
    """Choose the number of microbatches of a replica with that many samples.

    It is large enough to fill the pipeline, yet leaves enough samples in each.
    """
    wanted = max(samples / SAMPLES_PER_MICROBATCH, min(num_stages, samples))
    return max(1, min(DEFAULT_MICROBATCHES, int(wanted)))


def _title(args: argparse.Namespace, problems: Sequence[Problem]) -> str:
    topology = problems[0].batch.topology
    replicas, stages = count(topology.replicas, "replica"), count(topology.num_stages, "stage")
    return f"What planning gains on {_short_source(args)}: {replicas} of {stages}, {problems[0].size} a step"


def _is_table(args: argparse.Namespace) -> bool:
    from headrace.cli.costs.cost_table import STDIN, is_cost_table

    return args.path is not None and (args.path == STDIN or (args.spec is None and is_cost_table(args.path)))


def _assumed(args: argparse.Namespace) -> str:
    """Return in words where the costs come from."""
    if _is_table(args):
        return "the costs of the table"
    if args.coefficients is not None:
        return f"the times of {args.coefficients}"
    return f"the operations of model {args.model or DEFAULT_MODEL}"


def _source(args: argparse.Namespace) -> str:
    return "standard input" if args.path == "-" else shown_source(args)


def _short_source(args: argparse.Namespace, parts: int = 1) -> str:
    """Return the last parts of the source's name, as titles have it."""
    return "/".join(_source(args).rstrip("/").rsplit("/", parts)[-parts:])[-40:]


def _report(args: argparse.Namespace, problems: Sequence[Problem], gains: Sequence[Gain], num_samples: int) -> dict[str, Any]:
    """Return the public JSON form of the report, except for `picture`."""
    from headrace.cli.planning.gain import best_of

    batch = problems[0].batch
    limit = batch.execution.memory_limit
    return {
        "dataset": args.path if args.spec is None else shown_source(args),
        "simulated_with": _assumed(args),
        "samples": num_samples,
        "used": sum(len(problem.samples.sample_ids) for problem in problems),
        "batches": len(problems),
        "global_batch": len(problems[0].samples.sample_ids),
        "topology": {
            "replicas": batch.topology.replicas, "microbatches": batch.topology.microbatches, "stages": batch.topology.stages
        },
        **({"memory_limit": limit} if limit < math.inf else {}),
        "strategies": [_row(gain, gains[0], limit) for gain in gains],
        "best": best_of(gains).strategy,
    }  # fmt: skip


def _row(gain: Gain, baseline: Gain, limit: float) -> dict[str, Any]:
    """Return the public JSON form of one strategy. If it chose different strategies for several batches, `chosen` names all."""
    return {
        "strategy": gain.strategy,
        **({"chosen": ", ".join(gain.chosen)} if gain.chosen else {}),
        "iteration_s": gain.iteration_s,
        "speedup": gain.speedup_over(baseline),
        "bubble": gain.bubble,
        "lower_bound_s": gain.lower_bound_s,
        **({"peak_memory": gain.peak_memory, "fits": gain.fits} if limit < math.inf else {}),
        "planning_s": gain.planning_s,
    }


def _print(
    args: argparse.Namespace,
    problems: Sequence[Problem],
    gains: Sequence[Gain],
    report: dict[str, Any],
    baselines: Sequence[BaselineRow],
    placed: Sequence[PlacementRow],
) -> None:
    """Print the report: its table, what it means in words, and where the picture is."""
    topology, batches = problems[0].batch.topology, count(len(problems), "global batch")
    stages = ", ".join(f"{unit} {number}" for unit, number in topology.stages.items())
    title = (
        f"{_source(args)}: {batches} of {problems[0].size} on {count(topology.replicas, 'replica')} x "
        f"{count(topology.microbatches, 'microbatch')}; stages: {stages}"
    )
    print_uncut(_table(title, problems[0], report))
    if baselines:
        print_uncut(baselines_table(baselines))
    columns = shutil.get_terminal_size().columns
    if placed:
        print_uncut(placements_table(placed, problems[0]))
        print("\n".join(textwrap.wrap(NOTE, columns)))
    if report["used"] < report["samples"]:
        print(f"{report['used']:,} of {count(report['samples'], 'sample')} used")
    words = f"Simulated, not measured, with {_assumed(args)}. {_in_words(problems[0].batch, gains)}"
    print("\n".join(textwrap.wrap(words, columns)))
    if report["picture"]:
        print(f"picture: {report['picture']}")
    if args.strategy_pictures is not None:
        print(f"pictures of the strategies: {args.strategy_pictures}/")


def _table(title: str, problem: Problem, report: dict[str, Any]) -> Table:
    from rich.table import Table

    limited = "memory_limit" in report
    table = Table(title=title, title_justify="left")
    for name in ("strategy", "speed-up", "stages idle", "100 GPU hours become", *["memory"] * limited, "planned in"):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for row in report["strategies"]:
        name = SHUFFLED if row["strategy"] == BASELINE else row["strategy"]
        memory = [problem.memory_in_words(row["peak_memory"]) + ("" if row["fits"] else ", over the limit")] if limited else []
        table.add_row(
            f"{name}: {row['chosen']}" if "chosen" in row else name,
            f"{row['speedup']:.2f} x", f"{row['bubble']:.1%}", f"{100 / row['speedup']:.1f}", *memory,
            f"{row['planning_s'] * 1e3:.1f} ms", style="bold" if row["strategy"] == report["best"] else None,
        )  # fmt: skip
    return table


def _in_words(batch: Batch, gains: Sequence[Gain]) -> str:
    """Return in words what planning gains: the GPU time and idle time of the best strategy beside those of shuffled order."""
    from headrace.cli.planning.gain import best_of

    shuffled, best = gains[0], best_of(gains)
    speedup = best.speedup_over(shuffled)
    if shuffled.iteration_s == 0:
        return "All costs are zero: a step takes no time, and there is nothing to gain."
    if speedup < NO_GAIN and best.fits and min(gain.iteration_s for gain in gains) < best.iteration_s:
        return f"Within the memory limit, planning gains less than 1 %: of the plans that fit, {best.strategy} is the fastest."
    if speedup < NO_GAIN:
        return (
            "Planning gains less than 1 % here: a step has too few samples or microbatches to choose from, or one sample "
            "outweighs all others."
        )
    stages = batch.topology.num_stages
    passes = batch.topology.microbatches * batch.execution.chunks
    fill = (stages - 1) / (passes + stages - 1)
    return (
        f"With {best.strategy}, what takes 100 GPU hours in {SHUFFLED} takes {100 / speedup:.0f}: stages idle "
        f"{best.bubble:.0%} of the time instead of {shuffled.bubble:.0%}. With equal microbatches, filling and draining {stages} "
        f"stages alone would cost {fill:.0%}."
    )
