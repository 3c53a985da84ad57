"""Many runs: one seed after the other, the smallest plan of a failure, and the seeded faults until each is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from tests.simulation.fault_plan import Fault, draw_faults, draw_setting
from tests.simulation.seeded_faults import SEEDED, putting_in
from tests.simulation.simulation_run import Faulty, Outcome, run

FIND_S = 120.0  # of processor time, within which a seeded fault has to be found
SHRINK_S = 120.0  # of processor time, after which a failing run is left as small as it is then


def run_seed(seed: int, faulty: Faulty = nullcontext) -> Outcome:
    """The run that the seed stands for."""
    setting = draw_setting(seed)
    return run(seed, setting, draw_faults(seed, setting), faulty)


def shrunk(seed: int, faulty: Faulty = nullcontext) -> Outcome:
    """The run of a failing seed with as few of its faults as fail still: those are dropped one by one, for up to SHRINK_S."""
    ends_s = time.process_time() + SHRINK_S
    setting, smallest = draw_setting(seed), run_seed(seed, faulty)
    for fault in smallest.faults:
        if time.process_time() > ends_s:
            break
        fewer = tuple(one for one in smallest.faults if one != fault)
        outcome = run(seed, setting, fewer, faulty)
        if outcome.violations:
            smallest = outcome
    return smallest


def runs(first: int, stride: int, is_over: Callable[[int], bool]) -> Iterator[Outcome]:
    """The runs of every `stride`-th seed, until `is_over(number of runs)`."""
    number = 0
    while not is_over(number):
        outcome = run_seed(first + number * stride)
        yield shrunk(outcome.seed) if outcome.violations else outcome
        number += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How a seeded fault was found, and in how many seconds of processor time; no violation: it was not."""

    name: str
    seconds: float
    num_runs: int
    seed: int
    violation: str
    faults: tuple[Fault, ...]


def find(name: str, within_s: float = FIND_S) -> Found:
    """Run one seed after the other with a seeded fault in the code, until a checker notes a violation."""
    (seeded,) = [one for one in SEEDED if one.__name__ == name]
    began_s, seed = time.process_time(), 0
    outcome = run_seed(0, putting_in(seeded))
    while not outcome.violations and time.process_time() - began_s < within_s:
        seed += 1
        outcome = run_seed(seed, putting_in(seeded))
    return Found(
        name=name,
        seconds=time.process_time() - began_s,
        num_runs=seed + 1,
        seed=seed,
        violation=outcome.violations[0] if outcome.violations else "",
        faults=outcome.faults,
    )
