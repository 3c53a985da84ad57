"""`headrace job`: submit, list, show, quarantine, pause, resume, reset, weights, topology, cancel, delete."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.endpoint import add_endpoint
from headrace.cli.help_format import described
from headrace.cli.watch.quarantine import FORMATS, print_quarantine

if TYPE_CHECKING:
    from headrace.jobs import Jobs, JobStatus
    from headrace.spec import JobSpec

LISTED_FINISHED = 100  # that of headrace.jobs, which takes a moment to import
_EXAMPLES = {
    "submit": "job.yaml",
    "show": "my-job",
    "list": "--all --format json",
    "quarantine": "my-job --format jsonl",
    "pause": "my-job",
    "resume": "my-job",
    "reset": "my-job --step 200",
    "weights": "my-job --from-step 500 web=0.7 books=0.3",
    "topology": "my-job --replicas 3",
    "cancel": "my-job",
    "delete": "my-job another-job",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace job`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    submit = actions.add_parser(
        "submit", **described("start the job of a YAML spec; submitting the same spec again changes nothing")
    )
    submit.add_argument("spec", type=Path, metavar="JOB.yaml", help="what it reads, its batches and who trains (docs/jobs.md)")
    submit.add_argument(
        "--coefficients", type=Path, metavar="FILE", help="plan with the costs measured by `headrace profile` (default: counted)"
    )
    show = actions.add_parser("show", **described("state, progress, rates and quarantine of one job"))
    show.add_argument("job", metavar="JOB", help="name of the job")
    listing = actions.add_parser(
        "list",
        help="the jobs that run, and the latest that are over",
        description=f"Every job that runs, and the {LISTED_FINISHED} jobs that are over and were submitted last.",
    )
    listing.add_argument("--all", action="store_true", help="every job that is over, too")
    quarantine = actions.add_parser(
        "quarantine",
        help="every sample that a job does not use, and why; counts per reason",
        description="Every sample that the job does not use so far: its reason class, source, shard and key, its row in the "
        "shard, the step it was refused in, and what was wrong. Damage that indexing a shard has found is in no row and no step.",
    )
    quarantine.add_argument("job", metavar="JOB", help="name of the job")
    pause = actions.add_parser("pause", **described("plan no further step of a job; what is planned can still be consumed"))
    pause.add_argument("job", metavar="JOB", help="name of the job")
    resume = actions.add_parser("resume", **described("go on with a paused job"))
    resume.add_argument("job", metavar="JOB", help="name of the job")
    reset = actions.add_parser(
        "reset",
        **described("go back: undo the commits of a step and of all later ones; ranks connect again, and consume them once more"),
    )
    reset.add_argument("job", metavar="JOB", help="name of the job")
    reset.add_argument("--step", type=int, required=True, metavar="N", help="the first one to undo")
    weights = actions.add_parser(
        "weights", **described("mix the sources by other weights, from a step on that is not planned yet")
    )
    weights.add_argument("job", metavar="JOB", help="name of the job")
    weights.add_argument("--from-step", type=int, required=True, metavar="N", help="the first one of the new mixture")
    weights.add_argument("weights", nargs="+", metavar="SOURCE=WEIGHT", help="of every source; 0 takes none of it")
    topology = actions.add_parser(
        "topology",
        **described("plan the same global batches for other replicas, from the first uncommitted step on; ranks connect again"),
    )
    topology.add_argument("job", metavar="JOB", help="name of the job")
    parts = topology.add_argument_group("what changes of it")
    parts.add_argument("--replicas", type=int, metavar="N", help="DP pipelines (default: as they are)")
    parts.add_argument("--microbatches", type=int, metavar="N", help="of each replica (default: as they are)")
    parts.add_argument("--stages", metavar="UNIT=N,...", help="pipeline stages, such as encoder=1,llm=3 (default: as they are)")
    parts.add_argument(
        "--speeds",
        metavar="X,...",
        help="of the replicas, relative to each other: their shares follow (default: as they are)",
    )
    trainers = topology.add_argument_group("or all of it, for other trainers")
    trainers.add_argument(
        "--file",
        type=Path,
        metavar="FILE.yaml",
        help="plan for pipelines of this file of `headrace train --topology`: replicas, stages, schedule and units",
    )
    trainers.add_argument(
        "--fsdp-ranks",
        type=int,
        metavar="N",
        help="plan for N ranks of `headrace train --fsdp`, which have all units each; what is frozen or checkpointed stays so",
    )
    topology.add_argument(
        "--coefficients", type=Path, metavar="FILE", help="a file of `headrace profile` with costs for these slices of the layers"
    )
    topology.add_argument("--generation", type=int, metavar="N", help="refuse unless this is the present one (default: any)")
    cancel = actions.add_parser("cancel", **described("end a job for good; its ledger stays"))
    cancel.add_argument("job", metavar="JOB", help="name of the job")
    delete = actions.add_parser(
        "delete",
        help="delete jobs that are over, with their ledgers; their names can be used again then",
        description="Delete jobs that are over with all that the store has of them: ledger, manifest and quarantine. Their names "
        "are free then. A job that runs is refused: cancel it first. Without this command finished jobs are dropped after the "
        "time that `headrace reorder --keep-finished` names.",
    )
    delete.add_argument("jobs", nargs="+", metavar="JOB", help="names of jobs")
    examples = {name: f"  headrace job {name} {rest}\n" for name, rest in _EXAMPLES.items()}
    parser.epilog = f"examples:\n{''.join(examples.values())}"
    for name, action in actions.choices.items():
        action.epilog = f"example:\n{examples[name]}"
        add_endpoint(action)
        formats = FORMATS if action is quarantine else ("table", "json")
        action.add_argument("--format", choices=formats, default="table", help="of what is printed (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Carry out the action `args.action`, and print what comes of it."""
    if args.action in ("show", "quarantine"):
        _show(args)
        return 0
    from headrace.cli.watch.submission import read_spec, with_coefficients
    from headrace.jobs import Jobs

    with Jobs(args.endpoint) as jobs:
        match args.action:
            case "submit":
                spec = read_spec(args.spec)
                status = jobs.submit(spec if args.coefficients is None else with_coefficients(spec, args.coefficients))
                _print([{"job": status.job, "state": status.state}], args.format)
            case "list":
                _print(list(map(_row, jobs.list(finished=None if args.all else LISTED_FINISHED))), args.format)
            case "delete":
                _delete(jobs, args.jobs, args.format)
            case _:
                _print([_row(_change(jobs, args))], args.format)
    return 0


