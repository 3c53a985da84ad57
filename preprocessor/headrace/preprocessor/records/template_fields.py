"""What a conversation says beside its words, for templates that have a place for it: tools, calls of them, and thoughts.

Whether there is a place is the template's matter: those that have none refuse such a sample by the name of the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import is_absent, schema_error
from headrace.quarantine import BadSampleError, Reason

THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a turn that hold the thoughts in front of its answer."""
_CALL_FIELDS = ("tool_calls", "tool_call_id")
NAME = "name"
"""Field of a turn that is carried too, and is nothing lost where a template does not print it."""


def fields_of_turn(field: str, item: Mapping[str, Any], spec: MappingSpec) -> dict[str, Any]:
    """Return what a turn has for a template beside its words, without what is empty or ignored: calls of tools, its name, and
    thoughts if the mapping does not make words of them.

    Lists may be in JSON strings, as tables have them. Raises BadSampleError (schema_error) for a string that is no JSON.
    """
    names = (*_CALL_FIELDS, *(THOUGHT_FIELDS if spec.thinking is None else ()), NAME)
    return {
        name: _list(f"{field}.{name}", item[name]) if name == "tool_calls" else item[name]
        for name in names
        if not is_absent(item.get(name)) and name not in spec.ignore
    }


def tools_of(fields: Mapping[str, Any], spec: MappingSpec) -> tuple[Any, ...]:
    """Return the record's tools; none where they are ignored. Raises BadSampleError (schema_error) if they are no list."""
    value = fields.get("tools")
    return () if is_absent(value) or "tools" in spec.ignore else tuple(_list("tools", value))


def no_place(field: str, name: str) -> BadSampleError:
    """Return the error that `field` of a record has a value that the template does not take; `name`: its last part."""
    instead = "set the mapping's thinking to keep, mask or drop" if name in THOUGHT_FIELDS else "write it into the text"
    return BadSampleError(
        Reason.SCHEMA_ERROR,
        f"{field} has no place in a template: {instead}, or list {name!r} under the mapping's ignore to train without it",
    )


def _list(field: str, value: Any) -> list[Any]:
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError as err:
            raise schema_error(field, "a list", value) from err
    if not isinstance(parsed, list):
        raise schema_error(field, "a list", parsed)
    return parsed
