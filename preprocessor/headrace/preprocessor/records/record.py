"""A record: one row of a data set, in the same form for every format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.quarantine import BadSampleError, Reason

_EMPTY_TEXTS = ("[]", "{}", "null")  # how a column of strings writes an empty value


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row of a shard, whose media are not yet read."""

    key: str
    """Name of the record, unique in its shard."""
    fields: Mapping[str, Any]
    """The annotation: JSON-like values. A medium is in it as a name for `load`, as bytes, or as `{bytes, path}`."""
    load: Callable[[str], bytes]
    """Returns the bytes of a medium by its name (tar: the member's extension; JSONL: a path). Thread-safe. Raises BadSampleError
    with missing_media, unsafe_member_name, unsupported_member_type, too_large or archive_truncated."""
    members: tuple[str, ...] = ()
    """Names that `load` takes without any annotation, in natural order; only tar samples have them."""


def schema_error(field: str, expected: str, got: Any) -> BadSampleError:
    """Return the error that a field of a record has another shape than `expected`; text in `got` is shown, of others the type."""
    shown = got if isinstance(got, str) else "null" if got is None else type(got).__name__
    return BadSampleError(Reason.SCHEMA_ERROR, f"{field}: expected {expected}, got {str(shown)[:80]}")


def is_absent(value: Any) -> bool:
    """Whether a value stands for nothing: null, empty, or what tables fill fields with that a row does not have."""
    return not value or value in _EMPTY_TEXTS or (isinstance(value, Mapping) and not any(value.values()))
