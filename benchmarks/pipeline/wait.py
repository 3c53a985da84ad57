"""How long the processes of a pipeline wait for data while they train, beside preprocessors that keep up."""

from __future__ import annotations

import json
import tempfile
import time
from datetime import datetime
from pathlib import Path

import yaml

from benchmarks.preprocess.services import LONGEST_S, services
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress
from headrace.cli.example import example_data
from headrace.processes import POLL_S, Process, ProcessGroup, torchrun_environments
from headrace.spec import parse_spec

UNITS = ("encoder", "llm")
PREPROCESSORS = (("--threads", "1"), ("--threads", "1"))
GLOBAL_BATCH, MICROBATCHES = 16, 4
MAX_PIXELS = 224 * 224
SKIP_STEPS, STEPS, QUICK_STEPS = 3, 16, 6
WAIT_GOAL_PERCENT = 1.0


def section(*, quick: bool) -> Section:
    """`headrace train --topology`, a process for each unit, on the bundled example."""
    progress("wait for data of a pipeline that trains")
    steps = SKIP_STEPS + (QUICK_STEPS if quick else STEPS)
    spec = {
        "name": "wait",
        "sources": [{"path": str(example_data())}],
        "global_batch": GLOBAL_BATCH,
        "steps": steps,
        "image": {"max_pixels": MAX_PIXELS},
        "topology": {"replicas": 1, "microbatches": MICROBATCHES, "stages": dict.fromkeys(UNITS, 1)},
    }
    with services(PREPROCESSORS) as running, tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        job = running.submit(parse_spec(spec))
        logs = _train(running.endpoint, job, Path(folder))
        waits = [_wait(log) for log in logs]
    rows = [
        Row(
            name=f"the process of unit {unit!r}",
            value=100 * wait_s / seconds,
            unit="%",
            goal=at_most(WAIT_GOAL_PERCENT),
            detail=f"{1e3 * wait_s / (steps - SKIP_STEPS):.2f} ms of {1e3 * seconds / (steps - SKIP_STEPS):.0f} ms a step",
        )
        for unit, (wait_s, seconds) in zip(UNITS, waits, strict=True)
    ]
    what = f"the bundled example, {GLOBAL_BATCH} samples a step, {len(PREPROCESSORS)} preprocessors on the same cores"
    return Section(
        title=f"Wait for data, as `headrace train` reports it, of the time of {steps - SKIP_STEPS} steps: {what}", rows=rows
    )


def _train(endpoint: str, job: str, folder: Path) -> list[Path]:
    """To the job's end; the log of each process. Raises RuntimeError where one fails or takes too long."""
    topology = folder / "topology.yaml"
    topology.write_text(yaml.safe_dump({"units": {unit: {} for unit in UNITS}}), encoding="utf-8")
    arguments = ["train", "--endpoint", endpoint, "--job", job, "--topology", str(topology), "--threads", "1"]
    with ProcessGroup() as group:
        processes = [
            group.add(Process(unit, [*arguments, "--log-format", "json"], folder / f"{unit}.log", environment))
            for unit, environment in zip(UNITS, torchrun_environments(len(UNITS)), strict=True)
        ]
        deadline = time.monotonic() + LONGEST_S
        while any(process.exit_code() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        failed = [process for process in processes if process.exit_code() != 0]
        if failed:
            raise RuntimeError(f"the trainer of {failed[0].name} ended with {failed[0].exit_code()}: {failed[0].last_words()}")
    return [process.log for process in processes]


def _wait(log: Path) -> tuple[float, float]:
    """Seconds of waiting in all steps behind the first ones, and of these steps."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    steps = [event for event in events if event["event"] == "step"]
    counted = steps[SKIP_STEPS:]
    return sum(step["data_wait_s"] for step in counted), _unix_s(counted[-1]) - _unix_s(steps[SKIP_STEPS - 1])


def _unix_s(event: dict[str, str]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()
