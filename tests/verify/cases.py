"""What is compared: every combination of schedule, planning, units, parallelism and frozen parts, and a selection that covers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "eager": {"schedule": "eager", "in_flight": 4},
}
STRATEGIES = ("random", "disttrain", "entrain", "joint")
ENCODERS = (("vision",), ("vision", "audio"))
DEGREES = {  # (dp of encoders, dp of the llm), pp of encoders, pp of the llm
    "one stage each": ((1, 1), 1, 1),
    "llm in 2": ((1, 1), 1, 2),
    "llm in 3": ((1, 1), 1, 3),
    "encoder in 2": ((1, 1), 2, 2),
    "2 replicas": ((2, 2), 1, 2),
    "2 to 3": ((2, 3), 1, 1),
    "3 to 2": ((3, 2), 1, 1),
    "1 to 2": ((1, 2), 1, 1),
}
FROZEN: dict[str, dict[str, dict[str, bool]]] = {
    "all learn": {},
    "frozen encoder": {"encoder": {"frozen": True}},
    "frozen llm": {"llm": {"frozen": True}},
    "only projectors": {"encoder": {"frozen": True}, "llm": {"frozen": True}},
    "only the llm": {"encoder": {"frozen": True, "frozen_projector": True}},
}
MOST_PROCESSES = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One combination, by the names above."""

    schedule: str
    strategy: str
    encoders: tuple[str, ...]
    degrees: str
    frozen: str

    def __str__(self) -> str:
        return f"{self.schedule}, {self.strategy}, {'+'.join(self.encoders)}+llm, {self.degrees}, {self.frozen}"

    @property
    def topology(self) -> dict[str, Any]:
        """The document that a user would write."""
        (encoder_dp, llm_dp), encoder_pp, llm_pp = DEGREES[self.degrees]
        frozen = FROZEN[self.frozen]
        encoder = {"dp": encoder_dp, "pp": encoder_pp, **frozen.get("encoder", {})}
        units = {**dict.fromkeys(self.encoders, encoder), "llm": {"dp": llm_dp, "pp": llm_pp, **frozen.get("llm", {})}}
        return {**SCHEDULES[self.schedule], "units": units}

    @property
    def num_processes(self) -> int:
        return sum(unit["dp"] * unit["pp"] for unit in self.topology["units"].values())


def every_case() -> Iterator[Case]:
    """The whole product, as far as MOST_PROCESSES reach."""
    for combination in itertools.product(SCHEDULES, STRATEGIES, ENCODERS, DEGREES, FROZEN):
        case = Case(*combination)
        if case.num_processes <= MOST_PROCESSES:
            yield case


def covering_cases() -> list[Case]:
    """A selection in which every two choices of different kinds that exist together do so at least once: greedily the case with
    the most pairs that are new."""
    cases = list(every_case())
    missing = {pair for case in cases for pair in _pairs(case)}
    selection = []
    while missing:
        best = max(cases, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        selection.append(best)
    return selection


def _pairs(case: Case) -> set[tuple[Any, Any]]:
    choices = list(enumerate((case.schedule, case.strategy, case.encoders, case.degrees, case.frozen)))
    return set(itertools.combinations(choices, 2))
