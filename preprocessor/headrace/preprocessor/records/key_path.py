"""Dotted paths into the fields of a record: `json.caption`, `media.0.path`, `parts.*.image`.

A step is a key of an object, a number, which is the place of an item in a list from 0 on, or `*`, which is every item of a list.
Keys may have dots in their own names: of those with which the rest of a path can begin, the longest is followed. A string on
the way that is JSON is looked into, as tables have columns of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_EVERY = "*"
_NUMBER = re.compile(r"[0-9]{1,9}")


def find(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value at `path`; None if it, or a value on the way to it, is null.

    With a `*` it is the list of what the items have there: without nulls and items that have nothing, and with lists among the
    values joined. Raises KeyError if there is nothing.
    """
    return _at(fields, path.split("."))


def field_of(fields: Mapping[str, Any], path: str) -> str:
    """Return the name of the field in which `path` begins; the path itself if it begins in none."""
    steps = path.split(".")
    return next((name for end in range(len(steps), 0, -1) if (name := ".".join(steps[:end])) in fields), path)


def parse_json(text: str) -> Any:
    """Return the object or list that `text` is in JSON; None if it is anything else."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _at(value: Any, steps: Sequence[str]) -> Any:
    if not steps or value is None:
        return value
    if isinstance(value, str):
        value = parse_json(value)
    if isinstance(value, Mapping):
        for end in range(len(steps), 0, -1):
            if (key := ".".join(steps[:end])) in value:
                return _at(value[key], steps[end:])
    elif isinstance(value, list):
        if steps[0] == _EVERY:
            return _gathered(value, steps[1:])
        if _NUMBER.fullmatch(steps[0]) and int(steps[0]) < len(value):
            return _at(value[int(steps[0])], steps[1:])
    raise KeyError(".".join(steps))


def _gathered(items: list[Any], steps: Sequence[str]) -> list[Any]:
    gathered: list[Any] = []
    for item in items:
        try:
            value = _at(item, steps)
        except KeyError:
            continue
        if value is not None:
            gathered += value if isinstance(value, list) else [value]
    return gathered
