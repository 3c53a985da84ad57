"""`headrace train` as a user runs it, a process for each GPU, on the bundled example: whole replicas, pipelines, nodes."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.isolated_check import skipped
from benchmarks.gpu.target import Target
from benchmarks.preprocess.services import Services, services
from benchmarks.report import Row, at_least, at_most, failed
from headrace.cli.example import example_data
from headrace.processes import POLL_S, Process, ProcessGroup, torchrun_environments
from headrace.spec import parse_spec

UNITS = ("encoder", "llm")
PIPELINES: dict[str, dict[str, dict[str, int]]] = {
    "encoder and llm": {"encoder": {}, "llm": {}},
    "llm in 2 stages": {"encoder": {}, "llm": {"pp": 2}},
    "2 replicas": {"encoder": {"dp": 2}, "llm": {"dp": 2}},
    "llm in 2 slices, 2 encoders": {"encoder": {"dp": 2}, "llm": {"tp": 2}},
    "2 replicas, llm in 2 stages": {"encoder": {"dp": 2}, "llm": {"dp": 2, "pp": 2}},
    "llm in 2 stages and 2 slices, 4 encoders": {"encoder": {"dp": 4}, "llm": {"pp": 2, "tp": 2}},
}
"""Units by name, from the fewest processes to the most. Each runs where there are as many GPUs."""
NODES = 4
"""The fewest that hold two pipelines of both units, one to outlast a lost node."""
STEPS, TINY_STEPS = 8, 2
MAX_PIXELS = 112 * 112
FIRST_LOSS_GOAL = 5e-3
"""Most relative difference of the first loss: each kind of device draws other weights, of the same distribution."""
LOSS_GOAL = 0.99
"""Most of the first step's loss that the last one may have."""
_LONGEST_S, _LONGEST_ON_CPU_S = 50.0, 250.0
_EXIT_REFUSED = 2  # of a command that is asked for what cannot be


def measure(target: Target) -> Iterator[Row]:
    """Yield what each way of training comes to: the loss of its last step, and a sentence where it is refused."""
    with services([("--threads", "2")] * (2 if target.is_gpu else 1)) as running, tempfile.TemporaryDirectory() as name:
        trainers = _Trainers(target, running, Path(name))
        world = max(1, target.num_gpus)
        yield from trainers.rows(f"whole replicas, {world} process(es)", world, world, [], beside_cpu=target.is_gpu)
        for number, (pipeline, units) in enumerate(PIPELINES.items()):
            size = sum(math.prod(unit.values()) for unit in units.values())
            title = f"pipeline: {pipeline}, {size} processes"
            if size > target.num_gpus:
                yield skipped(title, f"{target.num_gpus} GPU(s) here")
                continue
            file = trainers.write(f"topology-{number}", {"units": units})
            yield from trainers.rows(title, units["llm"].get("dp", 1), size, ["--topology", str(file)])
        title = f"{NODES} nodes of a recoverable job that share a GPU"
        if target.is_gpu:
            file = trainers.write("nodes", {"nodes": NODES, "max_failures": 1, "units": {unit: {} for unit in UNITS}})
            yield from trainers.rows(title, 1, NODES, ["--nodes", str(file)])
        else:
            yield skipped(title, "no GPU here")


class _RefusedError(Exception):
    """What was asked for is not built, as the command says in a sentence."""


class _Trainers:
    def __init__(self, target: Target, running: Services, folder: Path) -> None:
        self._target, self._running, self._folder = target, running, folder
        self._num_steps = STEPS if target.is_gpu else TINY_STEPS
        self._longest_s = _LONGEST_S if target.is_gpu else _LONGEST_ON_CPU_S
        self._num_jobs = 0

    def write(self, name: str, document: Mapping[str, Any]) -> Path:
        """Write a YAML file, and return its path."""
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    def rows(self, name: str, replicas: int, world: int, options: Sequence[str], *, beside_cpu: bool = False) -> Iterator[Row]:
        """Train a job to its end, and yield the last loss over the first. `beside_cpu`: train it on the CPU as well."""
        began_s = time.monotonic()
        try:
            losses = self._train(self._target.device_type, replicas, world, options)
        except _RefusedError as err:
            yield skipped(name, str(err))
            return
        except RuntimeError as err:
            yield failed(f"{name}: {err}")
            return
        seconds = time.monotonic() - began_s
        yield Row(
            name=f"{name}: last loss over the first",
            value=losses[-1] / losses[0],
            unit="x",
            goal=at_most(LOSS_GOAL),
            detail=f"{losses[0]:.3f} to {losses[-1]:.3f}, {seconds:.0f} s with the start",
        )
        yield Row(name=f"{name}: steps", value=len(losses), unit="steps", goal=at_least(self._num_steps))
        if beside_cpu:
            of_cpu = self._train("cpu", replicas, world, options)
            apart = abs(losses[0] / of_cpu[0] - 1)
            yield Row(name=f"{name}: first loss beside the CPU's", value=apart, unit="relative", goal=at_most(FIRST_LOSS_GOAL))

    def _train(self, device: str, replicas: int, world: int, options: Sequence[str]) -> list[float]:
        """Train a new job, and return the losses of its steps, as the last process logs them."""
        self._num_jobs += 1
        job = self._running.submit(parse_spec(self._document(f"gpu-{self._num_jobs}", replicas)))
        arguments = [
            "train",
            "--endpoint",
            self._running.endpoint,
            "--job",
            job,
            "--device",
            device,
            "--log-format",
            "json",
            *options,
        ]
        under_torchrun = world > 1 and "--nodes" not in options
        environments = torchrun_environments(world) if under_torchrun else [{"LOCAL_RANK": "0"}] * world
        log = self._run(job, [*arguments, "--threads", "1"], environments)
        events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
        return [float(event["loss"]) for event in events if event["event"] == "step"]

    def _document(self, name: str, replicas: int) -> dict[str, Any]:
        return {
            "name": name,
            "sources": [{"path": str(example_data()), "name": "data"}],
            "global_batch": 8 * replicas,
            "steps": self._num_steps,
            "image": {"max_pixels": MAX_PIXELS},
            "topology": {"replicas": replicas, "microbatches": 2, "stages": dict.fromkeys(UNITS, 1)},
        }

    def _run(self, job: str, arguments: list[str], environments: Sequence[Mapping[str, str]]) -> Path:
        """Run the processes to their end, and return the last one's log.

        Raises _RefusedError or RuntimeError with the last words of one that fails.
        """
        with ProcessGroup() as group:
            processes = [
                group.add(Process(f"{job}, process {rank}", arguments, self._folder / f"{job}-{rank}.log", environment))
                for rank, environment in enumerate(environments)
            ]
            deadline = time.monotonic() + self._longest_s
            while any(one.exit_code() is None for one in processes) and time.monotonic() < deadline:
                time.sleep(POLL_S)  # polls real processes
            for one in processes:
                code, words = one.exit_code(), one.last_words().rpartition(" (log: ")[0]
                if code == _EXIT_REFUSED:
                    raise _RefusedError(words)
                if code != 0:
                    ended = f"is not done within {self._longest_s:g} s" if code is None else f"ended with exit code {code}"
                    raise RuntimeError(f"{one.name} {ended}: {words}")
            return processes[-1].log
