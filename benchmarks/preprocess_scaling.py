"""What a second preprocessor adds, on a core of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.preprocess_delivery import SKIP_SAMPLES
from benchmarks.preprocess_meter import Reading
from benchmarks.preprocess_services import measure, services, trainer_command
from benchmarks.preprocess_workload import job_spec
from benchmarks.report import Row, Section, at_least
from benchmarks.timing import progress

GOAL = 0.9
OTHERS = "1"
"""The core of the reorder service and the trainer, which cost little; there is no third one."""


def sections(photos: Path, *, rounds: int, seconds: float) -> list[Section]:
    """Either one alone and both, in turns."""
    rates: dict[str, list[float]] = {"0": [], "1": [], "01": []}
    for number in range(rounds):
        for cores, seen in rates.items():
            progress(f"scaling, round {number + 1} of {rounds}: preprocessors on cores {', '.join(cores)}")
            seen.append(_rate(_delivered(photos, seconds, cores), cores))
    rows = [
        _row("it has its core alone, the first shares one with reorder service and trainer", rates["1"], rates["01"], goal=True),
        _row("it shares its core with them, the first has one alone", rates["0"], rates["01"], goal=False),
    ]
    for name, cores in (("alone on core 0", "0"), ("on core 1, with reorder service and trainer", "1"), ("one on each", "01")):
        rows.append(Row(name=name, value=median(rates[cores]), unit="/s"))
    return [Section(title="Preprocessors of one thread, pinned to one core each: what a second one adds", rows=rows)]


def _row(name: str, one: Sequence[float], two: Sequence[float], *, goal: bool) -> Row:
    gains = [both / alone - 1 for alone, both in zip(one, two, strict=True)]
    shown = f"rounds: {', '.join(f'{gain:.2f}' for gain in gains)}"
    return Row(
        name=f"added, of what the first gives: {name}",
        value=median(gains),
        goal=at_least(GOAL) if goal else None,
        detail=shown,
    )


def _rate(reading: Reading, cores: str) -> float:
    """Per second of the cores that the preprocessors have. Alone on core 0 is the preprocessor only."""
    cpu_s = reading.watched_cpu_s[1] if cores == "0" else reading.cpu_s
    return reading.rate_on(map(int, cores), cpu_s)


def _delivered(photos: Path, seconds: float, cores: str) -> Reading:
    with services([("--threads", "1")] * len(cores), cores=cores, others=OTHERS) as running:
        job = running.submit(job_spec(photos))
        watch = [option for pid in running.pids for option in ("--watch", str(pid))]
        command = trainer_command(running.endpoint, job, skip=SKIP_SAMPLES, seconds=seconds, cores=OTHERS, extra=watch)
        return measure(command)
