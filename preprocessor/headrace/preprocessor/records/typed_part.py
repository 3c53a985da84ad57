"""Typed parts of a message: text, and images and recordings in their places.

    {"type": "text", "text": "..."}
    {"type": "image"}                                                  the next of the record's images
    {"type": "image", "index": 1}                                      the second of them
    {"type": "image", "image": "a.jpg"}                                this one, as Qwen-VL's data name it
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}          as OpenAI's interface takes it
    {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}

The medium may also be directly in the part, under `path`, `url`, `bytes`, `base64` or `data`. Fields that are null, or an object
of nulls, are as good as absent: a table has the same ones in every part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.draft import MediaKind, Place
from headrace.preprocessor.records.medium import MEDIUM_KEYS, Medium, medium_of
from headrace.preprocessor.records.record import is_absent, schema_error
from headrace.quarantine import BadSampleError, Reason

_TYPES = {
    "image": MediaKind.IMAGE,
    "image_url": MediaKind.IMAGE,
    "audio": MediaKind.AUDIO,
    "audio_url": MediaKind.AUDIO,
    "input_audio": MediaKind.AUDIO,
}
"""The types of parts that are media; a part names the medium under any of these as well."""
_OTHERS = ("video", "video_url")
_KNOWN = "a part of type text, image or audio"


def parse_part(field: str, part: Any, spec: MappingSpec) -> str | Place:
    """Return the text of a typed part, or the place of its medium.

    Raises BadSampleError with schema_error (not a part, or one that says two things), or what `medium_of` raises.
    """
    if not isinstance(part, Mapping):
        raise schema_error(field, _KNOWN, part)
    given = {name: value for name, value in part.items() if not is_absent(value)}
    kind = part.get("type") or _untyped(given)
    given = {name: value for name, value in given.items() if name == kind or name not in spec.ignore}
    if kind == "text":
        _check_none(field, kind, [name for name in given if name in _TYPES or name in _OTHERS])
        text = part.get("text")
        if not isinstance(text, str):
            raise schema_error(f"{field}.text", "a string", text)
        return text
    if not isinstance(kind, str) or kind not in _TYPES:
        raise schema_error(field, _KNOWN, f"the fields {', '.join(part)}" if kind is None else f"the type {kind!r}")
    media_kind = _TYPES[kind]
    _check_none(field, kind, [name for name in ("text", *_OTHERS) if name in given])
    _check_none(field, kind, [name for name in given if name in _TYPES and _TYPES[name] is not media_kind])
    index = _index(field, part, spec)
    return Place(kind=media_kind, index=index, medium=_own(field, given, index))


def _untyped(given: Mapping[str, Any]) -> str | None:
    """Return the type of a part that does not say it, by the only field that it has."""
    (name,) = given if len(given) == 1 else ("",)
    return name if name == "text" or name in _TYPES else None


def _check_none(field: str, kind: str, others: list[str]) -> None:
    if others:
        raise BadSampleError(
            Reason.SCHEMA_ERROR,
            f"{field} is of the type {kind!r} and has {others[0]!r} too, which nothing uses: make it a part of its own, or list "
            f"{others[0]!r} under the mapping's ignore",
        )


def _index(field: str, part: Mapping[str, Any], spec: MappingSpec) -> int | None:
    index = None if "index" in spec.ignore else part.get("index")
    if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
        raise schema_error(f"{field}.index", "a number from 0 on", str(index))
    return index


def _own(field: str, given: Mapping[str, Any], index: int | None) -> Medium | None:
    """Return the medium that a part holds or names; None if it leaves that to the record's list, and to its `index` there."""
    nested = [name for name in (*_TYPES, "source") if name in given]
    direct = [name for name in MEDIUM_KEYS if name in given]
    told = [*nested, *direct[:1], *(["index"] if index is not None else [])]
    if len(told) > 1:
        raise BadSampleError(
            Reason.SCHEMA_ERROR,
            f"{field} says in {' and in '.join(told)} which medium it is: list all but one under the mapping's ignore",
        )
    if nested:
        return medium_of(f"{field}.{nested[0]}", given[nested[0]])
    return medium_of(field, {name: given[name] for name in direct}) if direct else None
