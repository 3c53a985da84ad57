"""The images and recordings that a record lists beside its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records import key_path, unused_media
from headrace.preprocessor.records.draft import MediaKind
from headrace.preprocessor.records.medium import Medium, medium_of
from headrace.preprocessor.records.record import Record, schema_error

_KEYS = {MediaKind.IMAGE: ("images", "image"), MediaKind.AUDIO: ("audios", "audio")}
_EXTENSIONS = {MediaKind.IMAGE: unused_media.IMAGE_EXTENSIONS, MediaKind.AUDIO: unused_media.AUDIO_EXTENSIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a record has at the path of its media."""

    path: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The media of one kind that a record lists, in order."""

    field: str = ""
    """Name of the record's field that lists them; "" if they are members of a tar that no field names, or there are none."""
    media: tuple[Medium, ...] | None = ()
    """None if null stands in the place of the list."""


def find_list(record: Record, kind: MediaKind, spec: MappingSpec) -> Found | None:
    """Return what the record has at the mapping's path of a kind of media, else in one of the usual fields; None if nothing."""
    path = named(kind, spec)
    if path is None:
        path = next((key for key in _KEYS[kind] if key in record.fields and key not in spec.ignore), None)
    if path is None:
        return None
    try:
        return Found(path=path, value=key_path.find(record.fields, path))
    except KeyError:
        return None


def named(kind: MediaKind, spec: MappingSpec) -> str | None:
    """Return the path of a kind of media that the mapping names; None if it leaves that to the usual fields."""
    return spec.images if kind is MediaKind.IMAGE else spec.audios


def list_media(record: Record, kind: MediaKind, spec: MappingSpec, *, members: bool) -> Listed:
    """Return the media of one kind that a record lists. `members`: whether tar members that no field names count too.

    Raises BadSampleError with schema_error (the mapping's name is not there, or a value is no medium), unused_media (members of
    which nothing says which are meant) or what `medium_of` raises.
    """
    path = named(kind, spec)
    found = None if path in record.members and path not in record.fields else find_list(record, kind, spec)
    if found is None:
        if path is None:
            return Listed(media=unused_media.members_of_kind(record, _EXTENSIONS[kind], spec) if members else ())
        if path in record.members:
            return Listed(media=(path,))
        raise schema_error(path, "an image or a recording", "nothing of that name")
    field = key_path.field_of(record.fields, found.path)
    if found.value is None:
        return Listed(field=field, media=None)
    items = found.value if isinstance(found.value, list) else [found.value]
    return Listed(field=field, media=tuple(medium_of(found.path, item) for item in items))
