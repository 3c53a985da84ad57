"""`headrace simulate-failures`: replays an availability trace under the recovery of Headrace and of other systems."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.planning.problem import count
from headrace.errors import UserError
from headrace.model_shape import MODEL_SHAPES

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.reorder_service.recovery.forecast.availability import Trace
    from headrace.reorder_service.recovery.forecast.availability_replay import Run
    from headrace.reorder_service.recovery.forecast.policies import Assumptions, ForecastJob
    from headrace.reorder_service.recovery.pipeline_templates import ModelProfile

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EPILOG = """\
SIMULATED, not measured: steps take as long as the templates predict. All policies have the same model, templates and trace:
  headrace       pipelines are reconfigured, layers copied from the replicas left, the step that was cut off is done again, or
                 its lost microbatches by the pipelines that are whole, where that is faster
  varuna-like    checkpoint and restart on the best equal pipelines of the nodes left; tuned: a checkpoint after every step
  bamboo-like    each node computes the next one's forward as well and takes its place; a restart where both are lost
  torchft-like   a replica that lost a node sits out until the node is back; the global batch shrinks, so samples are counted;
                 tuned: with faster heartbeats
They follow the published designs and are no measurements of those systems: docs/failures.md says what is modelled and what not.

A trace is CSV or JSONL with time_s, node and event (lost or back), in order of time. Nodes that are lost before they come back
were there at the start, and nameless others, --nodes in all. A profile is JSON: {"units": {"llm": 2}, "seconds": [[0.1], [0.1]],
"gpu_bytes": [[1e9], [1e9]], "memory_bytes": 4e9}, with forward and backward of a microbatch through each layer, and its bytes
on a GPU, where 1, 2, ... GPUs of a node share it.

examples:
  headrace simulate-failures --mtbf 10m --nodes 30
  headrace simulate-failures --trace spot.csv --nodes 30 --notice 2m --model 9b --gpus-per-node 8 --out spot.svg
"""


DRAWN_HOURS = 12.0  # default length of a drawn trace, as in Oobleck's evaluation
DEFAULTS = {"model": "3b", "gpus_per_node": 1, "gpu_memory": 60, "tokens": 4096, "patches": 4096}  # gpu_memory: 60 of 80 GB
# Field of Assumptions -> flag, factor from the flag's unit to the field's, help
_ASSUMED: dict[str, tuple[str, float, str]] = {
    "rebuild_s": ("--rebuild", 1.0, "seconds until new process groups stand, as measured of six nodes (default: 0.16)"),
    "copy_bytes_per_s": ("--copy-rate", 1e9, "GB/s at which a node of headrace copies, as measured (default: 2)"),
    "horizon_s": ("--horizon", 1.0, "seconds in which faster pipelines must pay for what headrace copies more (default: 300)"),
    "detect_s": ("--detect", 1.0, "seconds until a loss is known: our lease; a killed process is known in 0.02 s (default: 1)"),
    "restart_s": (
        "--restart",
        1.0,
        "seconds to start all processes again; measured: torchrun's on one machine (default: 2.53)",
    ),
    "link_bytes_per_s": ("--link-rate", 1e9, "GB/s of a node's link, by which others copy; Oobleck's cluster (default: 25)"),
    "storage_bytes_per_s": ("--storage-rate", 1e9, "GB/s of checkpoints in all, as in Oobleck's cluster (default: 25)"),
    "save_every": ("--save-every", 1.0, "steps between checkpoints, as in Oobleck's evaluation (default: 10)"),
    "torchft_s": ("--torchft", 1.0, "seconds from a kill to torchft's next commit, measured (default: 5.07; tuned: 0.64)"),
}


_MEASURED = ("copy_bytes_per_s", "rebuild_s")
MEASURED_WHERE = "by `make bench-recovery`, between processes of one machine of two cores: --copy-rate and --rebuild take yours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace simulate-failures` to its parser."""
    parser.epilog = _EPILOG
    losses = parser.add_argument_group("lost nodes")
    what = losses.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="which nodes are lost and come back, and when")
    what.add_argument("--mtbf", type=_span, metavar="TIME", help="draw losses: mean time between any two, as 10m or 6h")
    losses.add_argument("--mttr", type=_span, default="30m", metavar="TIME", help="mean time until a node is back (default: 30m)")
    losses.add_argument(
        "--hours", type=_positive, metavar="N", help="length of the trace (default: 12, or until the last event of FILE)"
    )
    losses.add_argument("--seed", type=int, default=0, metavar="N", help="of the losses that --mtbf draws (default: %(default)s)")
    losses.add_argument(
        "--notice", type=_span, default="0", metavar="TIME", help="a loss is announced so long before (default: 0)"
    )
    _add_job(parser)
    _add_assumptions(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("headrace-failures.png"),
        metavar="FILE",
        help="picture, PNG or SVG (default: %(default)s)",
    )
    parser.add_argument("--no-picture", action="store_true", help="draw no picture")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of what is printed (default: %(default)s)")


