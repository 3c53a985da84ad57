"""What can go wrong, and what does in a round, drawn from its seed. Pure: knows no process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from headrace.transport.base import FLIGHT, SHARED_MEMORY


class Kind(StrEnum):
    """What happens to a process, or to the wires between two."""

    KILL = "kill"
    """SIGKILL; started again after a while."""
    HANG = "hang"
    """SIGSTOP, and SIGCONT after a while."""
    CUT = "cut"
    """All connections are reset, and new ones, for a while."""
    SILENCE = "silence"
    """Nothing passes for a while, and nobody is told."""


PROCESSES = ("preprocessor", "preprocessors", "leader", "reorders", "redis", "rank")
"""The plural: all of them at once. The leader is whichever reorder service leads by then."""
LINKS = ("rank-leader", "preprocessor-leader", "leader-redis", "rank-preprocessor")
"""The last one: what brings payload from that preprocessor, to all ranks."""

TARGETS = {Kind.KILL: PROCESSES, Kind.HANG: PROCESSES, Kind.CUT: LINKS, Kind.SILENCE: LINKS}

# Seconds. A leader is replaced after 1.5 s, a preprocessor gone after 3 s of silence, a wire after 5 s: some last less than that.
LASTS_S = {Kind.KILL: (0.0, 3.0), Kind.HANG: (0.5, 7.0), Kind.CUT: (0.2, 4.0), Kind.SILENCE: (0.5, 8.0)}
MAX_DELAY_S = 0.3
LAST_STEPS = 3  # at the end of a job, which no fault strikes: by then all parts may have come


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    It begins `delay_s` after the step was fetched by a rank, the one that it strikes or rank 0; with no delay that rank does
    not commit the step before.
    """

    kind: Kind
    target: str
    """Of TARGETS."""
    number: int = 0
    """Of the preprocessor or rank, where the target has one."""
    step: int
    delay_s: float = 0.0
    lasts_s: float

    def __post_init__(self) -> None:
        assert self.target in TARGETS[self.kind]

    @property
    def name(self) -> str:
        """Of its kind, in the table."""
        return f"{self.kind} {self.target}"

    @property
    def watched_rank(self) -> int:
        """Whose fetch it follows."""
        return self.number if self.target.startswith("rank") and self.target != "rank-preprocessor" else 0

    def __str__(self) -> str:
        return f"{self.name} #{self.number} at step {self.step} + {self.delay_s:.2f} s for {self.lasts_s:.1f} s"


NAMES = tuple(f"{kind} {target}" for kind, targets in TARGETS.items() for target in targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What a round does to its job."""

    seed: int
    transport: str
    faults: tuple[Fault, ...]


def draw(seed: int, *, steps: int, count: int = 2) -> Disturbance:
    """The round of `seed`: faults of one kind or of two, for a cluster with `count` of each of its parts."""
    rng = random.Random(seed)
    names = rng.sample(NAMES, rng.choices((1, 2), (1, 3))[0])
    faults = tuple(_fault(rng, Kind(kind), target, steps, count) for kind, target in (name.split(" ") for name in names))
    wired = any(fault.target == "rank-preprocessor" for fault in faults)
    transport = FLIGHT if wired or rng.random() < 0.5 else SHARED_MEMORY
    return Disturbance(seed=seed, transport=transport, faults=faults)


def _fault(rng: random.Random, kind: Kind, target: str, steps: int, count: int) -> Fault:
    at_once = rng.random() < 0.5
    return Fault(
        kind=kind,
        target=target,
        number=rng.randrange(count),
        step=rng.randrange(steps - LAST_STEPS),
        delay_s=0.0 if at_once else rng.uniform(0.0, MAX_DELAY_S),
        lasts_s=rng.uniform(*LASTS_S[kind]),
    )


def seeds(first: int, count: int) -> list[int]:
    """Of `count` rounds. Each one gives the next, so that the rounds from any of them on can be repeated."""
    found = [first]
    while len(found) < count:
        found.append(random.Random(found[-1]).getrandbits(32))
    return found[:count]
