"""`make bench-page`: what fifty viewers of the web page cost the reorder service, and how soon they are answered.

The reorder service is the real one, in a process of its own, with an embedded store, a preprocessor and a job that commits a
step every STEP_S. Its processor time, the store's server included, is read with and without viewers, in turns; what they add is
the difference. Beside it stands an empty answer of aiohttp's server, under the same viewers. Viewers are a process of their own,
which shares this machine: leave it alone meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.page.viewers import PATHS, PERIOD_S, TIMED, VIEWERS
from benchmarks.preprocess.meter import tree_cpu_s
from benchmarks.report import RESULTS, Report, Rival, Row, Section, at_most
from benchmarks.timing import percentile, progress
from headrace import trainer
from headrace.cli.example import example_data
from headrace.jobs_client import JobsClient
from headrace.processes import Process, ProcessGroup
from headrace.spec import JobSpec, parse_spec

JOB = "seen"
STEP_S = 0.5
BEGUN = 10  # steps before anything is measured
ROUNDS, ROUND_S = 4, 20.0
GOAL_CORE = 2.0
"""Percent of a core that VIEWERS may cost."""
_BEGIN_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What viewers made of one server, in rounds."""

    cores: Sequence[float]
    """Percent of a core of each round with viewers, less that of the round without before it."""
    idle_cores: Sequence[float]
    took_s: Sequence[float]
    answers_per_s: float


def main() -> None:
    """Measure, print, write. The verdict is in the table: a goal that is missed is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where page.json goes")
    options = parser.parse_args()
    rounds, seconds = (1, 5.0) if options.quick else (ROUNDS, ROUND_S)
    progress("an empty answer of aiohttp's server")
    with _hello() as (url, pid):
        empty = measure(url, pid, rounds, seconds)
    progress("the page of a reorder service with a job")
    with _service() as (url, pid):
        ours = measure(url, pid, rounds, seconds)
    report = Report(
        benchmark="page",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[_section(ours, empty)],
    )
    report.write(options.results / "page.json")
    report.show()


def measure(url: str, pid: int, rounds: int, seconds: float) -> Load:
    """Watch a server with and without viewers in turns. `pid`: of its process."""
    cores, idle_cores, took_s = list[float](), list[float](), list[float]()
    answers = 0
    for _ in range(rounds):
        began_cpu_s, began_s = tree_cpu_s(pid), time.perf_counter()
        time.sleep(seconds)
        idle = (tree_cpu_s(pid) - began_cpu_s) / (time.perf_counter() - began_s)
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.page.viewers", url, JOB, str(seconds + 2 * PERIOD_S)],
            stdout=subprocess.PIPE,
            text=True,
        ) as viewers:
            time.sleep(2 * PERIOD_S)  # they connect and ask for the first time
            began_cpu_s, began_s = tree_cpu_s(pid), time.perf_counter()
            said, _ = viewers.communicate()
            busy = (tree_cpu_s(pid) - began_cpu_s) / (time.perf_counter() - began_s)
        if viewers.returncode:
            raise RuntimeError(f"the viewers of {url} ended with {viewers.returncode}")
        found = json.loads(said)
        cores.append(100 * (busy - idle))
        idle_cores.append(100 * idle)
        took_s += found["took_s"]
        answers += found["answers"]
    return Load(cores=cores, idle_cores=idle_cores, took_s=took_s, answers_per_s=answers / rounds / (seconds + 2 * PERIOD_S))


def _section(ours: Load, empty: Load) -> Section:
    source = "an empty answer of aiohttp"
    rows = [
        Row(
            name=f"processor time that {VIEWERS} viewers cost the service",
            value=statistics.median(ours.cores),
            unit="% of a core",
            rival=Rival(value=statistics.median(empty.cores), source=source),
            goal=at_most(GOAL_CORE),
            detail=f"{ours.answers_per_s:.0f} answers/s; rounds {', '.join(f'{core:.2f}' for core in ours.cores)}; "
            f"without viewers {statistics.median(ours.idle_cores):.2f}",
        )
    ]
    rows += [
        Row(
            name=f"{TIMED.format(job='NAME')}, p{percent}",
            value=1e3 * percentile(ours.took_s, percent),
            unit="ms",
            rival=Rival(value=1e3 * percentile(empty.took_s, percent), source=source),
            detail=f"of {len(ours.took_s)} answers",
        )
        for percent in (50, 99)
    ]
    title = f"{VIEWERS} viewers, each asking {len(PATHS)} paths every {PERIOD_S:g} s, of a job with a step every {STEP_S:g} s"
    return Section(title=title, rows=rows)


@contextlib.contextmanager
def _hello() -> Iterator[tuple[str, int]]:
    """An empty server: its URL and process id."""
    with subprocess.Popen([sys.executable, "-m", "benchmarks.page.hello"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip(), server.pid
        finally:
            server.kill()


@contextlib.contextmanager
def _service() -> Iterator[tuple[str, int]]:
    """A reorder service with a job that goes on: the URL of its page, and its process id."""
    with tempfile.TemporaryDirectory() as folder, ProcessGroup() as group:
        log = Path(folder) / "reorder.log"
        arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", f"embedded:{folder}/store", "--page", "127.0.0.1:0"]
        service = group.add(Process("reorder", arguments, log))
        endpoint = service.endpoint()
        found = re.search(r"page url=(\S+)", log.read_text())
        assert found is not None, "the log says where the page is"
        preprocessor = ["preprocessor", "--reorder", endpoint, "--listen", "127.0.0.1:0", "--threads", "1", "--budget-mib", "64"]
        group.add(Process("preprocessor", preprocessor, Path(folder) / "preprocessor.log"))
        with JobsClient(endpoint) as client:
            client.submit(_spec())
        ended, begun = threading.Event(), threading.Event()
        consumer = threading.Thread(target=_consume, args=(endpoint, begun, ended))
        consumer.start()
        try:
            if not begun.wait(_BEGIN_TIMEOUT_S):
                raise TimeoutError(f"the job has not committed {BEGUN} steps: {service.last_words()}")
            yield found[1], service.pid
        finally:
            ended.set()
            consumer.join()


def _spec() -> JobSpec:
    return parse_spec(
        {
            "name": JOB,
            "sources": [{"path": str(example_data())}],
            "epochs": 1_000,
            "global_batch": 16,
            "topology": {"replicas": 2, "microbatches": 2},
            "image": {"max_pixels": 112 * 112},
        }
    )


def _consume(endpoint: str, begun: threading.Event, ended: threading.Event) -> None:
    """Commit a step every STEP_S until `ended`."""
    with trainer.connect(endpoint, job=JOB) as loader:
        for step in loader:
            for _ in step:
                pass
            loader.commit(step, loss=1.0)
            if step.index >= BEGUN:
                begun.set()
            if ended.wait(STEP_S):
                return


if __name__ == "__main__":
    main()
