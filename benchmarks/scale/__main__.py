"""`python -m benchmarks.scale`: one reorder service beside 1,024 trainer ranks and 256 preprocessors, or ten times as many.

Prints a table and writes a JSON file. The reorder service is the real one, in a process of its own, with an embedded store;
ranks and preprocessors are light clients (benchmarks.scale.ranks, benchmarks.scale.fleet) that speak the real protocol: a host
of ranks and a preprocessor over a connection each. All of them share this machine, so that the service has less of it than it
would have in a cluster.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.preprocess.meter import tree_cpu_s
from benchmarks.report import RESULTS, Report, Row, Section, at_most
from benchmarks.scale import leader_change, many_jobs
from benchmarks.scale.light_clients import Client, job_spec
from benchmarks.scale.workload import (
    HOST_RANKS,
    MICROBATCHES,
    RANK_SAMPLES,
    ROWS,
    SHARDS,
    TOLD_LANES,
    TOLD_MODES,
    WINDOW,
)
from benchmarks.timing import percentile, progress
from headrace import rpc
from headrace.jobs_client import JobsClient
from headrace.processes import Process, ProcessGroup

RANK_PROCESSES = 2
GOAL_S = 0.1
COMMIT_S = 0.05
TOLD_MB = 20
TOLD_GOAL_S = 0.15  # the goal for all CPU of a step, of which this is the part that whole plans take
PLANNED_TIMEOUT_S = 60.0
BEGIN_S = 2.0  # from a window of planned steps to the first commit
_FIRST = WINDOW  # steps that are not counted: their plans are made at once when the job begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A job with its clients."""

    ranks: int
    preprocessors: int
    steps: int
    step_s: float
    """From one step of all ranks to the next."""
    cpu_s: float
    """Goal for the CPU of a step."""


