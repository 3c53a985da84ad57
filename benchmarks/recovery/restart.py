"""What a loss costs a job that goes on from a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from statistics import median

from benchmarks.recovery.training import NUM_NODES, REPLICAS, Services, kill
from benchmarks.report import Row, at_least
from benchmarks.timing import progress

FASTER_GOAL = 10.0
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
