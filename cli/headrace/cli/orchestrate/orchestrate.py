"""`headrace orchestrate`: from a model, a cluster and a data set to a placement of its units, before a GPU is rented."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.costs.reading_options import add_reading_arguments
from headrace.cli.output import attempted, make_folder, writing
from headrace.errors import UserError
from headrace.published_models import PLANNED_MODELS
from headrace.schedule import SCHEDULES

if TYPE_CHECKING:
    from headrace.cli.orchestrate.placement_files import PlacementFiles
    from headrace.cli.orchestrate.placement_problem import PlacementProblem
    from headrace.cli.orchestrate.placement_report import Report
    from headrace.reorder_service.planning.orchestration.candidate import Candidate
    from headrace.reorder_service.planning.orchestration.judgement import Judgement

PLACEMENTS = ("disaggregated", "colocated", "encoders-first", "nested")
DEFAULT_LIMIT = 4096
_EPILOG = f"""\
How it works. Headers and texts of PATH are read, and what every sample costs in each unit of the
model is counted in operations (or taken from `headrace profile`). Each search proposes a placement:
how many replicas (dp), tensor slices (tp) and pipeline stages (pp) every unit gets, and how many
microbatches (K) a replica takes a step. One judge then simulates all of them on the same global
batches, with the job's strategy, transfers, the exchange of gradients, and the memory of every GPU.
The search `headrace` looks through the whole space and takes up what the others find.

placements:
  disaggregated   every unit has GPUs of its own, as stages of a pipeline (`trainer: pipeline`)
  colocated       every GPU has all units, sharded (FSDP): one after the other (`trainer: colocated`)
  encoders-first  encoders on the GPUs of the LLM's pipelines: all their forwards, then the LLM, then all
                  their backwards (`on: llm`, `sharing: colocated`)
  nested          the same GPUs, but encoders run where the LLM would wait (`sharing: nested`); the generator
                  has GPUs of its own, or these

examples:
  headrace orchestrate --model qwen2.5-vl-3b --data examples/data --gpus 64 --device a40
  headrace orchestrate --model 7b --spec job.yaml --gpus 512 --device h100 --global-batch 2048
  headrace orchestrate --model mllm-72b --data /data/pictures --gpus 1024 --device a800 --checkpointing llm
  headrace orchestrate --model 8b --data /data/pictures --cluster cluster.yaml --frozen vision --out plan
  headrace orchestrate --model 7b --data /data/pictures --gpus 64 --device h100 --tp llm=2:4,vision=1 --placements nested
  headrace orchestrate --model 7b --data /data/pictures --gpus 64 --device h100 --dp 1,2,4,8 --pp llm=2:4

a cluster file: a preset and what differs from it, or all fields
  preset: h100          # or gpus_per_node, memory_gib, flops_per_s, intra_node_bytes_per_s, ...
  nodes: 16
  efficiency: 0.4       # share of the peak that layers reach, where their times are counted

