"""`headrace demo`: runs a whole training job on one machine, every service and trainer in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from headrace.cli.costs.reading_options import add_reading_arguments, reading_spec
from headrace.cli.output import make_folder, writing
from headrace.cli.run.processors import usable_processors
from headrace.cli.run.train import TRANSPORTS
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.jobs_client import JobsClient
    from headrace.spec import JobSpec

POLL_S = 0.2
JOB = "demo"
MAX_PIXELS = 224 * 224  # 64 image tokens at most: a laptop's CPU trains on them
_EPILOG = """\
examples:
  headrace demo
  headrace demo /data/films --steps 20 --mapping text=title --mapping ignore=mp4
  headrace demo --spec job.yaml --steps 20

Of a job spec the demo takes the sources, with their mappings and weights, and the sections image,
audio and text. Everything else is as the options here say.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `headrace demo` to its parser."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "path",
        nargs="?",
        metavar="PATH",
        help="folder, file, glob or URL of shards (default: the bundled example); a source's name with --spec",
    )
    job = parser.add_argument_group("job")
    job.add_argument("--steps", type=int, metavar="N", help="stop after so many steps (default: one epoch)")
    job.add_argument("--global-batch", type=int, default=16, metavar="N", help="samples of a step (default: %(default)s)")
    job.add_argument("--seed", type=int, default=0, metavar="N", help="of the global order and the model (default: %(default)s)")
    processes = parser.add_argument_group("processes")
    processes.add_argument("--preprocessors", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    processes.add_argument("--replicas", type=int, default=2, metavar="N", help="data-parallel replicas (default: %(default)s)")
    processes.add_argument("--microbatches", type=int, default=4, metavar="N", help="per replica (default: %(default)s)")
    job.add_argument(
        "--strategy",
        default="auto",
        metavar="NAME",
        help="random (arrival order), disttrain, entrain, orchmllm, joint, taper or auto (default: %(default)s)",
    )
    processes.add_argument("--transport", choices=TRANSPORTS, default="auto", help="of payload (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("headrace-demo"), metavar="DIR", help="logs, picture, spec (default: %(default)s)"
    )
    processes.add_argument(
        "--kill",
        choices=("node",),
        help="train on five nodes without torchrun, kill one of them on the way, and draw the loss beside that of a run without",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of the summary (default: %(default)s)")
    add_reading_arguments(parser, MAX_PIXELS)


def run(args: argparse.Namespace) -> int:
    """Run the demo's job to its end and print its summary; return the exit code."""
    from headrace.cli.demo.display import Display
    from headrace.cli.watch.summary import print_summary
    from headrace.identity import TLS

    if args.preprocessors < 1:
        raise UserError(f"--preprocessors must be at least 1, got {args.preprocessors}")
    os.environ[TLS] = ""  # all processes are of this machine, and papers that the environment names are of another cluster
    spec = _spec(args)
    _check_data(spec)
    make_folder(args.out)
    with _alone(args.out), Display() as display:
        with writing(args.out):
            (args.out / "job.yaml").write_text(yaml.safe_dump(json.loads(spec.to_json()), sort_keys=False))
        if args.kill:
            from headrace.cli.demo.demo_kill import run_and_kill_node

            summary = run_and_kill_node(spec, args.preprocessors, args.transport, args.out, display)
        else:
            summary = _run_processes(spec, args.preprocessors, args.transport, args.out, display)
    print_summary(summary, args.format)
    return 0


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the lock of folder `out`, so that one demo at a time writes there. Raises UserError where another demo holds it."""
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another demo is running in {out}: wait for its end, or name another folder with --out") from None
        yield
    finally:
        os.close(folder)


def _spec(args: argparse.Namespace) -> JobSpec:
    from headrace.cli.example import example_data

    job: dict[str, Any] = {
        "name": JOB,
        "global_batch": args.global_batch,
        "steps": args.steps,
        "seed": args.seed,
        "strategy": args.strategy,
        "topology": {"replicas": args.replicas, "microbatches": args.microbatches, "stages": {"encoder": 1, "llm": 1}},
    }
    if args.spec is not None:
        return reading_spec(args, job, {})
    if args.path is None:
        source = {"path": str(example_data()), "name": "data"}  # the same name wherever the example lies
    else:
        local = Path(args.path)
        source = {"path": str(local.resolve()) if local.exists() else args.path}
    return reading_spec(args, {**job, "image": {"max_pixels": MAX_PIXELS}}, source)


def _check_data(spec: JobSpec) -> None:
    """Raise DatasetError if the data set cannot be listed, before any process is started."""
    from headrace.preprocessor.sources import list_shards

    list_shards(spec)


def _run_processes(spec: JobSpec, num_preprocessors: int, transport: str, out: Path, display: Any) -> dict[str, Any]:
    from headrace.cli.demo.demo_services import start_services
    from headrace.cli.planning.problem import count
    from headrace.cli.watch.summary import summarise
    from headrace.errors import JobFailedError, UnavailableError
    from headrace.jobs_client import JobsClient, state_name
    from headrace.processes import Process, ProcessGroup, torchrun_environments

    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as store, ProcessGroup() as group:
        trainers = 1 + spec.topology.replicas
        display.say(
            f"starting 1 reorder service, {count(num_preprocessors, 'preprocessor')} and {trainers} trainers "
            f"(1 has the encoders, {spec.topology.replicas} the LLM); logs in {out}/"
        )
        services = start_services(group, num_preprocessors, transport, out, Path(store), display)
        endpoint = services.endpoint
        with JobsClient(endpoint) as client:
            job = client.submit(spec)
            arguments = ["train", "--endpoint", endpoint, "--job", job, "--threads", str(max(1, usable_processors() // trainers))]
            arguments += ["--topology", str(_write_topology(spec, out)), "--format", "json", "--transport", transport]
            ranks = [
                group.add(Process(f"trainer {n}", arguments, out / f"trainer-{n}.log", environment))
                for n, environment in enumerate(torchrun_environments(trainers))
            ]
            while any(rank.exit_code() is None for rank in ranks) and not any(rank.exit_code() for rank in ranks):
                services.look_after(display.say)
                with contextlib.suppress(UnavailableError):  # the service is only busy: its process lives
                    display.update(status := client.show(job))
                    if state_name(status) == "failed":  # trainers that still start would take half a minute to notice it
                        raise JobFailedError(status.message)
                time.sleep(POLL_S)
            for rank in sorted(ranks, key=lambda rank: rank.exit_code() or 0):  # one that a signal has ended first: others follow
                _check_trainer(rank, client, job)
            summary = summarise(client, job)
            summary["picture"] = _draw(client, job, out)
        return summary


def _write_topology(spec: JobSpec, out: Path) -> Path:
    """Write the file that assigns a process to the encoders and one to each replica of the LLM; return its path."""
    path = out / "topology.yaml"
    path.write_text(yaml.safe_dump({"units": {"encoder": {"dp": 1}, "llm": {"dp": spec.topology.replicas}}}, sort_keys=False))
    return path


def _check_trainer(trainer: Any, client: JobsClient, job: str) -> None:
    from headrace.errors import HeadraceError, JobFailedError

    if trainer.exit_code():
        message = client.show(job).message
        if message:
            raise JobFailedError(f"{message} (log of {trainer.name}: {trainer.log})")
        raise HeadraceError(trainer.end())


def _draw(client: JobsClient, job: str, out: Path) -> str | None:
    """Draw a step as it arrived and as it was planned; return the picture's path, or None where no step had a sample."""
    import numpy as np

    from headrace.cli.planning.timeline import draw_comparison
    from headrace.errors import NotFoundError
    from headrace.reorder_service.planning import plan as make_plan

    try:
        step, planned, sample_ids, costs = client.show_plan(job)
    except NotFoundError:
        return None
    ids = np.array(sample_ids, dtype=np.int64)
    columns: dict[str, np.ndarray] = {unit: np.array(values) for unit, values in costs.items()}
    arrival = make_plan("random", ids, columns, planned.topology, planned.seed)
    title = f"step {step}: {len(sample_ids)} samples in arrival order, and as planned by {planned.strategy}"
    return str(draw_comparison(out / "timeline.png", arrival, planned, ids, columns, title=title))
