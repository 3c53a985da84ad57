"""What is compared: every combination of schedule, planning, units, parallelism and frozen parts that the trainer takes, and a
selection that covers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.spec import STRATEGIES

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "eager": {"schedule": "eager", "in_flight": 4},
    "zero-bubble": {"schedule": "zero-bubble"},
}
UNITS = (
    ("vision", "llm"),
    ("vision", "audio", "llm"),
    ("encoder", "llm"),
    ("vision", "llm", "generator"),
    ("vision", "audio", "llm", "generator"),
)
"""In pipeline order; `encoder` has both encoders, whole."""
DEGREES: dict[str, dict[str, dict[str, int]]] = {
    "one stage each": {},
    "llm in 2": {"llm": {"pp": 2}, "generator": {"tp": 2}},
    "llm in 3": {"llm": {"pp": 3}, "generator": {"pp": 2}},
    "encoder in 2": {"encoder": {"pp": 2}, "llm": {"pp": 2}, "generator": {"pp": 2}},
    "2 replicas": {"encoder": {"dp": 2}, "llm": {"dp": 2, "pp": 2}},
    "2 to 3": {"encoder": {"dp": 2}, "llm": {"dp": 3}, "generator": {"dp": 2}},
    "3 to 2": {"encoder": {"dp": 3}, "llm": {"dp": 2}, "generator": {"dp": 2}},
    "1 to 2": {"llm": {"dp": 2}, "generator": {"dp": 3}},
    "tp 1 to 2": {"llm": {"tp": 2}},
    "tp 2 to 1, 2 replicas": {"encoder": {"dp": 2, "tp": 2}, "llm": {"dp": 2}},
    "tp 2, llm in 2": {"encoder": {"tp": 2}, "llm": {"tp": 2, "pp": 2}},
}
"""`encoder`: of each one; `generator`: where there is one."""
_WHOLLY = {"frozen": True, "frozen_projector": True}
FROZEN: dict[str, dict[str, dict[str, bool | int]]] = {
    "all learn": {},
    "frozen encoder": {"encoder": {"frozen": True}},
    "frozen llm": {"llm": {"frozen": True}},
    "only projectors": {"encoder": {"frozen": True}, "llm": {"frozen": True}, "generator": {"frozen": True}},
    "only the llm": {"encoder": _WHOLLY, "llm": {"frozen_projector": True}, "generator": {"frozen": True}},
    "only the generator": {"encoder": _WHOLLY, "llm": {"frozen": True}},
    "first layers": {"encoder": {"frozen_layers": 2}, "llm": {"frozen_layers": 3}, "generator": {"frozen_layers": 1}},
    "only the llm's last layers": {"encoder": _WHOLLY, "llm": {"frozen_layers": 4}, "generator": {"frozen": True}},
}
"""The LLM's `frozen_projector` is that to the generator."""
MOST_PROCESSES = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One combination, by the names above."""

    schedule: str
    strategy: str
    units: tuple[str, ...]
    degrees: str
    frozen: str

    def __str__(self) -> str:
        return f"{self.schedule}, {self.strategy}, {'+'.join(self.units)}, {self.degrees}, {self.frozen}"

    @property
    def topology(self) -> dict[str, Any]:
        """The document that a user would write."""
        degrees = DEGREES[self.degrees]
        units = {unit: {**of_kind(degrees, unit), **frozen_in(self.units, self.frozen)[unit]} for unit in self.units}
        return {**SCHEDULES[self.schedule], "units": units}

    @property
    def has_audio(self) -> bool:
        return bool({"audio", "encoder"} & set(self.units))

    @property
    def can_run(self) -> bool:
        """Whether MOST_PROCESSES reach, no unit is cut or has single layers frozen that has to be whole, and something learns."""
        cut = self.schedule == "interleaved" or {"pp", "tp"} & DEGREES[self.degrees].get("encoder", {}).keys()
        learns = "generator" in self.units or self.frozen != "only the generator"
        cut = cut or "frozen_layers" in FROZEN[self.frozen].get("encoder", {})
        return self.num_processes <= MOST_PROCESSES and not (cut and "encoder" in self.units) and learns

    @property
    def num_processes(self) -> int:
        return sum(math.prod(unit.get(degree, 1) for degree in ("dp", "tp", "pp")) for unit in self.topology["units"].values())


def of_kind(choice: Mapping[str, Mapping[str, Any]], unit: str) -> Mapping[str, Any]:
    """What a choice says of a unit."""
    return choice.get(unit if unit in ("llm", "generator") else "encoder", {})


def frozen_in(units: Sequence[str], name: str) -> dict[str, dict[str, bool | int]]:
    """What of each unit is frozen. The last one has no projector behind it."""
    flags = {unit: dict(of_kind(FROZEN[name], unit)) for unit in units}
    flags[units[-1]].pop("frozen_projector", None)
    return flags


def every_case() -> Iterator[Case]:
    """The whole product, as far as it can run."""
    for combination in itertools.product(SCHEDULES, STRATEGIES, UNITS, DEGREES, FROZEN):
        case = Case(*combination)
        if case.can_run:
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
    choices = list(enumerate((case.schedule, case.strategy, case.units, case.degrees, case.frozen)))
    return set(itertools.combinations(choices, 2))