NORMAL = Size(ranks=1024, preprocessors=256, steps=30, step_s=2.0, cpu_s=0.15)
QUICK = Size(ranks=64, preprocessors=16, steps=10, step_s=2.0, cpu_s=0.15)
LARGE = Size(ranks=10_000, preprocessors=2_000, steps=180, step_s=10.0, cpu_s=10.0)
"""The size of `--large`, which takes thirty minutes: CPU for a step every `step_s` is at most that of one core."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the clients, and ten steps")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where scale.json goes")
    parser.add_argument("--told-only", action="store_true", help="only what whole plans take of the event loop; writes no file")
    parser.add_argument(
        "--large", action="store_true", help="10,000 ranks, 2,000 preprocessors, for half an hour; scale-large.json"
    )
    parser.add_argument("--steps", type=int, help="how many steps, in place of 30 or 180")
    options = parser.parse_args()
    size = LARGE if options.large else QUICK if options.quick else NORMAL
    size = replace(size, steps=options.steps or size.steps)
    sections = [] if options.told_only else [_measure(size)]
    if options.large:
        sections.append(leader_change.measure(quick=options.quick))
    else:
        sections.append(_measure_telling(TOLD_LANES // (16 if options.quick else 1)))
        if not options.told_only:
            sections.append(many_jobs.measure(quick=options.quick))
    report = Report(
        benchmark="scale-large" if options.large else "scale",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=sections,
    )
    if not options.told_only:
        report.write(options.results / f"{report.benchmark}.json")
    report.show()


def _measure_telling(lanes: int) -> Section:
    rows = []
    for mode, meaning in TOLD_MODES.items():
        progress(f"told: {mode}")
        command = [sys.executable, "-m", "benchmarks.scale.telling", mode, str(lanes)]
        told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
        sizes = f"{told['host_bytes'] / 1e3:,.0f} kB to a host at most"
        rows.append(
            Row(
                name=f"{mode}, bytes of a step's plans and places",
                value=told["all_bytes"] / 1e6,
                unit="MB",
                goal=at_most(TOLD_MB),
            )
        )
        rows.append(
            Row(
                name=f"{mode}, event loop's time for a step's plans and places",
                value=told["loop_s"],
                unit="s",
                goal=at_most(TOLD_GOAL_S),
                detail=f"{sizes}; {told['turn_s']:.3f} s at a time at most; {meaning}",
            )
        )
    title = f"{told['ranks']:,} ranks that are told whole plans of {told['samples']:,} samples, which nobody trains"
    return Section(title=title, rows=rows)


def _measure(size: Size) -> Section:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, ProcessGroup() as group:
        arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", f"embedded:{name}/store"]
        service = group.add(Process("reorder service", arguments, Path(name) / "reorder.log"))
        endpoint = service.endpoint()
        rpc.await_reorder_service(endpoint)
        progress(f"{size.preprocessors} preprocessors join")
        fleet = Client("benchmarks.scale.fleet", endpoint, size.preprocessors)
        with JobsClient(endpoint) as client:
            job = client.submit(job_spec(size.ranks, size.steps))
        progress(f"{size.ranks} ranks connect")
        each = size.ranks // RANK_PROCESSES
        ranks = [
            Client("benchmarks.scale.ranks", endpoint, job, n * each, each, size.ranks, size.step_s)
            for n in range(RANK_PROCESSES)
        ]
        for process in ranks:
            process.wait_open()
        _wait_for_window(endpoint, job)
        progress(f"{size.steps} steps, one every {size.step_s:g} s")
        begin_s = time.monotonic() + BEGIN_S
        cpu_s = tree_cpu_s(service.pid)
        for process in ranks:
            process.begin(begin_s)
        with ThreadPoolExecutor(len(ranks)) as pool:
            results = [done.result() for done in as_completed(pool.submit(process.result) for process in ranks)]
        cpu_s, memory_mib = tree_cpu_s(service.pid) - cpu_s, _peak_mib(service.pid)
        probed = {int(step): at_s for step, at_s in fleet.result(end=True).items()}
    return _section(size, results, probed, begin_s, cpu_s / size.steps, memory_mib)


def _wait_for_window(endpoint: str, job: str) -> None:
    deadline = time.monotonic() + PLANNED_TIMEOUT_S
    with JobsClient(endpoint) as client:
        while (planned := client.show(job).planned_steps) < WINDOW:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {planned} of {WINDOW} steps were planned within {PLANNED_TIMEOUT_S:g} s")
            time.sleep(0.1)


def _section(
    size: Size,
    results: list[dict[str, list[list[float]]]],
    probed: dict[int, float],
    begin_s: float,
    cpu_s: float,
    memory_mib: float,
) -> Section:
    counted = range(_FIRST, size.steps)

    def of(what: str) -> list[tuple[int, float]]:
        return [(int(step), value) for result in results for _, step, value in result[what] if step in counted]

    waits = [max(0.0, at_s - begin_s - step * size.step_s) for step, at_s in of("places")]
    plans = [at_s - probed[step] for step, at_s in of("plans")]
    places = [at_s - probed[step] for step, at_s in of("places")]
    commits = [seconds for _, seconds in of("commits")]
    rows = [
        Row(
            name="a rank waits for its next plan, places of the parts included, p99",
            value=percentile(waits, 99),
            unit="s",
            goal=at_most(GOAL_S),
            detail=f"{sum(wait > 0 for wait in waits):,} of {len(waits):,} waited; {_spread(waits)}",
        ),
        Row(
            name="from the last sample's probe to a rank's plan, p99",
            value=percentile(plans, 99),
            unit="s",
            goal=at_most(GOAL_S),
            detail=_spread(plans),
        ),
        Row(name="and to the places of all its parts, p99", value=percentile(places, 99), unit="s", detail=_spread(places)),
        Row(
            name="a rank's commit, where all commit at once, p99",
            value=percentile(commits, 99),
            unit="s",
            goal=at_most(COMMIT_S),
            detail=_spread(commits),
        ),
        Row(
            name="CPU of the reorder service and its store in a step",
            value=cpu_s,
            unit="s",
            goal=at_most(size.cpu_s),
        ),
        Row(name="memory of the reorder service at most", value=memory_mib, unit="MiB"),
    ]
    title = (
        f"{size.ranks:,} ranks (each {RANK_SAMPLES} samples in {MICROBATCHES} microbatches, {HOST_RANKS} a host), "
        f"{size.preprocessors:,} light preprocessors, {SHARDS * ROWS:,} samples in {SHARDS:,} shards, "
        f"{size.steps} steps, one every {size.step_s:g} s"
    )
    return Section(title=title, rows=rows)


def _peak_mib(pid: int) -> float:
    """Return the most memory that a process has had, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _spread(values: list[float]) -> str:
    return f"median {percentile(values, 50):.3f}, longest {max(values):.3f} s"


if __name__ == "__main__":
    main()
