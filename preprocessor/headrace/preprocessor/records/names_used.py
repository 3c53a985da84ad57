"""Which names of a mapping mean anything for a record, so that one that no record has can be told to the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records import key_path
from headrace.preprocessor.records.record import Record, is_absent


def names_given(spec: MappingSpec) -> frozenset[str]:
    """Return the names of fields, members and placeholders that a mapping gives: all paths, and what it ignores."""
    return frozenset((*_paths(spec), *spec.ignore))


def names_used(record: Record, spec: MappingSpec) -> frozenset[str]:
    """Return those of `names_given` that the record has: paths that lead to something, and ignored fields, members and
    placeholders that are in it. What no record of a data set uses is likely to be misspelt."""
    paths = (path for path in _paths(spec) if path in record.members or _leads_somewhere(record, path))
    values = list(_values(record.fields))
    objects = (value for value in values if isinstance(value, Mapping))
    there = {*record.members, *(name for value in objects for name, inner in value.items() if not is_absent(inner))}
    endings = {name.rsplit(".", 1)[-1] for name in there}
    signs = [name for name in spec.ignore if name and not name[0].isalnum()]  # placeholders, not names of fields
    found = (name for name in signs if any(name in value for value in values if isinstance(value, str)))
    return frozenset((*paths, *(name for name in spec.ignore if name in there or name in endings), *found))


def _paths(spec: MappingSpec) -> list[str]:
    return [path for path in (spec.text, spec.question, spec.answer, spec.images, spec.audios) if path is not None]


def _leads_somewhere(record: Record, path: str) -> bool:
    try:
        return not is_absent(key_path.find(record.fields, path))
    except KeyError:
        return False


def _values(fields: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the fields and all that is inside of them, turns and parts included, however deep."""
    waiting: list[Any] = [fields]
    while waiting:
        value = waiting.pop()
        yield value
        waiting += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