def _add_job(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--nodes", type=_count, default=30, metavar="N", help="at the start (default: %(default)s)")
    cluster.add_argument(
        "--failures", type=int, default=2, metavar="F", help="nodes that may be lost at once (default: %(default)s)"
    )
    batch = parser.add_argument_group("batch")
    batch.add_argument("--global-batch", type=_count, default=1024, metavar="N", help="samples of a step (default: %(default)s)")
    batch.add_argument("--microbatch", type=_count, default=1, metavar="N", help="samples of a microbatch (default: %(default)s)")
    model = parser.add_argument_group("model")
    model.add_argument("--profile", type=Path, metavar="FILE.json", help="layers as they were measured, instead of all below")
    model.add_argument("--model", choices=tuple(MODEL_SHAPES), help=f"its operations are counted (default: {DEFAULTS['model']})")
    model.add_argument("--gpus-per-node", type=_count, metavar="N", help=f"(default: {DEFAULTS['gpus_per_node']})")
    model.add_argument(
        "--gpu-memory",
        type=_positive,
        metavar="GB",
        help=f"for weights, gradients, optimizer (default: {DEFAULTS['gpu_memory']})",
    )
    model.add_argument("--tokens", type=_count, metavar="N", help=f"of a sample (default: {DEFAULTS['tokens']})")
    model.add_argument("--patches", type=_count, metavar="N", help=f"of its image (default: {DEFAULTS['patches']})")


def _add_assumptions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is assumed of times")
    for field, (flag, _, words) in _ASSUMED.items():
        group.add_argument(flag, dest=field, type=_count if field == "save_every" else _positive, metavar="N", help=words)


def _span(text: str) -> float:
    """Parse a time such as 90, 90s, 10m, 1.5h or 2d into seconds."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 10m, 1.5h or 2d")
    return float(match[1]) * _SECONDS[match[2]]


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Replay the trace under every policy, print and draw the results, and return the exit code."""
    from headrace.cli.planning.plan import print_uncut
    from headrace.cli.progress_bar import ProgressBar
    from headrace.reorder_service.recovery.forecast.availability_replay import replay
    from headrace.reorder_service.recovery.forecast.policies import Headrace, failure_free
    from headrace.reorder_service.recovery.forecast.rivals import RIVALS

    if not args.no_picture and args.out.suffix not in (".png", ".svg"):
        raise UserError(f"--out {args.out} is neither .png nor .svg: name a picture, or give --no-picture")
    trace, job, assumed = _trace(args), _job(args), _assumptions(args)
    bound = failure_free(job, trace)
    with ProgressBar() as bar:
        bar.begin("policies simulated", 1 + len(RIVALS))
        runs = [replay(Headrace(job, assumed), trace, notice_s=args.notice)]
        for name, rival in RIVALS.items():
            bar.advance()
            try:
                runs.append(replay(rival(job, assumed), trace, notice_s=args.notice))
            except UserError as err:
                print(f"{name} is left out: {err}", file=sys.stderr)
    for each in runs:
        if each.stopped:
            print(f"{each.name} stops {each.stopped}", file=sys.stderr)
    report = _report(trace, job, bound, runs) | {"assumed": _assumed_costs(args, assumed)}
    if not args.no_picture:
        report["picture"] = _draw(args, trace, job, bound, runs)
    if args.format == "json":
        print(json.dumps(report))
    else:
        print_uncut(_table(report))
        print(_say_costs(report["assumed"]))
        if not args.no_picture:
            print(f"picture in {args.out}")
    return 0


def _trace(args: argparse.Namespace) -> Trace:
    import numpy as np

    from headrace.cli.failures.availability_file import read_trace
    from headrace.reorder_service.recovery.forecast.availability import draw

    end_s = args.hours and args.hours * 3600
    if args.trace:
        return read_trace(args.trace, args.nodes, end_s)
    if not args.mtbf or not args.mttr:
        raise UserError("--mtbf and --mttr are times above 0; without failures there is nothing to see")
    random = np.random.default_rng(args.seed)
    return draw(random, num_nodes=args.nodes, mtbf_s=args.mtbf, mttr_s=args.mttr, end_s=end_s or DRAWN_HOURS * 3600)


def _job(args: argparse.Namespace) -> ForecastJob:
    from headrace.cli.costs.model_options import refuse_options
    from headrace.reorder_service.recovery.forecast.policies import ForecastJob
    from headrace.reorder_service.recovery.forecast.profiles import profile_of
    from headrace.spec import AudioSpec, ImageSpec

    if args.profile:
        refuse_options(args, tuple(DEFAULTS), "does not go with --profile, which has it already")
        profile = _read_profile(args.profile)
    else:
        for name, value in DEFAULTS.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        profile = profile_of(
            MODEL_SHAPES[args.model],
            tokens=args.tokens,
            patches=args.patches,
            image=ImageSpec(),
            audio=AudioSpec(),
            microbatch=args.microbatch,
            gpus=args.gpus_per_node,
            memory_bytes=int(args.gpu_memory * 1e9),
        )
    if args.failures < 0:
        raise UserError(f"--failures must be at least 0, got {args.failures}")
    return ForecastJob.of(profile, args.nodes, args.failures, global_batch=args.global_batch, microbatch=args.microbatch)


def _read_profile(path: Path) -> ModelProfile:
    import numpy as np

    from headrace.reorder_service.recovery.pipeline_templates import ModelProfile

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return ModelProfile(
            units={str(unit): int(layers) for unit, layers in document["units"].items()},
            seconds=np.array(document["seconds"], np.float64),
            gpu_bytes=np.array(document["gpu_bytes"], np.float64).astype(np.int64),
            memory_bytes=int(document["memory_bytes"]),
        )
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror}; --profile takes a JSON file") from err
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        reason = f"it has no {err}" if isinstance(err, KeyError) else err
        raise UserError(f"{path} is no profile: {reason}; `headrace simulate-failures --help` shows one") from err


