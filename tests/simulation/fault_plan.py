"""What goes wrong in a run, drawn from its seed. Pure: knows nothing of the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

SERVICE, PREPROCESSOR, RANK = "service", "preprocessor", "rank"

_LASTS_S = {
    "kill": (0.0, 8.0),
    "end": (0.0, 4.0),
    "hang": (0.3, 12.0),
    "freeze": (0.5, 20.0),
    "cut": (0.0, 6.0),
    "silence": (0.3, 12.0),
    "deafness": (0.3, 12.0),
    "slow network": (2.0, 30.0),
    "store away": (0.2, 12.0),
    "store hangs": (0.3, 8.0),
    "store slow": (1.0, 20.0),
    "store loses answers": (1.0, 20.0),
    "store holds copies": (2.0, 20.0),
    "store full": (0.5, 10.0),
    "store read-only": (0.5, 10.0),
    "store put back": (0.1, 4.0),
    "store clock jumps": (1.0, 20.0),
    "reset": (0.0, 0.0),
    "pause job": (0.5, 5.0),
}
"""Kind of fault -> range of seconds until it is mended."""

_TARGETS: dict[str, Sequence[str]] = {
    "kill": ("leader", "leader", "standby", "services", PREPROCESSOR, "preprocessors", RANK, RANK),
    "end": ("leader", "standby", PREPROCESSOR),
    "hang": ("leader", "leader", "standby", "services", PREPROCESSOR, "preprocessors", RANK),
    "freeze": ("leader", PREPROCESSOR, PREPROCESSOR, RANK),
    "store put back": ("", "services"),
    "cut": ("rank-leader", "preprocessor-leader", "rank-preprocessor"),
    "silence": ("rank-leader", "preprocessor-leader", "rank-preprocessor", "leader-store", "standby-store"),
    "deafness": ("rank-leader", "preprocessor-leader", "leader-preprocessor", "leader-rank", "leader-store", "store-leader"),
}
"""Kind -> what it strikes: a process, or the wire from one to another. Others strike the store, the network or the job; a store
that is put back may strike all services with it, so that nobody remembers what it has lost."""

KINDS = tuple(_LASTS_S)
_UNSURE = ("store loses answers", "store holds copies")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong, `at_s` into the run, until `at_s + lasts_s`."""

    kind: str
    target: str = ""
    number: int = 0
    """Which preprocessor or rank, counted modulo how many there are."""
    at_s: float
    lasts_s: float
    amount: float
    """0 to 1: how much of it, where there is a more and a less."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}".strip()

    def __str__(self) -> str:
        return f"{self.name} #{self.number} at {self.at_s:.3f} s for {self.lasts_s:.3f} s ({self.amount:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run's job and cluster."""

    services: int
    preprocessors: int
    ranks: int
    host_ranks: int
    """Ranks of a host, which share a relay; 0: each has a stream of its own."""
    steps: int
    window: int
    substitute: bool
    step_s: tuple[float, float]
    """Range of how long a step is trained."""
    together: bool
    """Whether all ranks begin again from their newest checkpoint where one is lost; else each goes on by itself."""

    @property
    def lasts_s(self) -> float:
        """About how long the job takes if nothing goes wrong."""
        return 2.0 + self.steps * (sum(self.step_s) / 2 + 0.05)


_HERD_SHARE = 0.05  # of the runs: they take ten times as long as others


def draw_setting(seed: int) -> Setting:
    random = Random(f"{seed} setting")
    if random.random() < _HERD_SHARE:
        return replace(_HERD, host_ranks=random.choice((0, 8)))
    usual_s = random.choice((0.3, 2.0, 8.0, 20.0))
    return Setting(
        services=random.choice((1, 2, 2, 2, 3)),
        preprocessors=random.choice((1, 2, 2, 3)),
        ranks=random.choice((1, 2, 2, 3)),
        host_ranks=random.choice((0, 0, 2, 3)),
        steps=16,
        window=random.choice((2, 4)),
        substitute=random.random() < 0.3,
        step_s=(0.7 * usual_s, 1.3 * usual_s),
        together=random.random() < 0.5,
    )


_HERD = Setting(
    services=2, preprocessors=2, ranks=20, host_ranks=0, steps=6, window=2, substitute=False, step_s=(0.9, 1.1), together=False
)
"""Enough ranks to tell whether they come back at once when a leader is lost, which is what goes wrong then."""


def draw_faults(seed: int, setting: Setting, kinds: Sequence[str] = KINDS) -> tuple[Fault, ...]:
    """Some faults, often close to each other: what they do together is found by no test of one."""
    random = Random(f"{seed} faults")
    if setting.ranks == _HERD.ranks:
        return (Fault(kind="kill", target="leader", at_s=random.uniform(3.0, 6.0), lasts_s=4.0, amount=0.0),)
    faults, at_s = [], random.uniform(0.0, setting.lasts_s)
    for _ in range(random.choice((1, 2, 2, 3, 3, 4, 5))):
        kind = random.choice(kinds)
        lasts_s = random.uniform(*_LASTS_S[kind])
        faults.append(
            Fault(
                kind=kind,
                target=random.choice(_TARGETS.get(kind, ("",))),
                number=random.randrange(12),
                at_s=at_s,
                lasts_s=lasts_s,
                amount=random.random(),
            )
        )
        if kind in _UNSURE and random.random() < 0.7:  # whether a command was carried out matters where one changes the job
            reset_s = at_s + random.uniform(0.0, lasts_s)
            faults.append(Fault(kind="reset", at_s=reset_s, lasts_s=0.0, amount=random.random()))
        at_s = at_s + random.uniform(0.0, 6.0) if random.random() < 0.6 else random.uniform(0.0, setting.lasts_s)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
