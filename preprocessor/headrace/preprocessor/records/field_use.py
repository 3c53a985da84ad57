"""What each field and member of a record is used as, for those who look into a data set.

It is told by the effect: a field is used if the sample would be another one without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.errors import DatasetError
from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.record_to_sample import Audio, Image, Sample, Text, to_sample
from headrace.preprocessor.records.unused_media import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, ignored
from headrace.quarantine import BadSampleError, Reason

_MEDIUM = {"bytes", "path"}


class Use(StrEnum):
    """What a field or member is used as."""

    TEXT = "text"
    IMAGES = "images"
    AUDIOS = "audios"
    IGNORED = "ignored"  # the mapping lists it under `ignore`
    NOTE = "note"  # a member that describes the sample and is not used
    UNCLAIMED = "refused"  # a medium that nothing takes, for which the sample is refused
    UNUSED = "not used"
    UNKNOWN = "unknown"  # the sample is refused for something else


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldUse:
    """A field of a record, or a member of a tar sample."""

    name: str
    """The field's key, or the member's extension, in which numbers are written as N: `N.jpg` for `0.jpg` and `1.jpg`."""
    kind: str
    """Of a value: text, number, bytes, {bytes, path}, object, list of one of these, null, ... Of a member: member."""
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A field or a member of a record."""

    name: str
    member: bool

    def left_out_of(self, record: Record) -> Record:
        """Return the record without this part."""
        if not self.member:
            fields = {name: value for name, value in record.fields.items() if name != self.name}
            return dataclasses.replace(record, fields=fields)

        def load(name: str) -> bytes:
            if name.lower() == self.name:
                raise BadSampleError(Reason.MISSING_MEDIA, f"no member {name}")
            return record.load(name)

        return dataclasses.replace(record, load=load, members=tuple(name for name in record.members if name != self.name))


def field_uses(record: Record, spec: MappingSpec) -> tuple[FieldUse, ...]:
    """Return the fields of a record in their order, then its members, each with what the mapping uses it as.

    Reads the record's media. Raises DatasetError, OSError or MemoryError where these cannot be read on this machine.
    """
    loaded: dict[str, bytes] = {}

    def load(name: str) -> bytes:
        if name not in loaded:
            loaded[name] = record.load(name)
        return loaded[name]

    rest = dataclasses.replace(record, load=load)
    parts = [
        *(_Part(name=name, member=False) for name, value in record.fields.items() if value is not None),
        *(_Part(name=name, member=True) for name in record.members),
    ]
    unclaimed: list[_Part] = []
    while culprits := _unclaimed(rest, [part for part in parts if part not in unclaimed], spec):
        for part in culprits:
            rest = part.left_out_of(rest)
        unclaimed += culprits
    uses = dict.fromkeys(unclaimed, Use.UNCLAIMED)
    outcome = _outcome(rest, spec)
    for part in parts:
        if part not in uses:
            uses[part] = _use(part, rest, outcome, loaded, spec)
    names = [*(_Part(name=name, member=False) for name in record.fields), *parts]
    return tuple(
        dict.fromkeys(
            FieldUse(
                name=_without_numbers(part.name) if part.member else part.name,
                kind="member" if part.member else kind_of(record.fields[part.name]),
                use=uses.get(part, Use.UNUSED),
            )
            for part in dict.fromkeys(names)
        )
    )


def kind_of(value: Any) -> str:
    """Return the kind of a field's value in words; see `FieldUse.kind`."""
    if isinstance(value, list):
        kinds = dict.fromkeys(kind_of(item) for item in value if item is not None)
        return f"list of {' and '.join(kinds)}" if kinds else "empty list"
    if isinstance(value, dict):
        return "{bytes, path}" if value.keys() == _MEDIUM else "object"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "number"
    return {"NoneType": "null", "str": "text"}.get(type(value).__name__, type(value).__name__)


def _outcome(record: Record, spec: MappingSpec) -> Sample | BadSampleError:
    try:
        return to_sample(record, spec)
    except BadSampleError as err:
        return err
    except (DatasetError, OSError, MemoryError):
        raise
    except Exception as err:  # a preprocessor would refuse the sample too
        return BadSampleError(Reason.SCHEMA_ERROR, f"unexpected {type(err).__name__}: {err}")


def _unclaimed(record: Record, parts: list[_Part], spec: MappingSpec) -> list[_Part]:
    """Return the parts for which the record is refused as unused_media: without one of them it is not, or for another one."""
    refusal = _outcome(record, spec)
    if isinstance(refusal, Sample) or refusal.reason is not Reason.UNUSED_MEDIA:
        return []

    def is_culprit(part: _Part) -> bool:
        without = _outcome(part.left_out_of(record), spec)
        return isinstance(without, Sample) or (without.reason is Reason.UNUSED_MEDIA and without.detail != refusal.detail)

    return [part for part in parts if is_culprit(part)]


def _use(part: _Part, record: Record, outcome: Sample | BadSampleError, loaded: Mapping[str, bytes], spec: MappingSpec) -> Use:
    if isinstance(outcome, Sample):
        without = _outcome(part.left_out_of(record), spec)
        if isinstance(without, BadSampleError):
            return _medium_use(part, record, outcome, loaded) or Use.TEXT
        for kind, use in ((Image, Use.IMAGES), (Audio, Use.AUDIOS)):
            if _media(outcome, kind) != _media(without, kind):
                return use
        if outcome != without:
            return Use.TEXT
    if ignored(part.name, spec):
        return Use.IGNORED
    if isinstance(outcome, BadSampleError):
        return Use.UNKNOWN
    if part.member:
        return Use.UNUSED if part.name.rsplit(".", 1)[-1] in IMAGE_EXTENSIONS | AUDIO_EXTENSIONS else Use.NOTE
    if _is_said(record.fields[part.name], outcome):  # img2dataset writes a caption twice
        return Use.TEXT
    names_a_member = any(name in record.members for name in _names(part, record))  # which is found without it too
    return (names_a_member and _medium_use(part, record, outcome, loaded)) or Use.UNUSED


def _is_said(value: Any, sample: Sample) -> bool:
    """Return whether a string is a text of the sample as a whole, which may come from another field with the same text."""
    texts = (segment.text.strip() for segment in sample.segments if isinstance(segment, Text))
    return isinstance(value, str) and bool(value.strip()) and value.strip() in texts


def _medium_use(part: _Part, record: Record, sample: Sample, loaded: Mapping[str, bytes]) -> Use | None:
    """Return whether a part is used as images or audios, by the media that it holds or names. `loaded`: media by name."""
    names = _names(part, record)
    held = [data for name, data in loaded.items() if name.lower() in names]
    if not part.member:
        held += _bytes(record.fields[part.name])
    for kind, use in ((Image, Use.IMAGES), (Audio, Use.AUDIOS)):
        if any(data in held for data in _media(sample, kind)):
            return use
    return None


def _names(part: _Part, record: Record) -> set[str]:
    """Return what a part may be naming, in lower case: itself if it is a member, else all texts in it."""
    return {part.name} if part.member else {text.lower() for text in _texts(record.fields[part.name])}


def _media(sample: Sample, kind: type[Image] | type[Audio]) -> list[bytes]:
    return [segment.data for segment in sample.segments if isinstance(segment, kind)]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _bytes(item)


def _without_numbers(extension: str) -> str:
    return ".".join("N" if part.isdecimal() else part for part in extension.split("."))
