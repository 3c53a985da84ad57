"""Which names of a mapping mean anything for a record, so that one that no record has can be told to the user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record


def names_given(spec: MappingSpec) -> frozenset[str]:
    """Return the names of fields, members and placeholders that a mapping has."""
    keys = [key for key in (spec.text, spec.images, spec.audios) if key is not None]
    return frozenset((*keys, *spec.ignore))


def names_used(record: Record, spec: MappingSpec) -> frozenset[str]:
    """Return those of `names_given` that are in a record: as a field, as a member, or, of those to ignore, within a field."""
    there = {*record.fields, *(ending for name in record.members for ending in (name, name.rsplit(".", 1)[-1]))}
    found = {name for name in names_given(spec) if name in there or name.lower() in there}
    if missing := set(spec.ignore) - found:
        found |= {name for name in missing if any(name in text for text in _texts(dict(record.fields)))}
    return frozenset(found)


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value, the keys of objects among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(item)
