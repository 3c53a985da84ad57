"""From a record to a sample: an ordered list of turns of segments.

Shapes of the text, told apart by their values:

    "a caption"                                       plain caption; not under texts, conversations or messages
    ["some text", "<image>", "more text"]             interleaved document
    [{"user": "...", "assistant": "..."}, ...]        question and answer pairs
    [{"from": "human", "value": "..."}, ...]          conversation
    [{"role": "user", "content": "..."}, ...]         messages; content may be a list of typed parts:
                                                      {"type": "text", "text": "..."}, {"type": "image"}, {"type": "audio"}

Placeholders in strings stand for the media, each kind in its own order, and their numbers must agree. Two exceptions: a
plain caption without any placeholder has its images, then its recordings, in front of it; and text inside of typed parts
is never searched, so that a placeholder's name in it is text. Nothing is put between the items of a document.

Captions and documents are one turn with the role DOCUMENT. What these functions do not know: tokens, and what is inside
of media.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from headrace.mapping import MappingSpec
from headrace.quarantine import BadSampleError, Reason
from preprocessor import claims
from preprocessor.record import Record

_LIST_KEYS = ("texts", "conversations", "messages")
_TEXT_KEYS = (*_LIST_KEYS, "caption", "text", "txt")
_IMAGE_KEYS = ("images", "image")
_AUDIO_KEYS = ("audios", "audio")


class Role(StrEnum):
    """Who speaks. A document has one turn, spoken by nobody."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    DOCUMENT = "document"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A piece of text; may hold anything, control tokens' names included."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The bytes of an image file."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio:
    """The bytes of an audio file."""

    data: bytes


Segment = Text | Image | Audio


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one role says, in order."""

    role: Role
    segments: tuple[Segment, ...]

    @property
    def loss(self) -> bool:
        """Whether the text of this turn is to be learnt."""
        return self.role in (Role.ASSISTANT, Role.DOCUMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One or more turns; at least one of them carries loss."""

    turns: tuple[Turn, ...]

    @property
    def segments(self) -> Iterator[Segment]:
        """The segments of all turns in order."""
        return (segment for turn in self.turns for segment in turn.segments)


class _Slot(Enum):
    """A place for a medium."""

    IMAGE = 1
    AUDIO = 2


_Piece = str | _Slot
_Draft = tuple[Role, list[_Piece]]
_Reference = str | bytes


def to_sample(record: Record, spec: MappingSpec) -> Sample:
    """The sample in a record; loads its media.

    Raises BadSampleError with schema_error (the field and what was expected), placeholder_mismatch, missing_media,
    unused_media, empty_sample (no text and no media, or a conversation without an answer), and whatever `record.load` raises.
    """
    image_field, images = _references(record, spec.images, _IMAGE_KEYS, claims.IMAGE_EXTENSIONS, spec)
    audio_field, audios = _references(record, spec.audios, _AUDIO_KEYS, claims.AUDIO_EXTENSIONS, spec)
    key, value = _text(record, spec)
    settled = [kind for kind, named in (("image", spec.images), ("audio", spec.audios)) if named is not None]
    taken = [kind for kind, media in (("image", images), ("audio", audios)) if media]
    members = {reference.lower() for reference in (*(images or ()), *(audios or ())) if isinstance(reference, str)}
    claims.check_members(record, members, settled, spec)
    claims.check_fields(record, (key, image_field, audio_field), {*settled, *taken}, spec)
    drafts = _drafts(key, value, spec)
    if isinstance(value, str) and not any(isinstance(piece, _Slot) for _, pieces in drafts for piece in pieces):
        drafts[0][1][:0] = [*[_Slot.IMAGE] * len(images or ()), *[_Slot.AUDIO] * len(audios or ())]
    _check_not_empty(drafts)
    sources = {
        _Slot.IMAGE: iter(_matched("image", images, drafts, _Slot.IMAGE)),
        _Slot.AUDIO: iter(_matched("audio", audios, drafts, _Slot.AUDIO)),
    }

    def segment(piece: _Piece) -> Segment:
        if isinstance(piece, str):
            return Text(text=piece)
        reference = next(sources[piece])
        data = record.load(reference) if isinstance(reference, str) else reference
        return Image(data=data) if piece is _Slot.IMAGE else Audio(data=data)

    return Sample(turns=tuple(Turn(role=role, segments=tuple(map(segment, pieces))) for role, pieces in drafts))


def _references(
    record: Record, key: str | None, keys: Sequence[str], extensions: frozenset[str], spec: MappingSpec
) -> tuple[str, tuple[_Reference, ...] | None]:
    """The field of the media of one kind, "" where members are, and their names or bytes; None where their cell is null."""
    found = key if key is not None else next((name for name in keys if name in record.fields), None)
    if found is None:
        return "", claims.of_kind(record, extensions, spec)
    if found not in record.fields:
        if found in record.members:
            return "", (found,)
        raise _schema_error(found, "an image or a recording", "nothing of that name")
    value = record.fields[found]
    if value is None:
        return found, None
    return found, tuple(_reference(found, item) for item in (value if isinstance(value, list) else [value]))


def _reference(field: str, value: Any) -> _Reference:
    if isinstance(value, str | bytes):
        return value
    if not isinstance(value, dict) or "bytes" not in value:
        raise _schema_error(field, "a name or {bytes, path}", value)
    if value["bytes"] is None:
        raise BadSampleError(Reason.MISSING_MEDIA, f"{field}: no bytes, only the path {value.get('path')!r}")
    if not isinstance(value["bytes"], bytes):
        raise _schema_error(f"{field}.bytes", "bytes", value["bytes"])
    return value["bytes"]


