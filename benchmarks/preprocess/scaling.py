"""What a second preprocessor adds, on a core of its own.

How fast a core of a shared machine is changes within seconds. So one preprocessor and two, each with services and a trainer
of their own, are there all the time, and take turns of a few seconds.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.preprocess.meter import Reading
from benchmarks.preprocess.services import next_line, services, trainer_command
from benchmarks.preprocess.workload import job_spec
from benchmarks.report import Row, Section, at_least
from benchmarks.timing import progress

GOAL = 0.9
ONE, TWO = "1", "01"
"""The cores of one preprocessor, and of two. Both reorder services and trainers, which cost little, are on the first one's:
there is no third core."""
TURNS = 4  # for each round of the other sections
SKIP_SAMPLES = 160  # of a turn: what was staged while the others had theirs, and as much again
STAGED_S = 1.0  # after a turn the stores are filled again, which is not to fall into the next one


def sections(photos: Path, *, rounds: int, seconds: float) -> list[Section]:
    """One and two in turns, after one turn of each that is not counted."""
    rates: dict[str, list[float]] = {ONE: [], TWO: []}
    with _trainer(photos, seconds, ONE) as one, _trainer(photos, seconds, TWO) as two:
        for number in range(TURNS * rounds + 1):
            progress(f"scaling, turn {number} of {TURNS * rounds}")
            for cores, trainer in ((ONE, one), (TWO, two)):
                reading = _turn(trainer)
                rates[cores].append(reading.rate_on(map(int, cores), reading.cpu_s))
    gains = [both / alone - 1 for alone, both in zip(rates[ONE][1:], rates[TWO][1:], strict=True)]
    rows = [
        Row(
            name="added, of what the first gives",
            value=median(gains),
            goal=at_least(GOAL),
            detail=f"turns: {', '.join(f'{gain:.2f}' for gain in gains)}",
        ),
        Row(name="one, on core 1", value=median(rates[ONE][1:]), unit="/s"),
        Row(name="one on each core", value=median(rates[TWO][1:]), unit="/s"),
    ]
    title = "Preprocessors of one thread, pinned to one core each: what a second one adds; reorder service and trainer on core 1"
    return [Section(title=title, rows=rows)]


@contextmanager
def _trainer(photos: Path, seconds: float, cores: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer that waits for its turn, with services of its own."""
    with services([("--threads", "1")] * len(cores), cores=cores, others=ONE) as running:
        job = running.submit(job_spec(photos))
        watch = [option for pid in running.pids for option in ("--watch", str(pid))]
        command = trainer_command(
            running.endpoint, job, skip=SKIP_SAMPLES, seconds=seconds, cores=ONE, extra=[*watch, "--on-demand"]
        )
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()


def _turn(trainer: subprocess.Popen[str]) -> Reading:
    assert trainer.stdin is not None
    trainer.stdin.write("measure\n")
    trainer.stdin.flush()
    reading = Reading.parse(next_line(trainer))
    time.sleep(STAGED_S)
    return reading
