"""What a conversation says beside its words, for templates that have a place for it: tools, calls of them, and thoughts.

Whether there is a place is the template's matter: those that have none refuse such a sample by the name of the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.mapping import MappingSpec
from headrace.quarantine import BadSampleError, Reason

TURN_FIELDS = ("tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Fields of a turn that become fields of its message for a template, and that others than chat templates have no place for."""
NAME = "name"
"""Field of a turn that is carried too, and is nothing lost where a template does not print it."""
EMPTY_VALUES = ("[]", "{}", "null")
"""How a column of strings writes an empty value."""


def fields_of_turn(field: str, item: Mapping[str, Any], spec: MappingSpec) -> dict[str, Any]:
    """Return what a turn has of TURN_FIELDS and its name, without what is empty or ignored.

    Lists may be in JSON strings, as tables have them. Raises BadSampleError (schema_error) for a string that is no JSON.
    """
    return {
        name: _list(f"{field}.{name}", item[name]) if name == "tool_calls" else item[name]
        for name in (*TURN_FIELDS, NAME)
        if not is_empty(item.get(name)) and name not in spec.ignore
    }


def tools_of(fields: Mapping[str, Any], spec: MappingSpec) -> tuple[Any, ...]:
    """Return the record's tools; none where they are ignored. Raises BadSampleError (schema_error) if they are no list."""
    value = fields.get("tools")
    return () if is_empty(value) or "tools" in spec.ignore else tuple(_list("tools", value))


def is_empty(value: Any) -> bool:
    """Whether a field has no value, in one of the ways in which tables write that."""
    return not value or value in EMPTY_VALUES


def no_place(field: str, name: str) -> BadSampleError:
    """Return the error that `field` of a record has a value that the template does not take; `name`: its last part."""
    return BadSampleError(
        Reason.SCHEMA_ERROR,
        f"{field} has no place in a template: write it into the text, or list {name!r} under the mapping's ignore to train "
        "without it",
    )


def _list(field: str, value: Any) -> list[Any]:
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError as err:
            raise BadSampleError(Reason.SCHEMA_ERROR, f"{field}: expected a list, got a string that is no JSON: {err}") from err
    if not isinstance(parsed, list):
        raise BadSampleError(Reason.SCHEMA_ERROR, f"{field}: expected a list, got {type(parsed).__name__}")
    return parsed