def _text(record: Record, spec: MappingSpec) -> tuple[str, Any]:
    if spec.text is not None:
        if record.fields.get(spec.text) is None:
            raise _schema_error(spec.text, "text", record.fields.get(spec.text))
        return spec.text, record.fields[spec.text]
    for key in _TEXT_KEYS:
        if record.fields.get(key) is not None:
            return key, record.fields[key]
    raise BadSampleError(
        Reason.SCHEMA_ERROR, f"none of {', '.join(_TEXT_KEYS)} is there, only {', '.join(record.fields) or 'nothing'}"
    )


def _drafts(key: str, value: Any, spec: MappingSpec) -> list[_Draft]:
    """Turns with slots in the place of media."""
    if isinstance(value, str) and key not in _LIST_KEYS:
        return [(Role.DOCUMENT, _split(value, spec))]
    if not isinstance(value, list):
        raise _schema_error(key, "a list" if key in _LIST_KEYS else "a string or a list", value)
    if all(isinstance(item, str) for item in value):
        return [(Role.DOCUMENT, [piece for item in value for piece in _split(item, spec)])]
    return [draft for index, item in enumerate(value) for draft in _turns(f"{key}[{index}]", item, spec)]


def _turns(field: str, item: Any, spec: MappingSpec) -> list[_Draft]:
    if not isinstance(item, dict):
        raise _schema_error(field, "a turn like the others' or strings only", item)
    for names, read in _SHAPES.items():
        if item.keys() >= set(names):
            return read(field, item, spec)
    raise _schema_error(field, "{user, assistant}, {from, value} or {role, content}", f"the keys {', '.join(item) or '(none)'}")


def _pair(field: str, item: dict[str, Any], spec: MappingSpec) -> list[_Draft]:
    return [
        (Role.USER, _split(_string(f"{field}.user", item["user"]), spec)),
        (Role.ASSISTANT, _split(_string(f"{field}.assistant", item["assistant"]), spec)),
    ]


def _conversation(field: str, item: dict[str, Any], spec: MappingSpec) -> list[_Draft]:
    role = _role(f"{field}.from", item["from"], spec)
    return [(role, _split(_string(f"{field}.value", item["value"]), spec))]


def _message(field: str, item: dict[str, Any], spec: MappingSpec) -> list[_Draft]:
    role = _role(f"{field}.role", item["role"], spec)
    content = item["content"]
    if isinstance(content, list):
        return [(role, [_part(f"{field}.content[{index}]", part) for index, part in enumerate(content)])]
    return [(role, _split(_string(f"{field}.content", content), spec))]


_SHAPES: dict[tuple[str, str], Callable[[str, dict[str, Any], MappingSpec], list[_Draft]]] = {
    ("user", "assistant"): _pair,
    ("from", "value"): _conversation,
    ("role", "content"): _message,
}


def _part(field: str, part: Any) -> _Piece:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image":
        return _Slot.IMAGE
    if kind == "audio":
        return _Slot.AUDIO
    if kind == "text":
        return _string(f"{field}.text", part.get("text"))
    raise _schema_error(field, "a part of type text, image or audio", part)


def _role(field: str, value: Any, spec: MappingSpec) -> Role:
    known = {
        **dict.fromkeys(spec.system_roles, Role.SYSTEM),
        **dict.fromkeys(spec.user_roles, Role.USER),
        **dict.fromkeys(spec.assistant_roles, Role.ASSISTANT),
    }
    role = known.get(_string(field, value))
    if role is None:
        raise BadSampleError(Reason.SCHEMA_ERROR, f"{field}: expected one of {', '.join(known)}, got {value!r}")
    return role


def _split(text: str, spec: MappingSpec) -> list[_Piece]:
    """The text cut at its placeholders, empty pieces left out. Raises BadSampleError for those of other trainers."""
    claims.check_text(text, spec)
    slots = {spec.image_placeholder: _Slot.IMAGE, spec.audio_placeholder: _Slot.AUDIO}
    parts = re.split("(" + "|".join(map(re.escape, slots)) + ")", text)
    return [slots.get(part, part) for part in parts if part]


def _check_not_empty(drafts: list[_Draft]) -> None:
    if not any(isinstance(piece, _Slot) or piece.strip() for _, pieces in drafts for piece in pieces):
        raise BadSampleError(Reason.EMPTY_SAMPLE, "no text and no media")
    if not any(role in (Role.ASSISTANT, Role.DOCUMENT) for role, _ in drafts):
        raise BadSampleError(Reason.EMPTY_SAMPLE, "no turn of an assistant, so nothing to learn")


def _matched(kind: str, media: tuple[_Reference, ...] | None, drafts: list[_Draft], slot: _Slot) -> tuple[_Reference, ...]:
    """The media, which must be as many as their placeholders."""
    wanted = sum(piece is slot for _, pieces in drafts for piece in pieces)
    if media is None and wanted:
        raise BadSampleError(Reason.MISSING_MEDIA, f"{wanted} {kind} placeholders, and null in the place of media")
    if len(media or ()) != wanted:
        raise BadSampleError(Reason.PLACEHOLDER_MISMATCH, f"{wanted} {kind} placeholders for {len(media or ())} media")
    return media or ()


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _schema_error(field, "a string", value)
    return value


def _schema_error(field: str, expected: str, got: Any) -> BadSampleError:
    shown = got if isinstance(got, str) else "null" if got is None else type(got).__name__
    return BadSampleError(Reason.SCHEMA_ERROR, f"{field}: expected {expected}, got {str(shown)[:80]}")
