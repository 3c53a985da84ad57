"""What it costs that four processes train on the same samples: one of them fetches, the others get what it has."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.preprocess.meter import Reading
from benchmarks.preprocess.services import LONGEST_S, services
from benchmarks.preprocess.workload import GLOBAL_BATCH, job_spec
from benchmarks.report import Goal, Rival, Row, Section, at_most
from benchmarks.timing import progress

PROCESSES = 4
PREPROCESSORS = (("--threads", "1"), ("--threads", "1"))
SKIP_SAMPLES = 480
ADDED_GOAL, BYTES_GOAL = 0.10, 1.001
"""The second with headers and layouts, which are no thousandth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What the first process of a group saw."""

    reading: Reading
    bytes_over_payload: float
    """Bytes that it sent by broadcasts over those of its microbatches; 0 where there are none."""

    @property
    def step_s(self) -> float:
        return GLOBAL_BATCH * self.reading.seconds / self.reading.samples


def sections(photos: Path, *, rounds: int, seconds: float) -> Iterator[Section]:
    """A process alone and groups, in turns. The data are the limit: every step takes as long as its input."""
    alone: list[_Measured] = []
    together: list[_Measured] = []
    broadcast: list[_Measured] = []
    contenders = {
        "one process": (alone, 1, ()),
        f"{PROCESSES} processes": (together, PROCESSES, ()),
        f"{PROCESSES} processes without memory in common": (broadcast, PROCESSES, ("--broadcast",)),
    }
    for number in range(rounds):
        for title, (found, processes, extra) in contenders.items():
            progress(f"group, round {number + 1} of {rounds}: {title}")
            found.append(_measure(photos, processes, seconds, extra))
    step_ms = median(1e3 * one.step_s for one in alone)
    rows = [
        _added("a step's input, added by the group", alone, together, at_most(ADDED_GOAL)),
        Row(
            name="a step's input",
            value=median(1e3 * one.step_s for one in together),
            unit="ms",
            rival=Rival(value=step_ms, source="one process"),
        ),
        _bytes("bytes sent to each process, over those of its microbatches", together),
        _added("a step's input, added where all is broadcast, as between hosts", alone, broadcast, None),
        _bytes("bytes broadcast to each process, over those of its microbatches", broadcast),
    ]
    how = f"{GLOBAL_BATCH} photographs a step, two cores for all processes and two preprocessors; medians of {rounds} rounds"
    yield Section(title=f"a group of {PROCESSES} processes of one data-parallel rank, gloo, on one host: {how}", rows=rows)


def _added(name: str, alone: Sequence[_Measured], group: Sequence[_Measured], goal: Goal | None) -> Row:
    shares = [theirs.step_s / one.step_s - 1 for one, theirs in zip(alone, group, strict=True)]
    rounds = ", ".join(f"{share:.2f}" for share in shares)
    return Row(name=name, value=median(shares), unit="of that of one process", goal=goal, detail=f"rounds: {rounds}")


def _bytes(name: str, group: Sequence[_Measured]) -> Row:
    return Row(name=name, value=median(one.bytes_over_payload for one in group), goal=at_most(BYTES_GOAL))


def _measure(photos: Path, processes: int, seconds: float, extra: Sequence[str]) -> _Measured:
    with services(PREPROCESSORS) as running, tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        job = running.submit(job_spec(photos))
        command = [sys.executable, "-m", "benchmarks.loader.group_rank", running.endpoint, job, f"{folder}/store"]
        limits = ["--skip", str(SKIP_SAMPLES), "--seconds", str(seconds), *extra]
        started = [
            subprocess.Popen([*command, str(rank), str(processes), *limits], stdout=subprocess.PIPE, text=True)
            for rank in range(processes)
        ]
        try:
            printed = [process.communicate(timeout=LONGEST_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    lines = printed[0].splitlines()
    return _Measured(reading=Reading.parse(printed[0]), bytes_over_payload=float(lines[0]))
