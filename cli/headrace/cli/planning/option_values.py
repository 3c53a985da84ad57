"""Values of options that name units, like `vision=2,llm=5`."""

from __future__ import annotations

import math
from collections.abc import Collection

from headrace.errors import UserError


def parse_counts(flag: str, text: str) -> dict[str, int]:
    """Parse an option's text like `vision=2,llm=5` into a dict. Raises UserError."""
    counts: dict[str, int] = {}
    for item in text.split(","):
        unit, _, number = item.strip().partition("=")
        if not unit or not number.isdecimal() or int(number) < 1:
            raise UserError(f"{flag} must look like vision=2,llm=5 with numbers of at least 1, got {item!r}")
        if unit in counts:
            raise UserError(f"{flag} names {unit!r} twice")
        counts[unit] = int(number)
    return counts


def parse_times(flag: str, text: str, units: Collection[str]) -> dict[str, list[float]]:
    """Parse an option's text like `llm=1:1.5,vision=2:2` into a dict. Raises UserError."""
    times: dict[str, list[float]] = {}
    for item in text.split(",") if text else ():
        unit, _, numbers = item.strip().partition("=")
        if unit in times:
            raise UserError(f"{flag} names {unit!r} twice")
        try:
            times[unit] = [float(number) for number in numbers.split(":")]
        except ValueError:
            times[unit] = [math.nan]
        if not unit or not all(0 <= time < math.inf for time in times[unit]):
            raise UserError(f"{flag} must look like llm=1:1.5 with times of at least 0, got {item!r}")
        if unit not in units:
            raise UserError(f"{flag} names {unit!r}, which is no unit of the pipeline ({', '.join(units)})")
    return times


def parse_units(flag: str, text: str, units: Collection[str]) -> tuple[str, ...]:
    """Parse an option's text like `vision,llm`. Raises UserError unless it names some of `units`."""
    named = tuple(unit.strip() for unit in text.split(",") if unit.strip())
    for unit in named:
        if unit not in units:
            raise UserError(f"{flag} names {unit!r}, which is no unit of the pipeline ({', '.join(units)})")
    return named
