"""The images and recordings that a record lists beside its text."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.mapping import MappingSpec
from headrace.preprocessor.records import key_path, unused_media
from headrace.preprocessor.records.draft import MediaKind
from headrace.preprocessor.records.medium import Medium, medium_of
from headrace.preprocessor.records.record import Record, schema_error

_KEYS = {MediaKind.IMAGE: ("images", "image"), MediaKind.AUDIO: ("audios", "audio")}
_EXTENSIONS = {MediaKind.IMAGE: unused_media.IMAGE_EXTENSIONS, MediaKind.AUDIO: unused_media.AUDIO_EXTENSIONS}
_JPEG = ("jpg", "jpeg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The media of one kind that a record lists, in order."""

    path: str = ""
    """Path of the list; "" if they are members of a tar that no field names."""
    field: str = ""
    """Name of the record's field in which the path begins."""
    media: tuple[Medium | None, ...] | None = ()
    """None if null stands in the place of the list. A null among the media stands where a text belongs."""

    @property
    def whole(self) -> tuple[Medium, ...]:
        """The media, of a list that has no nulls. Raises BadSampleError (schema_error) for one that has."""
        media = tuple(medium for medium in self.media or () if medium is not None)
        if len(media) < len(self.media or ()):
            raise schema_error(self.path, "a name or {bytes, path}", None)
        return media


def named(kind: MediaKind, spec: MappingSpec) -> str | None:
    """Return the path of a kind of media that the mapping names; None if it leaves that to the usual fields."""
    return spec.images if kind is MediaKind.IMAGE else spec.audios


def list_media(record: Record, kind: MediaKind, spec: MappingSpec) -> Listed | None:
    """Return the media of one kind that the mapping names, or that a usual field lists; None if there is no such field.

    Raises BadSampleError with schema_error (the mapping's name is not there, or a value is no medium) or what `medium_of` raises.
    """
    path = named(kind, spec)
    if path in record.members and path not in record.fields:
        return Listed(path=path, media=(path,))
    if path is None:
        path = next((key for key in _KEYS[kind] if key in record.fields and key not in spec.ignore), None)
    if path is None:
        return None
    field = key_path.field_of(record.fields, path)
    try:
        value = key_path.find(record.fields, path)
    except KeyError as err:
        raise schema_error(path, "an image or a recording", "nothing of that name") from err
    if value is None or value == "":
        return Listed(path=path, field=field, media=None)
    items = value if isinstance(value, list) else [value]
    media = tuple(None if item is None else medium_of(path, item) for item in items)
    return Listed(
        path=path, field=field, media=tuple(_renamed(item, record, kind) for item in media) if len(media) == 1 else media
    )


def list_members(record: Record, kind: MediaKind, spec: MappingSpec) -> Listed:
    """Return the members of a tar that are media of one kind. Raises BadSampleError as `members_of_kind` does."""
    return Listed(media=unused_media.members_of_kind(record, _EXTENSIONS[kind], spec))


def _renamed(medium: Medium | None, record: Record, kind: MediaKind) -> Medium | None:
    """Return the member of a tar that a path means: `jpg` for `coco/train/0001.jpg`, if that is the only image.

    Tools that pack files into a tar call them KEY.jpg, and leave their former path in the annotation.
    """
    if not isinstance(medium, str) or "." not in medium or medium.lower() in record.members:
        return medium
    ending = _ending(medium)
    same = _JPEG if ending in _JPEG else (ending,)
    members = [name for name in record.members if _ending(name) in _EXTENSIONS[kind]]
    return members[0] if len(members) == 1 and members[0] in same else medium


def _ending(name: str) -> str:
    return name.rsplit(".", 1)[-1].lower()
