"""Turns a record into a sample: an ordered list of turns of segments.

Shapes of the text, told apart by their values:

    "a caption"                                       plain caption; not under texts, conversations or messages
    ["some text", "<image>", "more text"]             interleaved document
    [{"user": "...", "assistant": "..."}, ...]        question and answer pairs
    [{"from": "human", "value": "..."}, ...]          conversation
    [{"role": "user", "content": "..."}, ...]         messages; content may be a list of typed parts:
                                                      {"type": "text", "text": "..."}, {"type": "image"}, {"type": "audio"}

Placeholders in strings stand for the media, each kind in its own order, and their numbers must agree. Two exceptions: a
plain caption without any placeholder has its images, then its recordings, in front of it; and text inside of typed parts
is never searched, so a placeholder's name in it is text. Nothing is put between the items of a document.

An `index` in a typed part names its medium: {"type": "image", "index": 1}. A field `system` beside the turns is the first turn,
and a turn with the `weight` 0 is not learnt. Tools, calls of them and thoughts are carried to the template. Captions and
documents are one turn with the role DOCUMENT. These functions know nothing of tokens or of what is inside media.

    conversation.py     text to turns, with places for media
    template_fields.py  what turns have beside their words
    unused_media.py     refusal of media that nothing takes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records import conversation, unused_media
from headrace.preprocessor.records.conversation import LIST_KEYS, Draft, MediaKind, Piece, Place, Role, schema_error
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.records.template_fields import tools_of
from headrace.quarantine import BadSampleError, Reason

__all__ = ["Audio", "Image", "Role", "Sample", "Segment", "Text", "Turn", "to_sample"]

_TEXT_KEYS = (*LIST_KEYS, "caption", "text", "txt")
_IMAGE_KEYS = ("images", "image")
_AUDIO_KEYS = ("audios", "audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A piece of text, which may contain anything, control tokens' names included."""

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
    """What one role says: text and media in order."""

    role: Role
    segments: tuple[Segment, ...]
    learnt: bool = True
    """Whether the turn is learnt, if its role is one whose words are learnt at all."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the turn's message for a template, such as `tool_calls` and `reasoning_content`."""

    @property
    def loss(self) -> bool:
        """Whether the text of this turn is to be learnt."""
        return self.learnt and self.role in (Role.ASSISTANT, Role.DOCUMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One or more turns; at least one of them carries loss."""

    turns: tuple[Turn, ...]
    tools: tuple[Any, ...] = ()
    """Tools that the assistant may call, as plain data; usually JSON schemas of functions."""

    @property
    def segments(self) -> Iterator[Segment]:
        """The segments of all turns in order."""
        return (segment for turn in self.turns for segment in turn.segments)


_Reference = str | bytes


def to_sample(record: Record, spec: MappingSpec) -> Sample:
    """Build the sample of a record, loading its media.

    Raises BadSampleError with schema_error (the field and what was expected), placeholder_mismatch, missing_media,
    unused_media, empty_sample (no text and no media, or a conversation without an answer), and whatever `record.load` raises.
    """
    image_field, images = _references(record, spec.images, _IMAGE_KEYS, unused_media.IMAGE_EXTENSIONS, spec)
    audio_field, audios = _references(record, spec.audios, _AUDIO_KEYS, unused_media.AUDIO_EXTENSIONS, spec)
    key, value = _text(record, spec)
    settled = [kind for kind, named in (("image", spec.images), ("audio", spec.audios)) if named is not None]
    taken = [kind for kind, media in (("image", images), ("audio", audios)) if media]
    members = {reference.lower() for reference in (*(images or ()), *(audios or ())) if isinstance(reference, str)}
    unused_media.check_members(record, members, settled, spec)
    unused_media.check_fields(record, (key, image_field, audio_field), {*settled, *taken}, spec)
    drafts = conversation.parse_turns(key, value, record.fields, spec)
    if isinstance(value, str) and not any(isinstance(piece, Place) for piece in drafts[0].pieces):
        kinds = [*[MediaKind.IMAGE] * len(images or ()), *[MediaKind.AUDIO] * len(audios or ())]
        drafts[0].pieces[:0] = [Place(kind=kind) for kind in kinds]
    conversation.check_learnable(drafts)
    arranged = {
        MediaKind.IMAGE: _arranged(MediaKind.IMAGE, images, drafts),
        MediaKind.AUDIO: _arranged(MediaKind.AUDIO, audios, drafts),
    }

    def segment(piece: Piece) -> Segment:
        if isinstance(piece, str):
            return Text(text=piece)
        reference = next(arranged[piece.kind])
        data = record.load(reference) if isinstance(reference, str) else reference
        return Image(data=data) if piece.kind is MediaKind.IMAGE else Audio(data=data)

    return Sample(
        turns=tuple(
            Turn(role=draft.role, segments=tuple(map(segment, draft.pieces)), learnt=draft.learnt, extra=draft.extra)
            for draft in drafts
        ),
        tools=tools_of(record.fields, spec),
    )


def _references(
    record: Record, key: str | None, keys: Sequence[str], extensions: frozenset[str], spec: MappingSpec
) -> tuple[str, tuple[_Reference, ...] | None]:
    """Return the field of one kind of media ("" for members), and the media's names or bytes (None if the field is null)."""
    found = key if key is not None else next((name for name in keys if name in record.fields), None)
    if found is None:
        return "", unused_media.members_of_kind(record, extensions, spec)
    if found not in record.fields:
        if found in record.members:
            return "", (found,)
        raise schema_error(found, "an image or a recording", "nothing of that name")
    value = record.fields[found]
    if value is None:
        return found, None
    return found, tuple(_reference(found, item) for item in (value if isinstance(value, list) else [value]))


def _reference(field: str, value: Any) -> _Reference:
    if isinstance(value, str | bytes):
        return value
    if not isinstance(value, dict) or "bytes" not in value:
        raise schema_error(field, "a name or {bytes, path}", value)
    if value["bytes"] is None:
        raise BadSampleError(Reason.MISSING_MEDIA, f"{field}: no bytes, only the path {value.get('path')!r}")
    if not isinstance(value["bytes"], bytes):
        raise schema_error(f"{field}.bytes", "bytes", value["bytes"])
    return value["bytes"]


def _text(record: Record, spec: MappingSpec) -> tuple[str, Any]:
    if spec.text is not None:
        if record.fields.get(spec.text) is None:
            raise schema_error(spec.text, "text", record.fields.get(spec.text))
        return spec.text, record.fields[spec.text]
    for key in _TEXT_KEYS:
        if record.fields.get(key) is not None:
            return key, record.fields[key]
    raise BadSampleError(
        Reason.SCHEMA_ERROR, f"none of {', '.join(_TEXT_KEYS)} is there, only {', '.join(record.fields) or 'nothing'}"
    )


def _arranged(kind: MediaKind, media: tuple[_Reference, ...] | None, drafts: list[Draft]) -> Iterator[_Reference]:
    """Return the media in the order of their places. Raises BadSampleError if places and media do not match."""
    places = [piece for draft in drafts for piece in draft.pieces if isinstance(piece, Place) and piece.kind is kind]
    indices = [place.index for place in places if place.index is not None]
    if media is None and places:
        raise BadSampleError(Reason.MISSING_MEDIA, f"{len(places)} {kind.value} placeholders, and null in the place of media")
    media = media or ()
    if not indices:
        if len(media) != len(places):
            raise BadSampleError(Reason.PLACEHOLDER_MISMATCH, f"{len(places)} {kind.value} placeholders for {len(media)} media")
        return iter(media)
    if len(indices) < len(places) or set(indices) != set(range(len(media))):
        raise BadSampleError(
            Reason.PLACEHOLDER_MISMATCH,
            f"{len(places)} {kind.value} parts with the indices {indices} for {len(media)} media: each part needs one, from "
            "0 on, and each medium a part",
        )
    return (media[index] for index in indices)