def _show(args: argparse.Namespace) -> None:
    """Print what there is to say of one job, or of the samples that it does not use."""
    from headrace.cli.watch.summary import print_summary, summarise
    from headrace.jobs_client import JobsClient
    from headrace.printable import printable

    with JobsClient(args.endpoint) as client:
        if args.action == "quarantine":
            print_quarantine(client, args.job, args.format)
            return
        print_summary(summarise(client, args.job), args.format)
        status = client.show(args.job)
        if status.message and args.format == "table":
            print(printable(status.message))


def _delete(jobs: Jobs, names: list[str], output: str) -> None:
    """Delete jobs up to the first that is refused, and print which are deleted."""
    deleted: list[dict[str, Any]] = []
    try:
        for name in dict.fromkeys(names):
            jobs.delete(name)
            deleted.append({"job": name, "state": "deleted"})
    finally:
        if deleted:
            _print(deleted, output)


def _change(jobs: Jobs, args: argparse.Namespace) -> JobStatus:
    """Carry out an action that changes the job; return its new status.

    Raises SpecError for an invalid topology, and the errors of the service.
    """
    match args.action:
        case "pause":
            return jobs.pause(args.job)
        case "resume":
            return jobs.resume(args.job)
        case "reset":
            return jobs.reset(args.job, args.step)
        case "weights":
            return jobs.set_weights(args.job, args.from_step, dict(map(_weight, args.weights)))
        case "topology":
            present = jobs.show(args.job).generation
            planned = _planned_for(jobs.spec(args.job), args)
            if args.file is None and args.fsdp_ranks is None and args.coefficients is None:
                return jobs.set_topology(args.job, planned.topology, generation=args.generation)
            read = args.generation or present  # so that nobody else's change is undone
            return jobs.set_topology(args.job, planned.topology, planned.execution, generation=read)
        case _:
            return jobs.cancel(args.job)


