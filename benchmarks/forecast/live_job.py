"""Train a job to its end on processes of this machine, and read what its steps were forecast to take, and took."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.processes import POLL_S, Process, ProcessGroup, torchrun_environments

_COMMITTED = re.compile(r"committed job=(\S+) step=(\d+) .*forecast_s=(\S+) measured_s=(\S+)")


def train(arguments: Sequence[str], num_processes: int, folder: Path, longest_s: float) -> None:
    """Run the trainers of a job to its end, with these arguments of `headrace`.

    Raises RuntimeError where a trainer fails or takes too long.
    """
    with ProcessGroup() as group:
        for rank, environment in enumerate(torchrun_environments(num_processes)):
            group.add(Process(f"rank {rank}", list(arguments), folder / f"{rank}.log", environment))
        await_end(group.processes, longest_s)


def await_end(processes: Sequence[Process], longest_s: float) -> None:
    """Wait for the end of all processes. Raises RuntimeError as soon as one fails, and where one takes too long."""
    deadline_s = time.monotonic() + longest_s
    while time.monotonic() < deadline_s:
        codes = [process.exit_code() for process in processes]
        if any(codes) or None not in codes:
            break
        time.sleep(POLL_S)
    for process in processes:
        if code := process.exit_code():
            raise RuntimeError(f"{process.name} ended with {code}: {process.last_words()}")
    if late := [process for process in processes if process.exit_code() is None]:
        raise RuntimeError(f"{late[0].name} has not ended after {longest_s:.0f} s; its last words: {late[0].last_words()}")


def step_times(reorder_log: Path, job: str, first_step: int) -> tuple[list[float], list[float]]:
    """Return the forecast and the measured seconds of a job's committed steps, from a step on."""
    found = [match.groups() for match in _COMMITTED.finditer(reorder_log.read_text(encoding="utf-8"))]
    times = [
        (_seconds(forecast), _seconds(measured))
        for name, step, forecast, measured in found
        if name == job and int(step) >= first_step
    ]
    return [forecast for forecast, _ in times], [measured for _, measured in times]


def _seconds(text: str) -> float:
    """Return the seconds that a line of the log names; NaN where it says that they are not known."""
    return math.nan if text == "-" else float(text)
