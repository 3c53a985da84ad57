"""`python -m benchmarks.recovery`: how soon work goes on after a loss, how soon a job is resumed, and how long it takes to plan
for the loss of nodes, and what a trace of losses leaves of the throughput; a table and a JSON file.

Real processes on one Redis server: two reorder services, two preprocessors and this process as the trainer, which computes
nothing. The window is one step, so that the step after a loss needs the whole way: a leader, a plan, decoding, fetching.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from benchmarks.recovery import endings, nodes, planning, replanning, state_copies, traces
from benchmarks.report import RESULTS, Report, Row, Section, at_most
from benchmarks.timing import progress
from headrace import rpc, trainer
from headrace.cli.example import example_data
from headrace.jobs_client import JobsClient
from headrace.processes import Process, ProcessGroup, free_port
from headrace.reorder_service.store.embedded_redis import server_binary
from headrace.spec import JobSpec, parse_spec

ROUNDS = 5
FAR_STEP = 100_000
LEADER_GOAL_S, PREPROCESSOR_GOAL_S, RESUME_GOAL_S = 3.0, 2.0, 1.0
GLOBAL_BATCH = 16
_WIDE_WINDOW = 16
_CHUNK = 5_000  # ledger entries that are written at once


class Cluster:
    """The processes, which are started again when they were killed."""

    def __init__(self, group: ProcessGroup, folder: Path, store: str) -> None:
        self._group = group
        self._folder = folder
        self._store = store
        self.reorders = [self._start_reorder("127.0.0.1:0") for _ in range(2)]
        self.endpoints = [process.endpoint() for process in self.reorders]
        self.endpoint = ",".join(self.endpoints)
        rpc.await_reorder_service(self.endpoint)
        self.preprocessors = [self._start_preprocessor() for _ in range(2)]

    def _start_reorder(self, listen: str) -> Process:
        arguments = ["reorder", "--listen", listen, "--store", self._store]
        return self._group.add(Process("reorder service", arguments, self._folder / f"reorder-{time.monotonic_ns()}.log"))

    def _start_preprocessor(self) -> Process:
        arguments = ["preprocessor", "--listen", "127.0.0.1:0", "--endpoint", self.endpoint, "--threads", "1"]
        process = self._group.add(Process("preprocessor", arguments, self._folder / f"preprocessor-{time.monotonic_ns()}.log"))
        process.endpoint()
        return process

    def kill_leader(self) -> None:
        """The one that stands by goes on; the killed one is started again by `mend`."""
        with JobsClient(self.endpoint) as client:
            leader = next(status.leader for status in client.jobs() if status.leader)
        os.kill(self.reorders[self.endpoints.index(leader)].pid, signal.SIGKILL)

    def kill_preprocessor(self) -> None:
        os.kill(self.preprocessors[0].pid, signal.SIGKILL)

    def mend(self) -> None:
        """Start again what has ended."""
        for number, process in enumerate(self.reorders):
            if process.exit_code() is not None:
                self.reorders[number] = self._start_reorder(self.endpoints[number])
                self.reorders[number].endpoint()
        for number, process in enumerate(self.preprocessors):
            if process.exit_code() is not None:
                self.preprocessors[number] = self._start_preprocessor()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of everything, and a short ledger")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where recovery.json goes")
    options = parser.parse_args()
    rounds, far_step = (1, 1_000) if options.quick else (ROUNDS, FAR_STEP)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, _redis(Path(name)) as port, ProcessGroup() as group:
        cluster = Cluster(group, Path(name), f"redis://127.0.0.1:{port}/0")
        sections = [_losses(cluster, rounds), _resume(cluster, port, far_step)]
    sections += nodes.sections(quick=options.quick)
    sections += planning.sections(quick=options.quick)
    sections.append(endings.section(quick=options.quick))
    sections.append(state_copies.section(quick=options.quick))
    sections += replanning.sections(quick=options.quick)
    sections += traces.sections(quick=options.quick)
    report = Report(
        benchmark="recovery", date=datetime.now(UTC).isoformat(timespec="seconds"), quick=options.quick, sections=sections
    )
    report.write(options.results / "recovery.json")
    report.show()


@contextmanager
def _redis(folder: Path) -> Iterator[int]:
    """A server with its append-only file; its port."""
    port = free_port()
    settings = ["--port", str(port), "--dir", str(folder), "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    server = subprocess.Popen([server_binary(), *settings], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, retry=Retry(ConstantBackoff(0.02), retries=300)) as client:
            client.ping()
        yield port
    finally:
        server.kill()
        server.wait()


def _spec(name: str, **fields: object) -> JobSpec:
    document = {
        "name": name,
        "sources": [{"path": str(example_data())}],
        "global_batch": GLOBAL_BATCH,
        "window": 1,
        "topology": {"replicas": 1, "microbatches": 2},
        "epochs": 1_000_000,
    }
    return parse_spec(document | fields)


def _losses(cluster: Cluster, rounds: int) -> Section:
    """Times from a kill to the next step in the trainer's hands."""
    _decode_everywhere(cluster)
    with JobsClient(cluster.endpoint) as client:
        job = client.submit(_spec("losses"))
    with trainer.connect(cluster.endpoint, job=job) as loader:
        steps = iter(loader)
        _consume(loader, steps)
        usual = [_consume(loader, steps) for _ in range(10)]
        leader = _after(loader, steps, cluster, cluster.kill_leader, rounds, "the leader is killed")
        preprocessor = _after(loader, steps, cluster, cluster.kill_preprocessor, rounds, "a preprocessor is killed")
    rows = [
        Row(name="a step without a loss", value=median(usual), unit="s"),
        Row(
            name="the leading reorder service killed",
            value=max(leader),
            unit="s",
            goal=at_most(LEADER_GOAL_S),
            detail=_all(leader),
        ),
        Row(
            name="one of two preprocessors killed",
            value=max(preprocessor),
            unit="s",
            goal=at_most(PREPROCESSOR_GOAL_S),
            detail=_all(preprocessor),
        ),
    ]
    return Section(title=f"From SIGKILL to the next step, planned, decoded and fetched; the longest of {rounds}", rows=rows)


