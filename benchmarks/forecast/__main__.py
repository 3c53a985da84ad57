"""`python -m benchmarks.forecast`: live jobs train on this machine, and each step's forecast stands beside what the step took.

The trainers are real processes that compute, with one thread each. A job starts from the operations of its model at the nominal
rate of an accelerator, so that its first costs are wrong by some 10,000, and by another factor in each unit; one starts from
coefficients that are wrong in one unit. Where a machine has fewer free cores than a job has processes, they take turns, and a
step takes what nobody can forecast: the load of the machine stands in each row.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.forecast.live_job import step_times, train
from benchmarks.preprocess.services import Services, services
from benchmarks.report import RESULTS, Report, Row, Section, at_most
from benchmarks.timing import progress
from headrace.cli.example import example_data
from headrace.spec import parse_spec

LEARN_STEPS, STEPS, QUICK_STEPS = 20, 20, 8
"""Steps that a job has to learn its costs, and steps behind them that are compared."""
GLOBAL_BATCH, MICROBATCHES, MAX_PIXELS = 16, 4, 224 * 224
LONGEST_S = 280.0
GOAL_PERCENT = 5.0

PLAIN: dict[str, dict[str, Any]] = {"encoder": {}, "llm": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job and its trainers."""

    name: str
    execution: dict[str, Any] = field(default_factory=dict)
    units: dict[str, dict[str, Any]] | None = field(default_factory=lambda: dict(PLAIN))
    """The units of the trainers' topology; None: ranks that have all units."""
    replicas: int = 1

    @property
    def num_processes(self) -> int:
        if self.units is None:
            return self.replicas
        return sum(unit.get("dp", 1) * unit.get("pp", 1) for unit in self.units.values())


PARTS = {"vision": (2, 1.6e-9, 2.9e-6), "audio": (2, 1.8e-9, 2.3e-6), "llm": (4, 1.8e-9, 3.4e-5)}
"""Layers of the parts of the tiny model, and seconds of a layer by square of the positions and by position: about those that
`headrace profile tiny` has measured on two cores, with the head among the llm's layers."""
TOO_SLOW = {
    "model": "tiny",
    "units": {
        part: {"layers": layers, "quadratic_s": (scale := 3 if part == "llm" else 1) * quadratic_s, "linear_s": scale * linear_s}
        for part, (layers, quadratic_s, linear_s) in PARTS.items()
    },
}
FROZEN = {"encoder": {"frozen": True}, "llm": {}}
CHECKPOINTED = {"encoder": {}, "llm": {"checkpointing": True}}
CASES = (
    Case(name="1f1b"),
    Case(name="1f1b, coefficients of the llm 3 x too large", execution={"coefficients": TOO_SLOW}),
    Case(name="zero-bubble", execution={"schedule": "zero-bubble"}),
    Case(name="eager", execution={"schedule": "eager"}),
    Case(name="frozen encoder", units=FROZEN, execution={"units": {"encoder": {"frozen": True}}}),
    Case(name="checkpointing", units=CHECKPOINTED, execution={"units": {"llm": {"checkpointing": True}}}),
    Case(name="llm pp 2", units={"encoder": {}, "llm": {"pp": 2}}),
    Case(name="dp 2", units={"encoder": {"dp": 2}, "llm": {"dp": 2}}, replicas=2),
    Case(name="colocated, one rank", units=None, execution={"trainer": "colocated", "meet": "step"}),
    Case(name="colocated, dp 2", units=None, execution={"trainer": "colocated", "meet": "step"}, replicas=2),
)


def main() -> None:
    """Measure, print, write. The verdict is in the table: a missed goal is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"compare {QUICK_STEPS} steps of each job instead of {STEPS}")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one of the jobs (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where forecast.json goes")
    options = parser.parse_args()
    steps = QUICK_STEPS if options.quick else STEPS
    with services([("--threads", "1", "--budget-mib", "256")]) as running:
        rows = [_row(running, case, steps) for case in CASES if options.only in (None, case.name)]
    first, last = LEARN_STEPS, LEARN_STEPS + steps - 1
    title = f"Forecast beside measured time of steps {first} to {last}: the tiny model, {GLOBAL_BATCH} samples a replica"
    report = Report(
        benchmark="forecast",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[Section(title=title, rows=rows)],
    )
    report.write(options.results / "forecast.json")
    report.show()


def _row(running: Services, case: Case, steps: int) -> Row:
    progress(f"{case.name}: {case.num_processes} process(es)")
    name = re.sub(r"[^a-z0-9]+", "-", case.name)
    topology = {"replicas": case.replicas, "microbatches": MICROBATCHES}
    if case.units is not None:
        topology["stages"] = {unit: size.get("pp", 1) for unit, size in case.units.items()}  # type: ignore[assignment]
    spec = {
        "name": name,
        "sources": [{"path": str(example_data())}],
        "global_batch": GLOBAL_BATCH * case.replicas,
        "steps": LEARN_STEPS + steps,
        "image": {"max_pixels": MAX_PIXELS},
        "topology": topology,
        "execution": case.execution,
    }
    job = running.submit(parse_spec(spec))
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        _train(running.endpoint, job, case, Path(folder))
    forecast_s, measured_s = step_times(running.reorder_log, job, LEARN_STEPS)
    errors = [abs(forecast / measured - 1.0) for forecast, measured in zip(forecast_s, measured_s, strict=True)]
    return Row(
        name=f"{case.name}, {case.num_processes} process(es): error of the mean step",
        value=100 * abs(sum(forecast_s) / sum(measured_s) - 1.0),
        unit="%",
        goal=at_most(GOAL_PERCENT),
        detail=(
            f"a step {statistics.mean(measured_s):.3g} s, forecast {statistics.mean(forecast_s):.3g}; "
            f"median error of one step {statistics.median(errors):.0%}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        ),
    )


def _train(endpoint: str, job: str, case: Case, folder: Path) -> None:
    """Train the job to its end. Raises RuntimeError where a trainer fails or takes too long."""
    arguments = ["train", "--endpoint", endpoint, "--job", job, "--threads", "1"]
    if case.units is not None:
        schedule = {name: value for name, value in case.execution.items() if name == "schedule"}
        (folder / "topology.yaml").write_text(yaml.safe_dump({"units": case.units, **schedule}), encoding="utf-8")
        arguments += ["--topology", str(folder / "topology.yaml")]
    train(arguments, case.num_processes, folder, LONGEST_S)


if __name__ == "__main__":
    main()
