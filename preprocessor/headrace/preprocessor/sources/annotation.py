"""Parsing of annotations: strict UTF-8 and JSON with an object at the top level."""

from __future__ import annotations

import json
from typing import Any

from headrace.quarantine import BadSampleError, Reason


def parse_annotation(data: bytes, what: str) -> dict[str, Any]:
    """Parse the JSON object in `data`; `what` names it in errors.

    Raises BadSampleError as `parse_json` and `as_object` do.
    """
    return as_object(parse_json(data, what), what)


def parse_json(data: bytes, what: str) -> Any:
    """Parse the JSON in `data`; `what` names it in errors.

    A leading byte-order mark, NaN and Infinity are accepted, and the last of duplicate names counts, as in Python's json.
    Raises BadSampleError with encoding_error (not UTF-8) or schema_error (not JSON, nested too deeply).
    """
    try:
        return json.loads(parse_text(data, what))
    except ValueError as err:
        raise BadSampleError(Reason.SCHEMA_ERROR, f"{what} is not JSON: {err}") from err
    except RecursionError as err:
        raise BadSampleError(Reason.SCHEMA_ERROR, f"{what} is nested too deeply") from err


def as_object(document: Any, what: str) -> dict[str, Any]:
    """Return a JSON document that is an object. Raises BadSampleError (schema_error) for any other."""
    if not isinstance(document, dict):
        raise BadSampleError(Reason.SCHEMA_ERROR, f"{what}: expected an object, got {type(document).__name__}")
    return document


def parse_text(data: bytes, what: str) -> str:
    """Decode UTF-8 `data`, dropping a leading byte-order mark. Raises BadSampleError (encoding_error) where it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise BadSampleError(Reason.ENCODING_ERROR, f"{what} is not UTF-8: {err.reason} at byte {err.start}") from err