DIR gets job-execution.yaml (a job that is planned for the placement), topology.yaml and costs.parquet
(for `headrace train`), what starts the trainers (torchrun.sh, headrace.sbatch for Slurm, jobset.yaml and
kustomization.yaml for Kubernetes), placement.png and placement.json. Models: {", ".join(PLANNED_MODELS)}.
All times are simulated: docs/orchestrate.md says what is counted, and what is not.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace orchestrate` to its parser."""
    parser.epilog = _EPILOG
    parser.add_argument("--model", required=True, metavar="NAME", help="named size or published model, see below")
    parser.add_argument(
        "--data",
        dest="path",
        metavar="PATH",
        help="folder, file, glob or URL of shards; a source's name with --spec",
    )
    parser.add_argument(
        "--limit", type=int, default=DEFAULT_LIMIT, metavar="N", help="look at N samples at most (default: %(default)s)"
    )
    add_reading_arguments(parser)
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--gpus", type=int, metavar="N", help="how many there are (default with --cluster: all of its nodes)")
    cluster.add_argument("--device", metavar="NAME", help="nodes as they are sold: a40, a100, a800, h100 or h200")
    cluster.add_argument("--cluster", type=Path, metavar="FILE.yaml", help="nodes of your own, see below")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--global-batch", type=int, metavar="N", help="samples of a step (default: 4 for each GPU, or b_min if that is more)"
    )
    training.add_argument(
        "--allow-small-batch",
        action="store_true",
        help="take a --global-batch below b_min, from which on units' shares are steady",
    )
    training.add_argument("--frozen", default="", metavar="UNIT,...", help="units that are not trained; their projectors are")
    training.add_argument("--checkpointing", default="", metavar="UNIT,...", help="units that run their forward again")
    training.add_argument("--schedule", default="1f1b", metavar="NAME", help=f"{', '.join(SCHEDULES)} (default: %(default)s)")
    training.add_argument("--chunks", type=int, default=1, metavar="V", help="parts of a unit on a stage, interleaved")
    training.add_argument("--strategy", default="auto", metavar="NAME", help="that plans the batches (default: %(default)s)")
    training.add_argument(
        "--coefficients", type=Path, metavar="FILE", help="a file of `headrace profile`: times of layers (default: counted work)"
    )
    search = parser.add_argument_group("search")
    search.add_argument("--searches", default="all", metavar="NAME,...", help="to compare with (default: all)")
    search.add_argument(
        "--placements", default="all", metavar="NAME,...", help=f"that headrace may take: {', '.join(PLACEMENTS)} (default: all)"
    )
    for flag, what in (
        ("--dp", "replicas that units may have (default: any)"),
        ("--tp", "slices (default: all that divide them, up to 8)"),
        ("--pp", "stages (default: those that whole layers make worth while)"),
    ):
        search.add_argument(flag, default="", metavar="UNIT=N:N,...", help=f"{what}; N,... for all units")
    search.add_argument("--batches", type=int, default=20, metavar="N", help="global batches of the judge (default: %(default)s)")
    search.add_argument("--seed", type=int, default=0, metavar="N", help="of the batches that are drawn (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("headrace-orchestrate"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run `headrace orchestrate`: search, judge, write the files and report. Raises UserError."""
    from headrace.cli.orchestrate.placement_picture import draw_placement
    from headrace.cli.orchestrate.placement_problem import placement_problem
    from headrace.cli.orchestrate.placement_report import nowhere
    from headrace.reorder_service.planning import STRATEGIES, warm_up

    for flag, number, least in (("--limit", args.limit, 1), ("--batches", args.batches, 1), ("--seed", args.seed, 0)):
        if number < least:
            raise UserError(f"{flag} must be at least {least}, got {number}")
    if args.strategy not in STRATEGIES:
        raise UserError(f"no strategy {args.strategy!r}; there are {', '.join(STRATEGIES)}")
    names, placements = _searches(args.searches), _placements(args.placements)
    problem = placement_problem(args)
    for note in (problem.data.note, *problem.notes):
        print(note, file=sys.stderr)
    make_folder(args.out)
    warm_up()
    report = _search(args, problem, names, placements)
    best = report.found.best
    if not best.fits:
        raise UserError(nowhere(problem, best))
    files = _written(args, problem, report)
    picture, failure = attempted(args.out, lambda: draw_placement(args.out / "placement.png", report))
    document = json.dumps(report.to_json(files, None if picture is None else str(picture)))
    with writing(args.out):
        (args.out / "placement.json").write_text(document + "\n", encoding="utf-8")
    if args.format == "json":
        print(document)
    else:
        _print(report, files, picture)
    if failure is not None:
        raise failure
    return 0


def _searches(text: str) -> list[str]:
    from headrace.reorder_service.planning.orchestration.searches import SEARCHES

    if text == "all":
        return list(SEARCHES)
    names = [name.strip() for name in text.split(",") if name.strip() not in ("", "headrace")]
    if unknown := [name for name in names if name not in SEARCHES]:
        raise UserError(f"no search {unknown[0]!r}; there are {', '.join(SEARCHES)} and headrace, which always searches")
    return list(dict.fromkeys(names))


def _placements(text: str) -> tuple[str, ...]:
    named = PLACEMENTS if text == "all" else tuple(name.strip() for name in text.split(",") if name.strip())
    if not named or (unknown := [name for name in named if name not in PLACEMENTS]):
        raise UserError(f"--placements takes all or some of {', '.join(PLACEMENTS)}, got {(unknown if named else [text])[0]!r}")
    return named


def _search(args: argparse.Namespace, problem: PlacementProblem, names: list[str], placements: tuple[str, ...]) -> Report:
    """Run the named searches, and then Headrace's own, with a progress bar. Raises UserError where nothing can be placed."""
    from headrace.cli.orchestrate.placement_report import Report
    from headrace.cli.progress_bar import ProgressBar
    from headrace.cli.run.processors import usable_processors
    from headrace.reorder_service.planning.orchestration.headrace_search import NAME, num_judgements, search
    from headrace.reorder_service.planning.orchestration.judge import simulated
    from headrace.reorder_service.planning.orchestration.memory_curve import memory_curves
    from headrace.reorder_service.planning.orchestration.searches import SEARCHES

    answers: dict[str, Candidate] = {}
    searched_s: dict[str, float] = {}
    refused: dict[str, str] = {}
    with ProgressBar() as bar:
        bar.begin("searching", len(names))
        for name in names:
            try:
                answers[name] = SEARCHES[name](problem.demand)[0]
                start_s = time.perf_counter()  # the second time counts, when kernels are compiled
                SEARCHES[name](problem.demand)
                searched_s[name] = time.perf_counter() - start_s
            except ValueError as err:
                refused[name] = str(err)
            bar.advance(1)
        bar.begin("judging placements", num_judgements(len(answers)))
        start_s = time.perf_counter()
        try:
            with ThreadPoolExecutor(usable_processors()) as threads:
                found = search(
                    problem.demand, answers, strategy=args.strategy, seed=args.seed, num_batches=args.batches,
                    placements=placements, advance=bar.advance, mapped=threads.map,
                )  # fmt: skip
        except ValueError as err:
            raise UserError(str(err)) from err
        searched_s[NAME] = time.perf_counter() - start_s
    for name in answers.keys() - found.answers.keys():
        refused[name] = f"its pipelines cannot run the plans with schedule {args.schedule!r}"
    best = found.best
    step = simulated(problem.demand, best.candidate, found.batches[0], best.strategy, args.seed)
    curves = memory_curves(problem.demand, best.candidate, step, best.ranks)
    return Report(problem=problem, found=found, searched_s=searched_s, refused=refused, step=step, curves=curves)


def _written(args: argparse.Namespace, problem: PlacementProblem, report: Report) -> PlacementFiles:
    from headrace.cli.orchestrate.placement_files import write_files

    found = report.found
    others = sorted(found.answers.values(), key=lambda one: one.key)
    ranked: list[Judgement] = [found.best, *found.alternatives, *others]
    pipelines = (one for one in ranked if one.candidate.placement != "colocated" and one.fits)
    with writing(args.out):
        return write_files(args.out, problem, found.best, next(pipelines, None), found.batches)


def _print(report: Report, files: PlacementFiles, picture: Path | None) -> None:
    from headrace.cli.planning.plan import print_uncut

    for table in report.tables():
        print_uncut(table)
    for name, why in report.refused.items():
        print(f"{name} found nothing: {why}")
    columns = shutil.get_terminal_size().columns
    demand = report.problem.demand
    counted = "the times of your file" if report.problem.coefficients is not None else (
        f"operations counted at {demand.cluster.efficiency:.0%} of the peak of {demand.cluster.name}"
    )  # fmt: skip
    words = (
        f"Simulated, not measured, with {counted}: {report.found.num_estimated:,} placements were estimated, "
        f"{report.found.num_simulated:,} steps simulated."
    )
    print("\n".join(textwrap.wrap(words, columns)))
    print(f"files: {', '.join(map(str, files.paths))}" + ("" if picture is None else f"\npicture: {picture}"))
    print(f"to train, {files.processes} processes, on each node:\n  {files.launch.torchrun}")
    print(f"or with the services around them:\n  {files.launch.slurm}\n  {files.launch.kubernetes}")
    if files.emulate:
        of = " the best pipelines" if report.found.best.candidate.placement == "colocated" else ""
        print(f"to emulate{of}, {files.emulated_processes} processes on this machine:\n  {files.emulate}")
    if files.small:
        print(f"or one of its equal groups of replicas, {files.small_processes} processes:\n  {files.small}")
