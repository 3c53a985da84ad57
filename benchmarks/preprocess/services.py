"""Headrace as a user runs it: a reorder service and preprocessors, each a process of its own, for one measurement."""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.preprocess.meter import Reading
from headrace.jobs_client import JobsClient
from headrace.processes import Process, ProcessGroup
from headrace.spec import JobSpec

STOP_TIMEOUT_S = 10.0
LONGEST_S = 180.0
"""That any process of a measurement may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Running services, with a job that waits for its trainer."""

    endpoint: str
    reorder_pid: int
    reorder_log: Path
    preprocessor_pids: Sequence[int]

    @property
    def pids(self) -> list[int]:
        """The reorder service's, then those of the preprocessors."""
        return [self.reorder_pid, *self.preprocessor_pids]

    def submit(self, spec: JobSpec) -> str:
        """The job's name."""
        with JobsClient(self.endpoint) as client:
            return client.submit(spec)


@contextmanager
def services(preprocessors: Sequence[Sequence[str]], *, cores: Sequence[str] = (), others: str = "") -> Iterator[Services]:
    """Start them, end them. `preprocessors`: the arguments of each; `cores`: where each runs, as taskset has it; `others`: where
    the reorder service does."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, ProcessGroup() as group:
        logs = Path(folder)
        arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", f"embedded:{logs / 'store'}"]
        reorder = group.add(Process("reorder service", arguments, logs / "reorder.log"))
        pin(reorder.pid, others)
        endpoint = reorder.endpoint()
        started = []
        for number, extra in enumerate(preprocessors):
            arguments = ["preprocessor", "--listen", "127.0.0.1:0", "--endpoint", endpoint, *extra]
            started.append(group.add(Process(f"preprocessor {number}", arguments, logs / f"preprocessor-{number}.log")))
            pin(started[-1].pid, cores[number] if cores else "")
        for process in started:
            process.endpoint()
        try:
            yield Services(
                endpoint=endpoint,
                reorder_pid=reorder.pid,
                reorder_log=reorder.log,
                preprocessor_pids=[process.pid for process in started],
            )
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(STOP_TIMEOUT_S)  # on a busy machine longer than the group would: they remove their shared memory


def pin(pid: int, cores: str) -> None:
    """Keep a process, all of its threads, and what it starts on these cores; "": wherever it likes."""
    if cores:
        subprocess.run(["taskset", "--all-tasks", "--cpu-list", "--pid", cores, str(pid)], check=True, capture_output=True)


def trainer_command(
    endpoint: str, job: str, *, skip: int, seconds: float, cores: str = "", extra: Sequence[str] = ()
) -> list[str]:
    """Of the process that consumes a job."""
    pinned = ["taskset", "--cpu-list", cores] if cores else []
    options = ["--skip", str(skip), "--seconds", str(seconds), *extra]
    return [*pinned, sys.executable, "-m", "benchmarks.preprocess.trainer", endpoint, job, *options]


def next_line(process: subprocess.Popen[str], timeout_s: float = LONGEST_S) -> str:
    """What a process says next. Raises RuntimeError where it ends without a word, or says none in time."""
    command = " ".join(map(str, process.args))  # type: ignore[arg-type]
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        raise RuntimeError(f"{command} says nothing for {timeout_s:.0f} s: the machine may be too busy to measure on")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{command} ended before it was ready; above is why")
    return line


def measure(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Reading:
    """Run a contender to its end. Raises RuntimeError with its last words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    try:
        return Reading.parse(done.stdout)
    except ValueError as err:
        raise RuntimeError(f"{' '.join(command)}: {err}; {done.stderr.strip()[-1000:]}") from err
