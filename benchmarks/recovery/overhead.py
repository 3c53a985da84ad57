"""What a step costs in which a node may be lost: nodes beside torchrun's ranks, with the machine in turns.

Both jobs are there all the time, each with services of its own, and one of them stands still (SIGSTOP) while the other has the
machine, for a fraction of a second each: whatever it does by itself from one second to the next, mostly more than what is to be
measured, counts for both. A turn is much shorter than the silence after which a node is lost. They start in turns, too: beside a
job that has all cores, a node that starts may be silent for longer.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev

from benchmarks.recovery.training import PATIENCE_S, REPLICAS, Services
from benchmarks.report import Row, at_most
from benchmarks.timing import progress
from headrace.errors import HeadraceError
from headrace.processes import Process, ProcessGroup

OVERHEAD_GOAL_PERCENT = 5.0
_ORDER = (("nodes", "ranks"), ("ranks", "nodes")) * 2  # in which they are started
_TURN_S, _ROUND_S = 0.3, 100.0
_WARM_STEPS = 4
_ATTEMPTS = 3


class NodeLostError(HeadraceError):
    """What was to be measured is not there any more."""


@dataclass
class Job:
    """One of those that take turns."""

    services: Services
    name: str
    trainers: Sequence[Process]
    turns: list[tuple[float, float]] = field(default_factory=list)
    """When each began and ended."""
    cpu_s: float = 0.0
    """Of the cores, that all threads of its trainers have used in them."""

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes."""
        for process in self.services.group.processes:
            os.kill(process.pid, number)

    def take_turn(self) -> None:
        began_s, used_s = time.time(), self._used_s()
        self.signal(signal.SIGCONT)
        time.sleep(_TURN_S)
        self.signal(signal.SIGSTOP)
        self.turns.append((began_s, time.time()))
        self.cpu_s += self._used_s() - used_s

    def steps(self) -> list[float]:
        """Seconds from commit to commit, of its own turns alone. Raises NodeLostError where one was lost in them."""
        if self.services.said("pipelines", self.name, self.turns[0][0]):
            raise NodeLostError("a node was lost while others had the machine")
        commits = [event["time_s"] for event in self.services.said("committed", self.name, self.turns[0][0])]
        passed = [sum(max(0.0, min(end, time_s) - begin) for begin, end in self.turns) for time_s in commits]
        return [after - before for before, after in pairwise(passed)]

    def is_warm(self) -> bool:
        """Whether it has trained a few steps. Raises NodeLostError where a trainer has ended."""
        for trainer in self.trainers:
            if trainer.exit_code() is not None:
                raise NodeLostError(f"{trainer.name} has ended: {trainer.last_words()}")
        return len(self.services.said("committed", self.name)) >= _WARM_STEPS

    def _used_s(self) -> float:
        """Of the cores, by all threads of its trainers so far."""
        ticks = 0
        for trainer in self.trainers:
            fields = Path(f"/proc/{trainer.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # user and system
        return ticks / os.sysconf("SC_CLK_TCK")


def overhead_row(folder: Path, *, quick: bool) -> Row:
    """The same batches in the same pipelines."""
    step_s: dict[str, list[float]] = {"nodes": [], "ranks": []}
    cpu_s: dict[str, list[float]] = {"nodes": [], "ranks": []}
    rounds, round_s = (_ORDER[:1], _ROUND_S / 10) if quick else (_ORDER, _ROUND_S)
    for number, order in enumerate(rounds):
        progress(f"steps of nodes and of ranks in turns, round {number + 1} of {len(rounds)}")
        for who, (steps, used_s) in zip(order, _round(order, folder / f"turns-{number}", round_s), strict=True):
            step_s[who].append(median(steps))
            cpu_s[who].append(used_s / len(steps))
    beyond = [(nodes / ranks - 1) * 100 for nodes, ranks in zip(step_s["nodes"], step_s["ranks"], strict=True)]
    return Row(
        name="a step in which a node may be lost, beyond one of torchrun's ranks",
        value=mean(beyond),
        unit="%",
        goal=at_most(OVERHEAD_GOAL_PERCENT),
        detail=f"rounds of {round_s:g} s: {', '.join(f'{value:.1f}' for value in beyond)}{_error(beyond)}; medians "
        f"{median(step_s['nodes']) * 1e3:.0f} and {median(step_s['ranks']) * 1e3:.0f} ms, "
        f"on the trainers' cores {median(cpu_s['nodes']):.3f} and {median(cpu_s['ranks']):.3f} s",
    )


def _error(beyond: Sequence[float]) -> str:
    """How far the mean may be off: what is within it is not to be told from 0."""
    return f", standard error {stdev(beyond) / math.sqrt(len(beyond)):.1f}" if len(beyond) > 1 else ""


def _round(order: Sequence[str], folder: Path, seconds: float) -> list[tuple[list[float], float]]:
    """Seconds of the steps of both jobs, and of the cores that they used. A round in which a node was lost is run once more."""
    for number in range(_ATTEMPTS):
        try:
            with _job(order[0], folder / f"{number}-0") as one, _job(order[1], folder / f"{number}-1") as other:
                _warm_up(one, other)
                _in_turns(one, other, seconds)
                return [(job.steps(), job.cpu_s) for job in (one, other)]
        except NodeLostError as error:
            progress(f"once more, as {error}")
    raise NodeLostError(f"a node was lost in each of {_ATTEMPTS} rounds: run it again on a quieter machine")


@contextmanager
def _job(who: str, folder: Path) -> Iterator[Job]:
    """Whose trainers start."""
    folder.mkdir(parents=True)
    with ProcessGroup() as group:
        services = Services(group, folder)
        name = services.submit(who, 1)
        trainers = services.start_nodes(name, 2 * REPLICAS) if who == "nodes" else services.start_ranks(name, 1)
        job = Job(services, name, trainers)
        try:
            yield job
        finally:
            job.signal(signal.SIGCONT)


def _warm_up(one: Job, other: Job) -> None:
    """Let each train a few steps, and forget those turns. Leaves both standing still. Raises NodeLostError."""
    for job in (one, other):
        job.signal(signal.SIGSTOP)

    def warm() -> bool:
        one.take_turn()
        other.take_turn()
        return one.is_warm() and other.is_warm()

    one.services.wait(warm, 2 * PATIENCE_S)
    for job in (one, other):
        job.turns.clear()
        job.cpu_s = 0.0


def _in_turns(one: Job, other: Job, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        one.take_turn()
        other.take_turn()