def _assumptions(args: argparse.Namespace) -> Assumptions:
    from headrace.reorder_service.recovery.forecast.policies import Assumptions

    given = {field: getattr(args, field) for field in _ASSUMED if getattr(args, field) is not None}
    return Assumptions(
        **{field: value if field == "save_every" else value * _ASSUMED[field][1] for field, value in given.items()}
    )


def _assumed_costs(args: argparse.Namespace, assumed: Assumptions) -> dict[str, Any]:
    """Return what a recovery of headrace is assumed to cost, and which of it was measured by its benchmark."""
    costs = {name: getattr(assumed, name) for name in _MEASURED}
    return costs | {"measured": [name for name in _MEASURED if getattr(args, name) is None]}


def _say_costs(costs: dict[str, Any]) -> str:
    """Return a sentence on what a recovery of headrace is assumed to cost."""

    def source(name: str) -> str:
        return "measured" if name in costs["measured"] else "as given"

    copies = f"headrace copies at {costs['copy_bytes_per_s'] / 1e9:.3g} GB/s ({source('copy_bytes_per_s')})"
    what = f"{copies} and has new process groups after {costs['rebuild_s']:.3g} s ({source('rebuild_s')})"
    return f"{what}; measured {MEASURED_WHERE}" if costs["measured"] else what


def _report(trace: Trace, job: ForecastJob, bound: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the results in their public JSON form."""
    return {
        "simulated": True,
        "nodes": len(trace.nodes),
        "hours": trace.end_s / 3600,
        "losses": trace.num_losses,
        "fewest_nodes": min(count for _, _, count in trace.counts()),
        "least_nodes": job.templates.specification.least_nodes,
        "failure_free_samples_per_s": bound.samples_per_s,
        "policies": [_row(run, bound) for run in runs],
    }


def _row(run: Run, bound: Run) -> dict[str, Any]:
    from headrace.reorder_service.recovery.forecast.availability_replay import Activity

    return {
        "policy": run.name,
        "samples_per_s": run.samples_per_s,
        "of_failure_free": run.share_of(bound),
        "recoveries": run.recoveries,
        "lost_s": run.lost_s,
        **{f"{activity.name.lower()}_s": run.seconds(activity) for activity in Activity if activity is not Activity.TRAINS},
        **({"stopped": run.stopped} if run.stopped else {}),
    }


def _draw(args: argparse.Namespace, trace: Trace, job: ForecastJob, bound: Run, runs: Sequence[Run]) -> str:
    from headrace.cli.failures.failures_picture import draw_failures

    what = args.profile.stem if args.profile else args.model
    smallest = job.templates.specification.smallest
    losses = f"{count(trace.num_losses, 'failure')} in {trace.end_s / 3600:.3g} hours"
    title = f"Throughput while nodes are lost: {what} on {len(trace.nodes)} nodes, in pipelines of {smallest} or more; {losses}"
    try:
        return str(draw_failures(args.out, runs, bound, trace, title=title))
    except OSError as err:
        raise UserError(f"cannot write {args.out}: {err.strerror}; name another file with --out") from err


def _table(report: dict[str, Any]) -> Table:
    from rich.table import Table

    title = (
        f"SIMULATED: {report['nodes']} nodes, {count(report['losses'], 'failure')} in {report['hours']:.3g} hours; fewest nodes "
        f"{report['fewest_nodes']}, failure-free {report['failure_free_samples_per_s']:.4g} samples/s"
    )
    minutes = ("recovers_s", "undone_s", "saves_s", "waits_s", "stopped_s")
    head = ("policy", "samples/s", "of failure-\nfree", "recoveries", *(f"{name[:-2]}\nmin" for name in minutes))
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in head:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in report["policies"]:
        cells = [f"{row['samples_per_s']:.4g}", f"{row['of_failure_free']:.1%}", f"{row['recoveries']:,}"]
        table.add_row(row["policy"], *cells, *(f"{row[name] / 60:.1f}" for name in minutes))
    return table
