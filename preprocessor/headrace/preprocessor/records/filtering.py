"""Which records and samples a source's filter admits (headrace.filter_spec)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from numbers import Integral, Number
from typing import Any, SupportsFloat, cast

from headrace.filter_spec import Bounds, FieldCondition, FilterSpec, Scalar, Size
from headrace.preprocessor.records import key_path
from headrace.preprocessor.records.record import schema_error
from headrace.quarantine import BadSampleError, Reason


def unmet_condition(fields: Mapping[str, Any], spec: FilterSpec) -> str:
    """Return what keeps a record with these fields from being admitted; empty if nothing does.

    Raises BadSampleError (schema_error) if the record lacks a field, or has a value there that cannot be compared.
    """
    for path, condition in spec.fields.items():
        try:
            value = key_path.find(fields, path)
        except KeyError as err:
            raise schema_error(f"filter.fields: {path}", "a value to compare", "nothing of that name") from err
        if value is None or not _fulfils(path, value, condition):
            return f"{path} is {str(value)[:80]}"
    return ""


def check_fields(fields: Mapping[str, Any], spec: FilterSpec) -> None:
    """Raise BadSampleError: filtered if a record with these fields is not admitted, schema_error as `unmet_condition` does."""
    if unmet := unmet_condition(fields, spec):
        raise BadSampleError(Reason.FILTERED, unmet)


def check_sizes(sizes: Mapping[Size, int], spec: FilterSpec) -> None:
    """Raise BadSampleError (filtered) if a sample of these sizes is not admitted."""
    for name, bounds in spec.sizes.items():
        if not _is_within(sizes[name], bounds):
            raise BadSampleError(Reason.FILTERED, f"{sizes[name]} {name}")


def _fulfils(path: str, value: Any, condition: FieldCondition) -> bool:
    if (condition.one_of is not None or condition.none_of) and not isinstance(value, Number | str):
        raise schema_error(f"filter.fields: {path}", "a text, a number, true or false", value)
    if condition.one_of is not None and not any(_is_equal(value, item) for item in condition.one_of):
        return False
    if any(_is_equal(value, item) for item in condition.none_of):
        return False
    if condition.min is None and condition.max is None:
        return True
    number = _number(value)
    if number is None:
        raise schema_error(f"filter.fields: {path}", "a number", value)
    return _is_within(number, condition)


def _is_within(number: float, bounds: Bounds) -> bool:
    """Return whether a number is within bounds, which one that is not a number (NaN) is not."""
    return (bounds.min is None or number >= bounds.min) and (bounds.max is None or number <= bounds.max) and number == number


def _number(value: Any) -> float | None:
    """Return a number, or what a string of a table without types writes as one; None if it is none. Whole ones stay whole: a
    float has 53 bits."""
    if isinstance(value, bool) or not isinstance(value, Number | str):
        return None
    kinds: tuple[type[int] | type[float], ...] = (int, float) if isinstance(value, Integral | str) else (float,)
    for kind in kinds:
        with contextlib.suppress(ValueError, OverflowError, TypeError):
            return kind(cast(SupportsFloat | str, value))  # type: ignore[arg-type]
    return None


def _is_equal(value: Any, item: Scalar) -> bool:
    """Return whether a value is the item of a condition, or the string that writes it."""
    if isinstance(item, str):
        return isinstance(value, str) and value == item
    if isinstance(item, bool):
        return value is item or (isinstance(value, str) and value.lower() == str(item).lower())
    return _number(value) == item
