"""`headrace bench`: measures how fast this machine preprocesses and transports payload, and what services take of its cores."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from headrace.cli.costs.reading_options import add_reading_arguments, reading_spec
from headrace.cli.former_names import also_called
from headrace.cli.help_format import described
from headrace.cli.run.processors import usable_processors
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.cli.bench import bench_preprocess, bench_transport
    from headrace.spec import JobSpec

_SERVICES_BATCH, _SERVICES_TOPOLOGY = 16, {"replicas": 1, "microbatches": 8, "stages": {"encoder": 1, "llm": 1}}
"""Of the job that `bench services` measures where none is given."""
_EPILOG = """\
examples:
  headrace bench preprocess                  the bundled example
  headrace bench transport
  headrace bench services --spec job.yaml    for `headrace orchestrate`, where trainers are on the same cores
"""
_SERVICES_EPILOG = """\
A reorder service and a preprocessor take the steps of a job, whose batches nobody trains on. What each
takes of processor cores, and what loading takes of trainers, is measured for a sample, and at rest. Below
are the fields of a cluster file that `headrace orchestrate` reads (docs/orchestrate.md).

examples:
  headrace bench services 'data/charts-*.tar' --global-batch 16
  headrace bench services --spec plan/job-execution.yaml
"""
_PREPROCESS_EPILOG = """\
examples:
  headrace bench preprocess                  the bundled example
  headrace bench preprocess /data/charts --limit 1000
  headrace bench preprocess /data/films --mapping text=title --mapping ignore=mp4
  headrace bench preprocess --spec job.yaml  what the job reads, as it reads it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace bench` to its parser."""
    parser.epilog = _EPILOG
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    preprocess = kinds.add_parser(
        "preprocess",
        **described("reading, tokenising and decoding a data set, stage by stage"),
        epilog=_PREPROCESS_EPILOG,
    )
    _add_path(preprocess)
    preprocess.add_argument("--limit", type=int, default=256, metavar="N", help="take the first N samples (default: %(default)s)")
    preprocess.add_argument(
        "--threads", type=int, default=usable_processors(), metavar="N", help="beside one thread (default: all processors)"
    )
    add_reading_arguments(preprocess)
    transport = kinds.add_parser(
        "transport",
        **described("payload from one process to another, by every transport"),
        epilog="examples:\n  headrace bench transport\n  headrace bench transport --encrypted --repeats 5\n",
    )
    transport.add_argument("--repeats", type=int, default=3, metavar="N", help="the best of N counts (default: %(default)s)")
    also_called(transport, "--repeats", "--rounds")
    transport.add_argument(
        "--encrypted", action="store_true", help="with mutual TLS, but for the raw socket (default: plain text)"
    )
    services = kinds.add_parser(
        "services", **described("what a job's services take of the cores, for a sample and at rest"), epilog=_SERVICES_EPILOG
    )
    _add_path(services)
    services.add_argument("--steps", type=int, default=60, metavar="N", help="that are measured (default: %(default)s)")
    services.add_argument("--global-batch", type=int, metavar="N", help="samples of a step (default: the job's, or 16)")
    services.add_argument("--threads", type=int, default=1, metavar="N", help="of the preprocessor (default: %(default)s)")
    add_reading_arguments(services)
    for kind in (preprocess, transport, services):
        kind.add_argument(
            "--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)"
        )


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="?",
        metavar="PATH",
        help="folder, file, glob or URL of shards (default: the bundled example); a source's name with --spec",
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark and print its figures; return the exit code. Raises UserError for options out of range."""
    if args.kind == "preprocess":
        _preprocess(args)
    elif args.kind == "services":
        _services(args)
    else:
        _transport(args)
    return 0


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _preprocess(args: argparse.Namespace) -> None:
    from headrace.cli.bench.bench_preprocess import measure
    from headrace.cli.example import example_data

    if min(args.limit, args.threads) < 1:
        raise UserError("--limit and --threads must be at least 1")
    source = {} if args.spec is not None else {"path": args.path or str(example_data())}
    figures = measure(reading_spec(args, {"name": "bench"}, source), args.limit, args.threads, _say)
    if args.format == "json":
        print(json.dumps(dataclasses.asdict(figures) | {"verdict": preprocess_verdict(figures)}))
        return
    total = sum(stage.cpu_s_per_sample for stage in figures.stages)
    table = Table("stage", "ms of a core per sample", "share", "rate of a core")
    for stage in figures.stages:
        share = stage.cpu_s_per_sample / total
        table.add_row(stage.name, f"{1e3 * stage.cpu_s_per_sample:.2f}", f"{share:.0%}", f"{_number(stage.rate)} {stage.unit}/s")
    out = Console()
    out.print(table)
    out.print(preprocess_verdict(figures), highlight=False, markup=False, soft_wrap=True)


def preprocess_verdict(figures: bench_preprocess.PreprocessFigures) -> str:
    """Return the rates, the slowest stage and the cores that a trainer needs, in words."""
    slowest = max(figures.stages, key=lambda stage: stage.cpu_s_per_sample)
    total = sum(stage.cpu_s_per_sample for stage in figures.stages)
    one = figures.samples_per_s[1]
    threads, rate = max(figures.samples_per_s.items())
    verdict = f"{figures.num_samples} samples ({figures.num_refused} refused): {_number(one)} samples/s on one thread"
    if threads > 1:
        verdict += f", {_number(rate)} on {threads} ({rate / one:.2f} x)"
    return (
        f"{verdict}. The bottleneck is {slowest.name}: {slowest.cpu_s_per_sample / total:.0%} of a core's time. "
        f"A trainer that takes R samples a second needs about R / {_number(one)} cores of preprocessors."
    )


def _transport(args: argparse.Namespace) -> None:
    from headrace.cli.bench.bench_transport import MIB, SIZES, THREADS, measure
    from headrace.transport.base import SHARED_MEMORY

    if args.repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {args.repeats}")
    figures = measure(args.repeats, _say, encrypted=args.encrypted)
    if args.format == "json":
        print(json.dumps(dataclasses.asdict(figures) | {"verdict": transport_verdict(figures)}))
        return
    table = Table("from process to process", *(f"{size // MIB} MiB parts" for size in SIZES), "receiver's CPU", "sender's CPU")
    table.add_row("raw TCP socket", *_rates(figures.raw))
    for name, rates in figures.rates.items():
        if name != SHARED_MEMORY:
            table.add_row(f"{name}, {THREADS} at a time", *_rates(rates))
    if figures.hand_off_s:
        table.add_row("shared memory, hand-off", *(f"{1e6 * figures.hand_off_s[size]:.0f} us" for size in SIZES))
    table.add_row("shared memory, write", *(f"{size / figures.write_s[size] / 1e9:.2f} GB/s" for size in SIZES))
    table.add_row("one memcpy", *(f"{size / figures.memcpy_s[size] / 1e9:.2f} GB/s" for size in SIZES))
    out = Console()
    out.print(table)
    for name, why in figures.impossible.items():
        out.print(f"{name}: {why}", highlight=False, markup=False, soft_wrap=True)
    out.print(transport_verdict(figures), highlight=False, markup=False, soft_wrap=True)


def _services(args: argparse.Namespace) -> None:
    from headrace.cli.bench.bench_services import measure

    for flag, number in (("--steps", args.steps), ("--threads", args.threads), ("--global-batch", args.global_batch)):
        if number is not None and number < 1:
            raise UserError(f"{flag} must be at least 1, got {number}")
    figures = measure(_job_of_services(args), args.steps, args.threads, _say)
    fields = figures.cluster_fields
    if args.format == "json":
        print(json.dumps(dataclasses.asdict(figures) | {"cluster": fields}))
        return
    table = Table("of the cores", "ms for a sample", "share of a core at rest")
    for name, seconds in figures.sample_s.items():
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{figures.resting_cores[name]:.1%}")
    out = Console()
    out.print(table)
    print(
        f"{figures.steps} steps of {figures.samples / figures.steps:g} samples; for the cluster file of `headrace orchestrate`:"
    )
    for field, value in fields.items():
        print(f"{field}: {value:g}")


def _job_of_services(args: argparse.Namespace) -> JobSpec:
    """Return the job of the options, which goes on as long as steps are taken, under a name of its own."""
    from headrace.cli.bench.bench_services import with_equal_trainers
    from headrace.cli.example import example_data
    from headrace.limits import MAX_STEPS
    from headrace.spec import load_spec_yaml

    job: dict[str, Any] = {"global_batch": _SERVICES_BATCH, "topology": _SERVICES_TOPOLOGY}
    source = {}
    if args.spec is not None:
        job = load_spec_yaml(args.spec).model_dump(mode="json", exclude_unset=True)
        del job["sources"]
        job.pop("epochs", None)
    else:
        source = {"path": args.path or str(example_data())}
    job |= {"name": "bench", "steps": MAX_STEPS} | ({} if args.global_batch is None else {"global_batch": args.global_batch})
    return reading_spec(args, with_equal_trainers(job), source)


def transport_verdict(figures: bench_transport.TransportFigures) -> str:
    """Return in words how fast the best transports are on this machine, and the bottleneck of each."""
    from headrace.transport.base import SHARED_MEMORY

    size = max(figures.raw)
    written = size / figures.write_s[size]
    network = {name: of[size].bytes_per_s for name, of in figures.rates.items() if name != SHARED_MEMORY}
    words = []
    if SHARED_MEMORY in figures.rates:
        words.append(
            f"On this host payload stays in shared memory: {figures.hand_off_s[size] * 1e6:.0f} us a part; "
            f"the bottleneck is the preprocessor's one write, {written / 1e9:.1f} GB/s."
        )
    if network:
        name, rate = max(network.items(), key=lambda item: item[1])
        raw = figures.raw[size].bytes_per_s
        limit = "the network stack, at its limit" if rate > 0.8 * raw else f"{name} itself"
        words.append(
            f"Over the network {name} carries {rate / 1e9:.1f} GB/s, {rate / raw:.2f} of a raw socket; the bottleneck is {limit}."
        )
    return " ".join(words)


def _rates(rates: Mapping[int, bench_transport.Rate]) -> list[str]:
    """Return the cells of a row: GB/s for each part size, and the CPU seconds per GB of both ends at the largest size."""
    cpu = rates[max(rates)]
    ends = [f"{cpu.cpu_s_per_gb:.2f} s/GB", f"{cpu.sender_cpu_s_per_gb:.2f} s/GB"]
    return [*(f"{rate.bytes_per_s / 1e9:.2f} GB/s" for rate in rates.values()), *ends]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
