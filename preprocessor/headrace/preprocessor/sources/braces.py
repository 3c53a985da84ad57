"""Brace expansion as in a shell: "shard_{000..119}.tar", "{a,b{1..3}}.tar"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

MAX_NAMES = 1_000_000
MAX_CHARACTERS = 200_000_000  # of all names together
MAX_PATTERN = 4096  # characters of one pattern, the limit of a path
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")


def expand_braces(pattern: str) -> list[str]:
    """Return all names that a pattern stands for, in order; braces without a comma or a range in them stay as they are.

    Raises ValueError where they exceed MAX_NAMES or MAX_CHARACTERS, or the pattern is longer than MAX_PATTERN.
    """
    return expand_all([pattern])


def expand_all(patterns: Sequence[str]) -> list[str]:
    """Return the names that all patterns stand for, in order.

    Raises ValueError where together they exceed MAX_NAMES or MAX_CHARACTERS, or a pattern is longer than MAX_PATTERN.
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
    """Return the positions of the top-level commas between the brace at `start` and its partner, and the partner's position.

    The partner's position is -1 if there is none.
    """
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
    """Yield the numbers from `first` to `last`, up or down, zero-padded to one width if either starts with a zero."""
    width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 1
    step = 1 if int(first) <= int(last) else -1
    return (f"{number:0{width}}" for number in range(int(first), int(last) + step, step))
