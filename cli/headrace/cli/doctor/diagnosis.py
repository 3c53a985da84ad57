"""What a check of `headrace doctor` finds: a state, a clause on what was found, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

Say = Callable[[str], None]
"""Takes the name of a check that begins."""


class State(StrEnum):
    """How well something is, the best first."""

    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could, or not for long."""
    FAULT = "fault"
    """Something does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What one check found."""

    check: str
    """What was looked at, in a word or two."""
    state: State
    found: str
    remedy: str = ""
    """What to do about it; empty if there is nothing to do."""


def ok(check: str, found: str, remedy: str = "") -> Diagnosis:
    """Return that all is well. `remedy`: what would give more."""
    return Diagnosis(check=check, state=State.OK, found=found, remedy=remedy)


def warning(check: str, found: str, remedy: str) -> Diagnosis:
    """Return that something could be better."""
    return Diagnosis(check=check, state=State.WARNING, found=found, remedy=remedy)


def fault(check: str, found: str, remedy: str) -> Diagnosis:
    """Return that something does not work."""
    return Diagnosis(check=check, state=State.FAULT, found=found, remedy=remedy)


def from_sentence(check: str, sentence: str, state: State = State.FAULT) -> Diagnosis:
    """Return a diagnosis from an error's sentence, which ends with a colon and the remedy."""
    found, _, remedy = sentence.rpartition(": ")
    return Diagnosis(check=check, state=state, found=found or remedy, remedy=remedy if found else "")


def examined(check: str, examine: Callable[[], Iterable[Diagnosis]]) -> list[Diagnosis]:
    """Return what `examine` finds. A check that fails is a fault that says so."""
    try:
        return list(examine())
    except Exception as err:  # whatever is broken must not keep the other checks from being made
        said = " ".join(str(err).split()) or "no message"
        return [fault(check, f"cannot be examined ({type(err).__name__}: {said})", "mend what it names, and examine again")]


def severity(state: State) -> int:
    """Return a number that is the larger, the worse a state is."""
    return list(State).index(state)


def worst(diagnoses: Iterable[Diagnosis]) -> State:
    """Return the worst state of all; OK if there is none."""
    return max((one.state for one in diagnoses), key=severity, default=State.OK)
