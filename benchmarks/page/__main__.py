"""`make bench-page`: what fifty viewers of the web page cost the service, how soon they see a step, how soon it is painted.

The reorder service is the real one, in a process of its own, with an embedded store, a preprocessor and a job that commits a
step every STEP_S. Its processor time, the store's server included, is read with and without viewers, in turns; what they add is
the difference. Beside it stand as many viewers who ask aiohttp's server once a second for an empty page, the least that a page
which polls costs. Viewers, and the browser, are processes of their own, which share this machine: leave it alone meanwhile.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.page.first_paint import LOADS, Paints, paints
from benchmarks.page.viewers import PERIOD_S, VIEWERS
from benchmarks.preprocess.meter import tree_cpu_s
from benchmarks.report import RESULTS, Report, Rival, Row, Section, at_most
from benchmarks.timing import percentile, progress
from headrace import trainer
from headrace.cli.example import example_data
from headrace.jobs_client import JobsClient
from headrace.processes import Process, ProcessGroup
from headrace.spec import JobSpec, parse_spec
from tests.page.browser import HOW, executable, running_browser

JOB = "seen"
STEP_S = 0.5
BEGUN = 10  # steps before anything is measured
ROUNDS, IDLE_S, WATCHED_S = 3, 13.0, 32.0  # of a round without and with viewers; after 30 s these ask again
GOAL_CORE = 2.0
"""Percent of a core that VIEWERS may cost."""
GOAL_PAINT_MS = 200.0
_BEGIN_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What viewers made of one server, in rounds."""

    cores: Sequence[float]
    """Percent of a core of each round with viewers, less that of the round without before it."""
    idle_cores: Sequence[float]
    took_s: Sequence[float]
    """Until each first answer, or each of those that are polled."""
    answers_per_s: float
    told_s: Sequence[Mapping[int, Sequence[float]]]
    """Of each round: committed steps -> when each viewer was told of so many, in seconds since 1970."""