def _decode_everywhere(cluster: Cluster) -> None:
    """Have both preprocessors decode: with a window of one step one of them may have nothing to do, and import torch later."""
    with JobsClient(cluster.endpoint) as client:
        job = client.submit(_spec("before", window=_WIDE_WINDOW))
        with trainer.connect(cluster.endpoint, job=job) as loader:
            steps = iter(loader)
            for _ in range(_WIDE_WINDOW):
                _consume(loader, steps)
        client.cancel(job)


def _consume(loader: trainer.StepLoader, steps: Iterator[trainer.Step]) -> float:
    """One step: seconds until all of its microbatches were there."""
    began_s = time.perf_counter()
    step = next(steps)
    for _ in step:
        pass
    taken_s = time.perf_counter() - began_s
    loader.commit(step)
    return taken_s


def _after(
    loader: trainer.StepLoader,
    steps: Iterator[trainer.Step],
    cluster: Cluster,
    kill: Callable[[], None],
    rounds: int,
    what: str,
) -> list[float]:
    seen = []
    for number in range(rounds):
        progress(f"{what}, round {number + 1} of {rounds}")
        kill()
        seen.append(_consume(loader, steps))
        cluster.mend()
        for _ in range(3):
            _consume(loader, steps)
    return seen


def _resume(cluster: Cluster, port: int, far_step: int) -> Section:
    """A trainer's state is restored: seconds until it has the first step, near the beginning of a job and far from it."""
    times = {}
    for name, step in (("near", 100), ("far", far_step)):
        progress(f"resume at step {step:,}")
        with JobsClient(cluster.endpoint) as client:
            job = client.submit(_spec(name))
        with trainer.connect(cluster.endpoint, job=job) as loader:
            steps = iter(loader)
            for _ in range(3):
                _consume(loader, steps)
            decode_s = _consume(loader, steps)
            state = loader.state_dict()
        _write_ledger(port, job, step + 10)
        cluster.kill_leader()
        rpc.await_reorder_service(cluster.endpoint, timeout_s=30.0)
        cluster.mend()
        loader = trainer.connect(cluster.endpoint, job=job)
        loader.load_state_dict(state | {"step": step, "content": 0})  # unknown, as the ledger is made up
        began_s = time.perf_counter()
        with loader:
            microbatches = iter(next(iter(loader)))
            next(microbatches)
            times[name] = (time.perf_counter() - began_s, decode_s)
    rows = [
        Row(
            name=f"resume at step {step:,}, beyond the decoding of that step",
            value=max(0.0, times[name][0] - times[name][1]),
            unit="s",
            goal=at_most(RESUME_GOAL_S),
            detail=f"{times[name][0]:.2f} s in all; a step takes {times[name][1]:.2f} s",
        )
        for name, step in (("near", 100), ("far", far_step))
    ]
    return Section(
        title="From headrace.trainer.connect with a restored state to the first microbatch, ten commits undone", rows=rows
    )


def _write_ledger(port: int, job: str, num_steps: int) -> None:
    """As if so many steps had been committed: the entries of the first one, over and over."""
    key = f"headrace:{{{job}}}"
    with redis.Redis(port=port) as client:
        entry = client.lindex(f"{key}:ledger", 0)
        assert entry is not None
        missing = num_steps - client.llen(f"{key}:ledger")
        for start in range(0, missing, _CHUNK):
            client.rpush(f"{key}:ledger", *[entry] * min(_CHUNK, missing - start))
        client.hset(f"{key}:job", "cursor", num_steps)


def _all(seconds: list[float]) -> str:
    return f"rounds: {', '.join(f'{value:.2f}' for value in seconds)}"


if __name__ == "__main__":
    main()
