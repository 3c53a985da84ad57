"""What a second preprocessor adds, on a core of its own, beside what the second core adds to the bare decode loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.preprocess_delivery import SKIP_SAMPLES, bare
from benchmarks.preprocess_meter import Reading
from benchmarks.preprocess_services import measure, services, trainer_command
from benchmarks.preprocess_workload import job_spec
from benchmarks.report import Rival, Row, Section, at_least
from benchmarks.timing import progress

GOAL = 0.9
LONGER = 2
"""Times the rounds and the seconds of the other sections: a ratio of runs on different cores varies more than one on the same."""
ONE, TWO = "1", "01"
"""The cores of one preprocessor, and of two. The reorder service and the trainer, which cost little, are always on the first
one's: there is no third core."""

Contender = Callable[[Path, float, str], Reading]


def sections(photos: Path, *, rounds: int, seconds: float) -> list[Section]:
    """One and two of either contender, in turns, each round in the opposite order of the last."""
    contenders: dict[str, Contender] = {"the bare loop": bare, "preprocessors": _delivered}
    runs = [(name, cores) for name in contenders for cores in (ONE, TWO)]
    rates: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
    for number in range(LONGER * rounds):
        progress(f"scaling, round {number + 1} of {LONGER * rounds}")
        for name, cores in runs if number % 2 else reversed(runs):
            reading = contenders[name](photos, LONGER * seconds, cores)
            rates[name, cores].append(reading.rate_on(map(int, cores), reading.cpu_s))
    gains = {name: _gains(rates[name, ONE], rates[name, TWO]) for name in contenders}
    machine = Rival(value=median(gains["the bare loop"]), source="what the core adds to the bare loop")
    shown = "; ".join(f"{name}: {', '.join(f'{gain:.2f}' for gain in gains[name])}" for name in contenders)
    rows = [
        Row(
            name="added, of what the first gives",
            value=median(gains["preprocessors"]),
            rival=machine,
            goal=at_least(GOAL),
            detail=f"rounds of {shown}",
        ),
        *(Row(name=f"{name}, on cores {', '.join(cores)}", value=median(rates[name, cores]), unit="/s") for name, cores in runs),
    ]
    title = "Preprocessors of one thread, pinned to one core each: what a second one adds; reorder service and trainer on core 1"
    return [Section(title=title, rows=rows)]


def _gains(one: Sequence[float], two: Sequence[float]) -> list[float]:
    return [both / alone - 1 for alone, both in zip(one, two, strict=True)]


def _delivered(photos: Path, seconds: float, cores: str) -> Reading:
    with services([("--threads", "1")] * len(cores), cores=cores, others=ONE) as running:
        job = running.submit(job_spec(photos))
        watch = [option for pid in running.pids for option in ("--watch", str(pid))]
        command = trainer_command(running.endpoint, job, skip=SKIP_SAMPLES, seconds=seconds, cores=ONE, extra=watch)
        return measure(command)
