"""Brace expansion as in a shell: "shard_{000..119}.tar", "{a,b{1..3}}.tar"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

MAX_NAMES = 1_000_000
MAX_CHARACTERS = 200_000_000  # of all names together
MAX_PATTERN = 4096  # characters, as of a path
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")


def expand_braces(pattern: str) -> list[str]:
    """All names, in order; braces without a comma or a range in them stand for themselves. Raises ValueError as `expand_all`."""
    return expand_all([pattern])


def expand_all(patterns: Sequence[str]) -> list[str]:
    """The names of all patterns, in order.

    Raises ValueError where they are more than MAX_NAMES, or have more than MAX_CHARACTERS, together, or a pattern is too long.
    """
    names: list[str] = []
    num_characters = 0
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"{pattern[:80]}... has {len(pattern)} characters, more than {MAX_PATTERN}")
        for name in _names(pattern):
            names.append(name)
            num_characters += len(name)
            if len(names) > MAX_NAMES or num_characters > MAX_CHARACTERS:
                raise ValueError(f"{pattern} and what stands before it are more than {MAX_NAMES} names, or too long ones")
    return names


def _names(pattern: str) -> Iterator[str]:
    start = pattern.find("{")
    commas, stop = _inside(pattern, start) if start >= 0 else ([], -1)
    if stop < 0:
        yield pattern
        return
    head, inside, tail = pattern[:start], pattern[start + 1 : stop], pattern[stop + 1 :]
    if match := _RANGE.fullmatch(inside):
        yield from (head + number + rest for number in _numbers(match[1], match[2]) for rest in _names(tail))
    elif commas:
        bounds = [start, *commas, stop]
        parts = [pattern[left + 1 : right] for left, right in pairwise(bounds)]
        yield from (head + name + rest for part in parts for name in _names(part) for rest in _names(tail))
    else:
        yield from (head + "{" + rest for rest in _names(pattern[start + 1 :]))


def _inside(pattern: str, start: int) -> tuple[list[int], int]:
    """Places of the commas between the brace at `start` and its partner, and the partner's place; -1 if it has none."""
    depth = 0
    commas: list[int] = []
    for place in range(start, len(pattern)):
        match pattern[place]:
            case "{":
                depth += 1
            case "}" if depth == 1:
                return commas, place
            case "}":
                depth -= 1
            case "," if depth == 1:
                commas.append(place)
    return commas, -1


def _numbers(first: str, last: str) -> Iterator[str]:
    """From one to the other, of one width if either has a zero in front."""
    width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 1
    step = 1 if int(first) <= int(last) else -1
    return (f"{number:0{width}}" for number in range(int(first), int(last) + step, step))
