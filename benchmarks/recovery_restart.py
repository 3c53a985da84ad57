"""What a job costs that can lose a node, and what one costs that goes on from a checkpoint in its place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.recovery_training import NUM_NODES, REPLICAS, Services, kill
from benchmarks.report import Row, at_least, at_most
from benchmarks.timing import progress
from cli.processes import Process

FASTER_GOAL, OVERHEAD_GOAL_PERCENT = 10.0, 2.0
_ORDER = ("nodes", "ranks", "ranks", "nodes") * 2  # by which what slowly changes beside them counts for both
_STEPS, _WARM_STEPS = 16, 4
_STEPS_BEFORE = 4
_RESTARTS = 3


def faster_rows(services: Services, recovery_s: float, step_s: float, *, quick: bool) -> list[Row]:
    """One process of six is killed, and all of them are started again at once, with a checkpoint of the step before.

    recovery_s: from the loss of a node to the next committed step. step_s: of a step without a loss, which is no loss of time.
    """
    stages = NUM_NODES // REPLICAS - 1
    job = services.submit("checkpoints", stages)
    folder = services.folder / "checkpoints"
    save = ("--checkpoint", str(folder), "--checkpoint-every", "1")
    ranks = services.start_ranks(job, stages, *save)
    seconds = []
    for number in range(1 if quick else _RESTARTS):
        progress(f"restart from a checkpoint, round {number + 1} of {_RESTARTS}")
        services.await_commits(job, _STEPS_BEFORE, time.time())
        os.kill(ranks[number].pid, signal.SIGKILL)
        lost_s = time.time()
        kill(ranks)
        ranks = services.start_ranks(job, stages, *save, "--resume", str(folder))
        seconds.append(services.await_commits(job, 1, time.time())[0] - lost_s)
    kill(ranks)
    services.cancel(job)
    restart_s = median(seconds)
    return [
        Row(
            name="restart from a checkpoint over recovery, beyond a step",
            value=(restart_s - step_s) / (recovery_s - step_s),
            unit="x",
            goal=at_least(FASTER_GOAL),
            detail=f"SIGKILL to the next committed step, less a step: {restart_s - step_s:.1f} and {recovery_s - step_s:.2f} s",
        ),
        Row(
            name="restart from a checkpoint over recovery, with the step",
            value=restart_s / recovery_s,
            unit="x",
            detail=f"SIGKILL to the next committed step: {restart_s:.1f} and {recovery_s:.2f} s",
        ),
    ]


def overhead_row(services: Services, *, quick: bool) -> Row:
    """The same batches and pipelines as nodes and as torchrun's ranks, in turn and each time anew.

    A round of one is compared with the round of the other that is next to it.
    """
    found: dict[str, list[Steps]] = {"nodes": [], "ranks": []}
    for number, who in enumerate(_ORDER[: 2 if quick else None]):
        progress(f"steps of {who}, round {number + 1} of {len(_ORDER)}")
        job = services.submit(f"{who}-{number}", 1)
        trainers = services.start_nodes(job, 2 * REPLICAS) if who == "nodes" else services.start_ranks(job, 1)
        found[who].append(_steps(services, job, trainers))
        kill(trainers)
        services.cancel(job)
    seconds = {who: [median(steps.seconds) for steps in rounds] for who, rounds in found.items()}
    beyond = [(nodes / ranks - 1) * 100 for nodes, ranks in zip(seconds["nodes"], seconds["ranks"], strict=True)]
    cpu = {who: median(steps.cpu_s for steps in rounds) for who, rounds in found.items()}
    return Row(
        name="a step in which a node may be lost, beyond one of torchrun's ranks",
        value=median(beyond),
        unit="%",
        goal=at_most(OVERHEAD_GOAL_PERCENT),
        detail=f"rounds of {_STEPS} steps: {', '.join(f'{value:.1f}' for value in beyond)}; medians "
        f"{median(seconds['nodes']) * 1e3:.0f} and {median(seconds['ranks']) * 1e3:.0f} ms, "
        f"on the trainers' cores {cpu['nodes']:.3f} and {cpu['ranks']:.3f} s",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Undisturbed ones."""

    seconds: list[float]
    """From commit to commit."""
    cpu_s: float
    """Of all trainers, for a step."""


def _steps(services: Services, job: str, trainers: Sequence[Process]) -> Steps:
    services.await_commits(job, _WARM_STEPS, 0.0)
    began_s, cpu_s = time.time(), _cpu_s(trainers)
    times = services.await_commits(job, _STEPS + 1, began_s)
    cpu_s = _cpu_s(trainers) - cpu_s
    return Steps(seconds=[end - begin for begin, end in pairwise(times)], cpu_s=cpu_s / len(times))


def _cpu_s(processes: Sequence[Process]) -> float:
    """All their threads have used of the cores so far."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system
    return ticks / os.sysconf("SC_CLK_TCK")