def _planned_for(spec: JobSpec, args: argparse.Namespace) -> JobSpec:
    """Return the job's spec with the changes of its topology that the arguments ask for."""
    from headrace.cli.watch.submission import with_coefficients
    from headrace.errors import SpecError, UserError

    if args.file is not None:
        from headrace.plan import LLM
        from headrace.trainer.pipeline.topology import load_topology_yaml

        if args.stages or args.speeds or args.replicas is not None:
            raise UserError("--file gives replicas and stages: take --replicas, --stages and --speeds away")
        pipeline = load_topology_yaml(args.file)
        spec = pipeline.planned_for(spec, pipeline.replicas[LLM])
    if args.fsdp_ranks is not None:
        if args.file is not None or args.stages or args.speeds or args.replicas is not None:
            raise UserError("--fsdp-ranks gives replicas and stages: take --file, --replicas, --stages and --speeds away")
        from headrace.trainer.orchestrated.fsdp_ranks import planned_for_ranks

        spec = planned_for_ranks(spec, args.fsdp_ranks)
    if args.coefficients is not None:
        spec = with_coefficients(spec, args.coefficients)
    try:
        pairs = [pair.partition("=") for pair in args.stages.split(",")] if args.stages else None
        stages = {unit: int(number) for unit, _, number in pairs} if pairs else None
        speeds = [float(speed) for speed in args.speeds.split(",")] if args.speeds else None
    except ValueError as err:
        raise SpecError(f"--stages reads encoder=1,llm=3 and --speeds 1,1,0.5: {err}") from err
    return spec.with_topology(
        spec.topology.changed(replicas=args.replicas, microbatches=args.microbatches, stages=stages, speeds=speeds)
    )


def _weight(text: str) -> tuple[str, float]:
    from headrace.errors import UserError

    source, _, number = text.rpartition("=")
    try:
        return source, float(number)
    except ValueError:
        raise UserError(f"{text!r} is not SOURCE=WEIGHT, for example web=0.7") from None


def _row(status: JobStatus) -> dict[str, Any]:
    """Return a job's status in its public JSON form. `num_steps` is 0 until it is known."""
    return {
        "job": status.job,
        "state": status.state,
        "committed_steps": status.committed_steps,
        "num_steps": status.num_steps,
        "num_shards": status.num_shards,
        "indexed_shards": status.indexed_shards,
        "samples": status.samples,
        "quarantined": status.quarantined,
        "message": status.message,
    }


def _print(rows: list[dict[str, Any]], output: str) -> None:
    if output == "json":
        print(json.dumps({"jobs": rows}, ensure_ascii=False))
        return
    if not rows:
        print("no jobs")
        return
    from rich.console import Console

    # Not a table of rich, which takes a millisecond a row: there may be 100,000.
    header = ["job", "state", *("steps", "samples", "quarantined", "shards")[: 4 * ("committed_steps" in rows[0])]]
    cells = [[row["job"], row["state"], *_progress(row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    line = "  ".join(f"{{:{'<' if place < 2 else '>'}{width}}}" for place, width in enumerate(widths))
    Console().print(line.format(*header).rstrip(), style="dim", highlight=False, soft_wrap=True)
    print("\n".join(line.format(*row).rstrip() for row in cells))
    for row in rows:
        if row.get("message"):
            print(f"{row['job']}: {row['message']}")


def _progress(row: dict[str, Any]) -> list[str]:
    """Return the cells for steps, samples, quarantined and shards, with totals if known; none for a row without these figures."""
    if "committed_steps" not in row:
        return []
    steps, shards = (row["committed_steps"], row["num_steps"]), (row["indexed_shards"], row["num_shards"])
    of = [f"{done:,} of {total:,}" if total else f"{done:,}" for done, total in (steps, shards)]
    return [of[0], f"{row['samples']:,}", f"{row['quarantined']:,}", of[1]]
