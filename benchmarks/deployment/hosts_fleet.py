"""A cluster over hosts of this machine: the reorder service and the trainer on its own end, a preprocessor on each host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployment.hosts import BRIDGE_ADDRESS, Host
from benchmarks.preprocess.meter import Reading
from benchmarks.preprocess.services import STOP_TIMEOUT_S, next_line, pin, trainer_command
from benchmarks.preprocess.workload import job_spec
from headrace.jobs_client import JobsClient
from headrace.processes import Process, ProcessGroup

HOSTS_CORE, OTHERS_CORE = "0", "1"
"""The core that all hosts share, and that of the reorder service and the trainer."""
STAGED_SAMPLES = 64  # that the store of a host has room for, and that the trainer fetches ahead
STAGED_S = 2.0  # after a turn the stores are filled again, which is not to fall into the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Papers:
    """What processes of one cluster are given: variables of the environment and options, by part."""

    reorder: Mapping[str, str]
    preprocessor: Mapping[str, str]
    trainer: Mapping[str, str]
    options: Sequence[str] = ()
    """Of the services, to serve without papers."""


PLAIN = Papers(reorder={}, preprocessor={}, trainer={}, options=("--allow-anyone", "--allow-plaintext"))
"""No certificate, no token: doors that are open by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Running services with a trainer that waits for its turns."""

    trainer: subprocess.Popen[str]

    def turn(self) -> Reading:
        """Let the trainer consume for its seconds, and watch the preprocessors; others rest meanwhile: their stores are full."""
        assert self.trainer.stdin is not None
        self.trainer.stdin.write("measure\n")
        self.trainer.stdin.flush()
        reading = Reading.parse(next_line(self.trainer))
        time.sleep(STAGED_S)
        return reading


@contextlib.contextmanager
def fleet(photos: Path, on: Sequence[Host], papers: Papers, folder: Path, *, seconds: float) -> Iterator[Fleet]:
    """Start a preprocessor of one thread on each host, and a trainer that fetches from them by Arrow Flight; end all."""
    folder.mkdir()
    with ProcessGroup() as group:
        arguments = ["reorder", "--listen", f"{BRIDGE_ADDRESS}:0", "--store", f"embedded:{folder / 'store'}", *papers.options]
        reorder = group.add(Process("reorder service", arguments, folder / "reorder.log", papers.reorder))
        pin(reorder.pid, OTHERS_CORE)
        endpoint = reorder.endpoint()
        started = []
        for host in on:
            arguments = ["preprocessor", "--listen", f"{host.address}:0", "--endpoint", endpoint, "--threads", "1"]
            arguments += ["--data-root", str(photos), "--budget-mib", "128", *papers.options]
            log = folder / f"{host.name}.log"
            started.append(group.add(Process(f"preprocessor of {host.name}", arguments, log, papers.preprocessor, host.prefix)))
        for host, process in zip(on, started, strict=True):
            process.endpoint()
            host.hold(process.pid)
            pin(process.pid, HOSTS_CORE)
        with _environment(papers.trainer), JobsClient(endpoint) as client:
            job = client.submit(job_spec(photos))
        extra = ["--on-demand", "--transport", "flight", *(f"--watch={process.pid}" for process in started)]
        skip = 2 * STAGED_SAMPLES * (len(on) + 1)  # what was staged while others had their turns, and as much again
        command = trainer_command(endpoint, job, skip=skip, seconds=seconds, cores=OTHERS_CORE, extra=extra)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, env={**os.environ, **papers.trainer}, **pipes) as trainer:  # type: ignore[call-overload]
            try:
                yield Fleet(trainer=trainer)
            finally:
                trainer.kill()
        for process in started:
            process.terminate()
        for process in started:
            process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
