"""Four FSDP ranks that train on real media, with gloo: how long their steps take by plan, and what they send each other.

The ranks share the cores of this machine, so that the clock on the wall shows the sum of their work rather than that of the
slowest. So a step is the sum over its phases of the most processor time that any rank's computing thread took in it: what the
step takes on ranks with a core each, but for the exchanges.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.preprocess.services import services
from benchmarks.report import Rival, Row, Section, at_most
from benchmarks.timing import progress
from headrace.child_process import with_parent_death_signal
from headrace.cli.example import example_data
from headrace.jobs_client import JobsClient
from headrace.processes import POLL_S, torchrun_environments
from headrace.spec import parse_spec

RANKS, PER_RANK, MODEL, MAX_PIXELS, MAX_TOKENS = 4, 8, "tiny", 896 * 896, 2048
SKIP_STEPS, STEPS, QUICK_STEPS = 2, 12, 4
SOURCES = {"pictures-00000.tar": 3, "speech-00000.tar": 2, "sound-00000.tar": 1, "text-00000.tar": 2}
"""Shards of the bundled example by their weight: photographs, recordings and texts, whose units differ most."""
PLANS = {"unbalanced": "random", "llm alone balanced": "llm-only", "balanced": "orchmllm"}
GOALS = {"unbalanced": 0.75, "llm alone balanced": 0.9}
LONGEST_S = 280.0


def section(*, quick: bool) -> Section:
    """The same global batches by three plans, one job after the other."""
    steps = SKIP_STEPS + (QUICK_STEPS if quick else STEPS)
    with services([("--threads", "1", "--budget-mib", "256")]) as running:
        ranks = {name: _trained(running.endpoint, name, strategy, steps) for name, strategy in PLANS.items()}
    seconds = {name: step_seconds(of_ranks) for name, of_ranks in ranks.items()}
    rows = [
        Row(
            name=f"step, balanced over {name}",
            value=seconds["balanced"] / seconds[name],
            goal=at_most(goal),
            detail=f"{seconds['balanced'] * 1e3:.0f} over {seconds[name] * 1e3:.0f} ms of processor time",
        )
        for name, goal in GOALS.items()
    ]
    for name, of_ranks in ranks.items():
        sent, planned = (sum(rank[key] for rank in of_ranks) for key in ("sent", "planned"))
        rows.append(
            Row(
                name=f"sent and not planned, or planned and not sent, {name}",
                value=abs(sent - planned),
                unit="bytes",
                rival=Rival(value=planned, source="planned, as the ranks themselves reckon from plans and sizes"),
                goal=at_most(0),
                detail=f"{sent:,} sent in {steps} steps",
            )
        )
    title = (
        f"{RANKS} FSDP ranks by gloo, model {MODEL}, {PER_RANK} samples a rank of photographs, recordings and texts: sum over "
        f"phases of the slowest rank's processor time, {steps - SKIP_STEPS} steps; load {os.getloadavg()[0]:.1f}"
    )
    return Section(title=title, rows=rows)


def _trained(endpoint: str, name: str, strategy: str, steps: int) -> list[dict[str, Any]]:
    """Train a job to its end, and return what each rank measured. Raises RuntimeError where a rank fails or takes too long."""
    progress(f"real ranks: {name}")
    spec = {
        "name": strategy,
        "sources": [{"path": str(example_data() / shard), "weight": weight} for shard, weight in SOURCES.items()],
        "global_batch": RANKS * PER_RANK,
        "steps": steps,
        "seed": 0,
        "strategy": strategy,
        "model": MODEL,
        "image": {"max_pixels": MAX_PIXELS},
        "text": {"max_tokens": MAX_TOKENS},  # a longer one takes more than the others of a step together, whatever the plan
        "topology": {"replicas": RANKS, "microbatches": 1, "stages": {"vision": 1, "audio": 1, "llm": 1}},
        "execution": {"trainer": "fsdp", "correct_costs": False},
    }
    with JobsClient(endpoint) as client:
        job = client.submit(parse_spec(spec))
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        files = [Path(folder) / f"rank-{rank}.json" for rank in range(RANKS)]
        _run_ranks(endpoint, job, files)
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _run_ranks(endpoint: str, job: str, files: list[Path]) -> None:
    processes = []
    try:
        for file, environment in zip(files, torchrun_environments(len(files)), strict=True):
            command = [sys.executable, "-m", "benchmarks.orchmllm.timed_rank", endpoint, job, str(file)]
            with file.with_suffix(".log").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        with_parent_death_signal(command, signal.SIGKILL),
                        stdout=output,
                        stderr=output,
                        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
                    )
                )
        deadline_s = time.monotonic() + LONGEST_S
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, file in zip(processes, files, strict=True):
        if process.returncode:
            words = file.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"{file.stem} ended with {process.returncode}: {words}")


def step_seconds(ranks: list[dict[str, Any]]) -> float:
    """Return the mean over the steps behind the first ones of the sum over phases of the slowest rank's seconds."""
    steps = zip(*(rank["microbatches"][SKIP_STEPS:] for rank in ranks), strict=True)
    return float(np.mean([sum(max(rank[phase] for rank in of_step) for phase in of_step[0]) for of_step in steps]))
