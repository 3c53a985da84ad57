"""How soon a job of six ranks has ended on all of them once one rank raises, hangs, stops or is killed in mid-step."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.recovery.training import PATIENCE_S, Services
from benchmarks.report import Row, Section, at_most
from benchmarks.timing import progress
from headrace.cli.example import example_data
from headrace.errors import HeadraceError
from headrace.processes import ProcessGroup
from headrace.spec import parse_spec
from tests.integration.faulty_trainer import FAULT_AT, FAULTY_RANK, NUM_RANKS, PLANNED, REASONS, start_ranks

GOAL_S = 5.0
_HANG_TIMEOUT_S = 5
_FAULTS = {
    "user error": ("a rank raises an error of ours", 0),
    "unexpected": ("a rank raises another error", 0),
    "kill": ("a rank is killed", 0),
    "hang": (f"a rank hangs; beyond --hang-timeout {_HANG_TIMEOUT_S}", _HANG_TIMEOUT_S),
    "stop": (f"a rank is stopped (SIGSTOP); beyond --hang-timeout {_HANG_TIMEOUT_S}", _HANG_TIMEOUT_S),
}
"""What happens, and the seconds that the job waits on purpose."""
_POLL_S = 0.01


def section(*, quick: bool) -> Section:
    """Each fault in jobs of its own."""
    rounds = 1 if quick else 3
    rows = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, ProcessGroup() as group:
        services = Services(group, Path(name))
        for fault, (what, waited_s) in _FAULTS.items():
            seconds = []
            for number in range(rounds):
                progress(f"{what}, round {number + 1} of {rounds}")
                folder = Path(name) / f"{fault.replace(' ', '-')}-{number}"
                folder.mkdir()
                seconds.append(_end_all(services, folder, fault) - waited_s)
            row = Row(name=what, value=max(seconds), unit="s", goal=at_most(GOAL_S), detail=f"median {median(seconds):.2f} s")
            rows.append(row)
    what = f"From a fault in one of {NUM_RANKS} ranks to the end of all, with its reason in every other log"
    return Section(title=f"{what}; the longest of {rounds}", rows=rows)


def _end_all(services: Services, folder: Path, fault: str) -> float:
    """Return the seconds from the fault until all processes have ended, apart from a stopped one.

    Raises HeadraceError where they do not end, or one of the others' logs does not have the reason.
    """
    document = {
        "name": folder.name,
        "sources": [{"path": str(example_data())}],
        "global_batch": 16,
        "image": {"max_pixels": 112 * 112},
        "topology": PLANNED,
    }
    with services.client() as client:
        job = client.submit(parse_spec(document))
    processes = start_ranks(services.endpoint, job, folder, fault, _HANG_TIMEOUT_S if _FAULTS[fault][1] else 600)
    try:
        ended_s = _await_end([process for rank, process in enumerate(processes) if fault != "stop" or rank != FAULTY_RANK])
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        services.cancel(job)
    for rank in set(range(NUM_RANKS)) - {FAULTY_RANK}:
        if REASONS[fault] not in (folder / f"{rank}.log").read_text(encoding="utf-8"):
            raise HeadraceError(f"{_FAULTS[fault][0]}: the log of rank {rank} does not say: {REASONS[fault]}")
    said = (folder / f"{FAULTY_RANK}.log").read_text(encoding="utf-8").splitlines()
    return ended_s - next(float(line.removeprefix(FAULT_AT)) for line in said if line.startswith(FAULT_AT))


def _await_end(processes: list[subprocess.Popen[bytes]]) -> float:
    """Return when the last one has ended, as `time.time`. Raises HeadraceError."""
    deadline = time.monotonic() + PATIENCE_S
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            raise HeadraceError(f"not all ranks ended within {PATIENCE_S:g} s")
        time.sleep(_POLL_S)
    return time.time()
