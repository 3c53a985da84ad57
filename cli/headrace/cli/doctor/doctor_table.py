"""The table and the JSON document of `headrace doctor`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.cli.doctor.diagnosis import Diagnosis, State, worst

_STYLES = {State.OK: "green", State.WARNING: "yellow", State.FAULT: "bold red"}
_CHECK_CHARS = 22  # of the second column: a quarter of a terminal of 80 columns


def document(parts: Mapping[str, Sequence[Diagnosis]]) -> dict[str, Any]:
    """Return the public JSON form: the worst state, how often each occurs, and every check with the part that it belongs to."""
    found = [one for diagnoses in parts.values() for one in diagnoses]
    counts = Counter(one.state for one in found)
    checks = [{"part": part, **dataclasses.asdict(one)} for part, diagnoses in parts.items() for one in diagnoses]
    return {"state": worst(found), "counts": {state: counts[state] for state in State}, "checks": checks}


def picture(parts: Mapping[str, Sequence[Diagnosis]]) -> Group:
    """Draw a table for each part, `installation` or `stack`, and a line that sums up. Remedies stand below what was found."""
    shown: list[RenderableType] = []
    for part, diagnoses in parts.items():
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(max_width=_CHECK_CHARS, overflow="fold")
        table.add_column(overflow="fold")
        for one in diagnoses:
            table.add_row(Text(one.state, _STYLES[one.state]), Text(one.check), _words(one))
        shown += [Text(part, "bold"), table, ""]
    return Group(*shown, _summary(parts))


def _words(one: Diagnosis) -> Text:
    words = Text(one.found)
    if one.remedy:
        words.append("\n→ " + one.remedy, "dim" if one.state is State.OK else "bold")
    return words


def _summary(parts: Mapping[str, Sequence[Diagnosis]]) -> Text:
    counts = Counter(one.state for diagnoses in parts.values() for one in diagnoses)
    if not (counts[State.FAULT] or counts[State.WARNING]):
        return Text(f"all well: {counts[State.OK]} checks", _STYLES[State.OK])
    said = [_count(counts[state], noun) for state, noun in ((State.FAULT, "fault"), (State.WARNING, "warning")) if counts[state]]
    return Text(f"{', '.join(said)}, {counts[State.OK]} ok", _STYLES[State.FAULT if counts[State.FAULT] else State.WARNING])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
