"""A medium as records hold it: a name, bytes, an object with either, or its file in base64.

Nothing is downloaded from an address in the data. A string without anything that says so is taken for base64 only if it is long,
is base64 throughout, and begins as an image or audio file does.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from headrace.preprocessor.records.record import schema_error
from headrace.quarantine import BadSampleError, Reason

Medium = str | bytes
"""A medium that is not read yet: the name by which `Record.load` finds it, or the bytes of its file."""

MEDIUM_KEYS = ("bytes", "base64", "data", "path", "url")
"""Keys of an object that hold a medium or name it; the first that has a value counts."""
_BEGINNINGS = (
    b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"fLaC", b"OggS", b"ID3",
)  # fmt: skip
_ENCODED_BEGINNINGS = tuple(base64.b64encode(begin)[: len(begin) * 8 // 6].decode() for begin in _BEGINNINGS)
_LEAST_ENCODED = 128  # characters: no name of a file looks like that by chance
_DATA_URL = re.compile(r"data:([^,]{0,200}),", re.IGNORECASE)
_ADDRESS = re.compile(r"https?://", re.IGNORECASE)


def medium_of(field: str, value: Any) -> Medium:
    """Return the medium that `value` is; `field` names it in errors.

    Raises BadSampleError with schema_error (it is none), missing_media (an address, or a path in the place of bytes) or
    corrupt_media (a data URL that is not base64).
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _of_string(field, value)
    if isinstance(value, Mapping):
        return _of_object(field, value)
    raise schema_error(field, "a name or {bytes, path}", value)


def _of_string(field: str, value: str) -> Medium:
    if found := _DATA_URL.match(value):
        if not found[1].lower().endswith("base64"):
            raise schema_error(field, "a data URL in base64", value[: found.end()])
        return _decoded(field, value[found.end() :])
    if _ADDRESS.match(value):
        raise BadSampleError(
            Reason.MISSING_MEDIA,
            f"{field} is the address {value[:200]}, and nothing is downloaded from where data say: download it beforehand and "
            "write the name of its file there",
        )
    return _encoded(value) or value.removeprefix("file://")


def _of_object(field: str, value: Mapping[str, Any]) -> Medium:
    name = next((name for name in MEDIUM_KEYS if value.get(name) is not None), None)
    if "bytes" in value and name in (None, "path"):
        raise BadSampleError(Reason.MISSING_MEDIA, f"{field}: no bytes, only the path {value.get('path')!r}")
    if name is None:
        raise schema_error(field, "a name or {bytes, path}", value)
    held = value[name]
    if isinstance(held, bytes):
        return held
    if not isinstance(held, str):
        raise schema_error(f"{field}.{name}", "bytes" if name == "bytes" else "a string", held)
    if name == "bytes":
        if (encoded := _encoded(held)) is None:
            raise schema_error(f"{field}.bytes", "bytes", held)
        return encoded
    if name in ("base64", "data") and not _DATA_URL.match(held):
        return _decoded(f"{field}.{name}", held)
    return _of_string(f"{field}.{name}", held)


def _encoded(value: str) -> bytes | None:
    """Return the file that `value` is in base64; None if it is not certain that it is one."""
    if len(value) < _LEAST_ENCODED or not value.startswith(_ENCODED_BEGINNINGS):
        return None
    try:
        return _bytes(value)
    except ValueError:
        return None


def _decoded(field: str, value: str) -> bytes:
    try:
        return _bytes(value)
    except ValueError as err:
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"{field} is not base64: {err}") from err


def _bytes(value: str) -> bytes:
    return base64.b64decode(value.replace("\r", "").replace("\n", ""), validate=True)
