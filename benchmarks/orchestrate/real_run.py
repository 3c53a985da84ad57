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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.forecast.live_job import step_times, train
from benchmarks.orchestrate.command_runs import CommandRuns
from benchmarks.preprocess.services import services
from benchmarks.report import Row, Section, at_most, failed
from benchmarks.timing import progress
from headrace.cli.example import example_data
from headrace.cli.orchestrate.placement_files import JOB
from headrace.cli.progress_bar import PLAIN_INTERVAL_S, told_every
from headrace.errors import HeadraceError
from headrace.spec import parse_spec

MODEL, DATA = "tiny", "charts-*.tar"
MAX_PIXELS, VOCABULARY, GLOBAL_BATCH = 224 * 224, 4096, 32
CORES = 2
GOAL_PERCENT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured, and the seconds after which all of it is given up."""

    service_steps: int
    """Steps in which what services take is measured."""
    tokens: str
    """Lengths of the samples that layers are timed on."""
    rounds: int
    """Over all layers and lengths, at least."""
    within: float
    """How exactly times are to be known."""
    profile_s: float
    """Seconds after which they are taken as they are: of each unit's layers, and of its stage."""
    learn_steps: int
    """Steps in which the job learns its costs, for its own forecasts."""
    steps: int
    """Steps behind them, which are compared."""
    longest_s: float


FULL = Effort(
    service_steps=60, tokens="16,32,64,128,256,512", rounds=7, within=0.01, profile_s=60.0, learn_steps=20, steps=20,
    longest_s=900.0,
)  # fmt: skip
QUICK = Effort(
    service_steps=20, tokens="16,64,256,512", rounds=3, within=0.05, profile_s=5.0, learn_steps=12, steps=8, longest_s=600.0
)
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
    """Yield the forecast of a placement beside real steps, or why these could not be measured."""
    effort = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        try:
            rows = RealRun(Path(folder), effort).rows()
        except (RuntimeError, HeadraceError) as err:
            rows = [failed(str(err))]
    last = effort.learn_steps + effort.steps - 1
    title = f"a placement of the {MODEL} model on {CORES} cores: steps {effort.learn_steps} to {last}, measured"
    yield Section(title=title, rows=rows)


class RealRun:
    """What is measured, one command after the other, in a folder of its own."""

    def __init__(self, folder: Path, effort: Effort) -> None:
        self._folder, self._effort = folder, effort
        self._commands = CommandRuns("real run", folder, effort.longest_s)

    def rows(self) -> list[Row]:
        """Profile, place and train.

        Raises RuntimeError where a command fails, or all take longer than they may, and HeadraceError where a service does not
        start.
        """
        folder, learn_steps, steps = self._folder, self._effort.learn_steps, self._effort.steps
        known_to = self._profiled()
        placement = self._placed()
        job = yaml.safe_load((folder / "plan" / JOB).read_text(encoding="utf-8")) | {"steps": learn_steps + steps}
        learnt_s, measured_s = self._trained(job, placement["processes"])
        best = placement["searches"][0]
        forecast_s, mean_s = best["step_s"], statistics.mean(measured_s)
        units = ", ".join(f"{unit} {grid['dp']} x {grid['tp']} x {grid['pp']}" for unit, grid in best["units"].items())
        load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        return [
            Row(
                name=f"{units}: error of the forecast of the mean step, before anything is trained",
                value=100 * abs(forecast_s / mean_s - 1.0),
                unit="%",
                goal=at_most(GOAL_PERCENT),
                detail=f"a step {mean_s:.3g} s (median {statistics.median(measured_s):.3g}), forecast {forecast_s:.3g}; times "
                f"of layers known to +-: {known_to}; {load}",
            ),
            Row(
                name="the same of the job's own forecasts, corrected by what its trainers measure",
                value=100 * abs(sum(learnt_s) / sum(measured_s) - 1.0),
                unit="%",
                goal=at_most(GOAL_PERCENT),
                detail=f"forecast {statistics.mean(learnt_s):.3g} s in the mean",
            ),
        ]

    @property
    def _job(self) -> list[str]:
        """The options that say what the job is."""
        return [str(example_data() / DATA), "--max-pixels", str(MAX_PIXELS), "--global-batch", str(GLOBAL_BATCH)]

    @property
    def _costs(self) -> Path:
        return self._folder / "costs.json"

    def _profiled(self) -> str:
        """Measure the services and the model; return how exactly the times of its units are known, in words."""
        effort = self._effort
        bench = ["bench", "services", *self._job, "--steps", str(effort.service_steps), "--format", "json"]
        cluster = MACHINE | json.loads(self._commands.run("services", bench))["cluster"]
        (self._folder / "machine.yaml").write_text(yaml.safe_dump(cluster), encoding="utf-8")
        profile = ["profile", MODEL, "--units", "vision,llm", "--threads", "1", "--vocab", str(VOCABULARY)]
        profile += ["--tokens", effort.tokens, "--repeats", str(effort.rounds), "--within", str(effort.within)]
        profile += ["--seconds", str(effort.profile_s), "--beside", str(CORES - 1), "--out", str(self._costs)]
        self._commands.run("profile", profile)
        return str(json.loads(self._costs.read_text(encoding="utf-8"))["measured_on"]["uncertainty"])

    def _placed(self) -> dict[str, Any]:
        """Place the model on this machine's cores; return the content of placement.json."""
        out = self._folder / "plan"
        place = ["orchestrate", "--model", MODEL, "--data", *self._job, "--cluster", str(self._folder / "machine.yaml")]
        place += ["--coefficients", str(self._costs), "--placements", "disaggregated", "--out", str(out)]
        self._commands.run("placement", place)
        document = json.loads((out / "placement.json").read_text(encoding="utf-8"))
        assert isinstance(document, dict)
        return document

    def _trained(self, job: dict[str, Any], processes: int) -> tuple[list[float], list[float]]:
        """Train a job to its end; return the forecast and the measured seconds of its steps behind those in which it learns."""
        progress(f"real run: {processes} trainers, {job['steps']} steps")
        with services([("--threads", "1", "--budget-mib", "256")]) as running:
            name = running.submit(parse_spec(job))

            def tell(past_s: float) -> None:
                progress(f"  {past_s:.0f} s: {len(step_times(running.reorder_log, name, 0)[0])} steps of {job['steps']}")

            with told_every(PLAIN_INTERVAL_S, tell):
                arguments = ["train", "--endpoint", running.endpoint, "--job", name, "--threads", "1"]
                train(arguments, processes, self._folder, self._commands.left_s())
            return step_times(running.reorder_log, name, self._effort.learn_steps)