def main() -> None:
    """Measure, print, write. The verdict is in the table: a goal that is missed is no error of this program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where page.json goes")
    options = parser.parse_args()
    if executable() is None:
        raise SystemExit(f"bench-page: no Chromium was found: {HOW}")
    rounds, idle_s, watched_s = (1, 5.0, 5.0) if options.quick else (ROUNDS, IDLE_S, WATCHED_S)
    progress("an empty page of aiohttp's server")
    with _hello() as (url, pid):
        empty = measure(url, pid, rounds, idle_s, watched_s, "--poll")
    progress("the page of a reorder service with a job")
    with _service() as (url, pid, commits):
        ours = measure(url, pid, rounds, idle_s, watched_s)
        progress("how soon a browser paints it")
        painted, painted_empty = _painted(url, 2 if options.quick else LOADS)
    report = Report(
        benchmark="page",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        quick=options.quick,
        sections=[_viewers_section(ours, empty, commits), _paint_section(painted, painted_empty)],
    )
    report.write(options.results / "page.json")
    report.show()


def measure(url: str, pid: int, rounds: int, idle_s: float, watched_s: float, *how: str) -> Load:
    """Watch a server without and with viewers in turns. `pid`: of its process. `how`: options of the viewers."""
    cores, idle_cores, took_s, told_s = list[float](), list[float](), list[float](), list[dict[int, list[float]]]()
    answers = 0
    all_s = watched_s + 2 * PERIOD_S
    for _ in range(rounds):
        began_cpu_s, began_s = tree_cpu_s(pid), time.perf_counter()
        time.sleep(idle_s)
        idle = (tree_cpu_s(pid) - began_cpu_s) / (time.perf_counter() - began_s)
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.page.viewers", url, JOB, str(all_s), *how], stdout=subprocess.PIPE, text=True
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
        told_s.append({int(steps): times for steps, times in found["told_s"].items()})
        answers += found["answers"]
    return Load(cores=cores, idle_cores=idle_cores, took_s=took_s, answers_per_s=answers / rounds / all_s, told_s=told_s)


def ages_s(commits: Mapping[int, float], told_s: Mapping[int, Sequence[float]]) -> list[float]:
    """Return how long after each commit each viewer was told of it, or of a later one.

    commits: committed steps -> when, in seconds since 1970. Those that were made before the first viewer was told are left out.
    told_s: of one round, as in `Load`.
    """
    if not told_s:
        return []
    found, told, began_s = list[float](), sorted(told_s), min(map(min, told_s.values()))
    for steps, at_s in commits.items():
        place = bisect.bisect_left(told, steps)
        if at_s >= began_s and place < len(told):
            found += [each_s - at_s for each_s in told_s[told[place]]]
    return found


def _viewers_section(ours: Load, empty: Load, commits: Mapping[int, float]) -> Section:
    source = "an empty page of aiohttp, asked for once a second"
    seen_s = [age_s for of_round in ours.told_s for age_s in ages_s(commits, of_round)]
    rows = [
        Row(
            name=f"processor time that {VIEWERS} viewers cost the service",
            value=statistics.median(ours.cores),
            unit="% of a core",
            rival=Rival(value=statistics.median(empty.cores), source=source),
            goal=at_most(GOAL_CORE),
            detail=f"{ours.answers_per_s:.0f} lines/s; rounds {', '.join(f'{core:.2f}' for core in ours.cores)}; "
            f"without viewers {statistics.median(ours.idle_cores):.2f}",
        )
    ]
    rows += [
        Row(
            name=f"from a step's commit until a viewer is told, p{percent}",
            value=1e3 * percentile(seen_s, percent),
            unit="ms",
            detail=f"of {len(seen_s)}",
        )
        for percent in (50, 99)
    ]
    rows += [
        Row(
            name=f"from a question to its first line, p{percent}",
            value=1e3 * percentile(ours.took_s, percent),
            unit="ms",
            rival=Rival(value=1e3 * percentile(empty.took_s, percent), source=source),
            detail=f"of {len(ours.took_s)}",
        )
        for percent in (50, 99)
    ]
    return Section(title=f"{VIEWERS} viewers of the steps of a job that commits one every {STEP_S:g} s", rows=rows)


def _painted(url: str, loads: int) -> tuple[Paints, Paints]:
    """How soon the page of the job is painted, and how soon an empty one."""
    with _hello() as (empty_url, _), tempfile.TemporaryDirectory() as profile, running_browser(Path(profile)) as browser:
        return paints(browser, f"{url}#/job/{JOB}/steps", "Time of a step", loads), paints(browser, empty_url, "hello", loads)


def _paint_section(ours: Paints, empty: Paints) -> Section:
    columns = (
        ("first contentful paint", ours.first, empty.first, at_most(GOAL_PAINT_MS)),
        ("first contentful paint of a page that was open before", ours.again, empty.again, None),
        ("largest contentful paint, with the figures of the job", ours.whole, empty.whole, None),
    )
    rows = [
        Row(
            name=f"{name}, median",
            value=statistics.median(mine),
            unit="ms",
            rival=Rival(value=statistics.median(theirs), source="an empty page of aiohttp"),
            goal=goal,
            detail=f"best {min(mine):.0f}, worst {max(mine):.0f} of {len(mine)}; empty {min(theirs):.0f} to {max(theirs):.0f}",
        )
        for name, mine, theirs, goal in columns
    ]
    return Section(title="a headless Chromium on the same machine, while the job goes on", rows=rows)


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
def _service() -> Iterator[tuple[str, int, Mapping[int, float]]]:
    """A reorder service with a job that goes on: the URL of its page, its process id, and when so many steps were committed."""
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
        ended, begun, commits = threading.Event(), threading.Event(), dict[int, float]()
        consumer = threading.Thread(target=_consume, args=(endpoint, begun, ended, commits))
        consumer.start()
        try:
            if not begun.wait(_BEGIN_TIMEOUT_S):
                raise TimeoutError(f"the job has not committed {BEGUN} steps: {service.last_words()}")
            yield found[1], service.pid, commits
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


def _consume(endpoint: str, begun: threading.Event, ended: threading.Event, commits: dict[int, float]) -> None:
    """Commit a step every STEP_S until `ended`, and note when so many were committed, in seconds since 1970."""
    with trainer.connect(endpoint, job=JOB) as loader:
        for step in loader:
            for _ in step:
                pass
            loader.commit(step, loss=1.0)
            commits[step.index + 1] = time.time()
            if step.index >= BEGUN:
                begun.set()
            if ended.wait(STEP_S):
                return


if __name__ == "__main__":
    main()
