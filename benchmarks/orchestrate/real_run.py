"""A placement on this machine's cores, trained for real: the step that `headrace orchestrate` forecasts beside what steps take.

Costs are measured by `headrace profile` first, as exactly as its times are to be known and beside another process, as trainers
are, and what services take of the cores by `headrace bench services`. Then the written job is trained by the trainers of the
written placement, one thread each, with a reorder service and a preprocessor on the same cores.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.forecast.live_job import await_end, step_times, train
from benchmarks.preprocess.services import services
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress
from headrace.cli.example import example_data
from headrace.cli.orchestrate.placement_files import JOB
from headrace.processes import Process, ProcessGroup
from headrace.spec import parse_spec

MODEL, DATA = "tiny", "charts-*.tar"
MAX_PIXELS, VOCABULARY, GLOBAL_BATCH = 224 * 224, 4096, 32
CORES = 2
LEARN_STEPS, STEPS, QUICK_STEPS = 20, 20, 8
"""Steps in which the job learns its costs, for its own forecasts, and steps behind them that are compared."""
GOAL_PERCENT = 5.0
WITHIN, PROFILE_S, QUICK_PROFILE_S = 0.01, 60.0, 15.0
"""How exactly times are to be known, and the seconds after which they are taken as they are: of each unit's layers and stage."""
_LONGEST_S = 600.0
MACHINE = {
    "nodes": 1,
    "gpus_per_node": CORES,
    "memory_gib": 2,
    "flops_per_s": 20e9,  # not asked for: the times are measured
    "intra_node_bytes_per_s": 1e9,  # of gloo between two processes of one machine
    "inter_node_bytes_per_s": 1e9,
    "latency_s": 200e-6,
    "cores_per_node": CORES,
    "threads": 1,
}
"""Two cores as a cluster of two devices, beside what services take of them."""


def sections(*, quick: bool) -> Iterator[Section]:
    """The forecast of a placement beside real steps."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        yield _section(Path(folder), QUICK_STEPS if quick else STEPS)


def _section(folder: Path, steps: int) -> Section:
    placement = placed(folder, PROFILE_S if steps == STEPS else QUICK_PROFILE_S)
    progress(f"real run: {placement['processes']} trainers, {LEARN_STEPS + steps} steps")
    job = yaml.safe_load((folder / "plan" / JOB).read_text(encoding="utf-8")) | {"steps": LEARN_STEPS + steps}
    learnt_s, measured_s = trained(job, placement["processes"], folder)
    forecast_s = placement["searches"][0]["step_s"]
    mean_s = statistics.mean(measured_s)
    units = ", ".join(
        f"{unit} {grid['dp']} x {grid['tp']} x {grid['pp']}" for unit, grid in placement["searches"][0]["units"].items()
    )
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    rows = [
        Row(
            name=f"{units}: error of the forecast of the mean step, before anything is trained",
            value=100 * abs(forecast_s / mean_s - 1.0),
            unit="%",
            goal=at_most(GOAL_PERCENT),
            detail=f"a step {mean_s:.3g} s (median {statistics.median(measured_s):.3g}), forecast {forecast_s:.3g}; {load}",
        ),
        Row(
            name="the same of the job's own forecasts, corrected by what its trainers measure",
            value=100 * abs(sum(learnt_s) / sum(measured_s) - 1.0),
            unit="%",
            goal=at_most(GOAL_PERCENT),
            detail=f"forecast {statistics.mean(learnt_s):.3g} s in the mean",
        ),
    ]
    title = f"a placement of the {MODEL} model on {CORES} cores: steps {LEARN_STEPS} to {LEARN_STEPS + steps - 1}, measured"
    return Section(title=title, rows=rows)


def placed(folder: Path, profile_s: float) -> dict[str, Any]:
    """Profile the model and the services, and place the model on this machine's cores; return the content of placement.json.

    profile_s: for each of the model's units, layers and stage. Raises RuntimeError where a command fails.
    """
    costs, out, data = folder / "costs.json", folder / "plan", str(example_data() / DATA)
    progress("real run: services")
    job = [data, "--max-pixels", str(MAX_PIXELS), "--global-batch", str(GLOBAL_BATCH)]
    of_services = json.loads(_ran("services", ["bench", "services", *job, "--format", "json"], folder))["cluster"]
    (folder / "machine.yaml").write_text(yaml.safe_dump(MACHINE | of_services), encoding="utf-8")
    progress(f"real run: profile of {MODEL}")
    profile = ["profile", MODEL, "--units", "vision,llm", "--threads", "1", "--vocab", str(VOCABULARY), "--out", str(costs)]
    profile += ["--within", str(WITHIN), "--seconds", str(profile_s), "--beside", str(CORES - 1)]
    _ran("profile", [*profile, "--tokens", "16,32,64,128,256,512"], folder)
    place = [
        "orchestrate", "--model", MODEL, "--data", *job, "--cluster", str(folder / "machine.yaml"), "--coefficients", str(costs),
        "--placements", "disaggregated", "--out", str(out),
    ]  # fmt: skip
    progress("real run: placement")
    _ran("orchestrate", place, folder)
    document = json.loads((out / "placement.json").read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def trained(job: dict[str, Any], processes: int, folder: Path) -> tuple[list[float], list[float]]:
    """Train a job to its end; return the forecast and the measured seconds of its steps behind the first few.

    Raises RuntimeError where a trainer fails or takes too long.
    """
    with services([("--threads", "1", "--budget-mib", "256")]) as running:
        name = running.submit(parse_spec(job))
        train(["train", "--endpoint", running.endpoint, "--job", name, "--threads", "1"], processes, folder, _LONGEST_S)
        return step_times(running.reorder_log, name, LEARN_STEPS)


def _ran(name: str, arguments: list[str], folder: Path) -> str:
    """Run a command of `headrace` to its end; return the last line that it printed."""
    with ProcessGroup() as group:
        process = group.add(Process(name, arguments, folder / f"{name}.log", {"OMP_NUM_THREADS": "1"}))
        await_end([process], _LONGEST_S)
        return process.last_lines(1)[0]
