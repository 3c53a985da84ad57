"""The processes that torchrun would start for `headrace train`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import yaml

from headrace.processes import Process, ProcessGroup, torchrun_environments
from tests.wire import free_ports

END_S = 100.0
Units = dict[str, dict[str, int]]


def start(
    group: ProcessGroup, cluster: Any, job: str | Path, folder: Path, units: Units | None, world: int, count: int, *options: str
) -> list[Process]:
    """The first `count` of `world` processes. `job`: its name, or the spec to submit. `units`: None: what the job says."""
    which = ["--submit", str(job)] if isinstance(job, Path) else ["--job", job]
    arguments = ["train", "--endpoint", cluster.endpoint, *which, "--threads", "1", "--format", "json", *options]
    if units is not None:
        (folder / "topology.yaml").write_text(yaml.safe_dump({"units": units}))
        arguments += ["--topology", str(folder / "topology.yaml")]
    (port,) = free_ports(1)
    return [
        group.add(Process(f"trainer {rank}", arguments, folder / f"{Path(job).stem}-{rank}.log", environment))
        for rank, environment in enumerate(torchrun_environments(world, port)[:count])
    ]


def wait(processes: list[Process], timeout_s: float = END_S) -> list[int | None]:
    """Their exit codes, None of those that do not end in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(process.exit_code() is None for process in processes):
        time.sleep(0.05)  # polls real processes
    return [process.exit_code() for process in processes]


def losses(log: Path) -> list[float]:
    """Of the steps that a process says it has trained."""
    return [float(value) for value in re.findall(r" step .* loss=([\d.]+) ", log.read_text())]
