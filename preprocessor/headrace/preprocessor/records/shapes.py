"""The shapes that the text of a record has, told apart by their values; record_to_sample lists them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records import conversation, interleaved, key_path, learning, question_answer
from headrace.preprocessor.records.draft import Draft, MediaKind, Place
from headrace.preprocessor.records.media_lists import Listed
from headrace.preprocessor.records.record import Record, schema_error
from headrace.preprocessor.records.turn import Role
from headrace.quarantine import BadSampleError, Reason

_LIST_KEYS = ("texts", "conversations", "messages")
"""Names of fields whose text must be a list, in JSON if it is a string, and never a caption."""
_TURN_KEYS = ("conversations", "messages")
_TEXT_KEYS = (*_LIST_KEYS, "caption", "text", "txt")
_TRANSCRIPT_KEYS = ("transcription", "transcript", "sentence")
"""Names of fields that are the text of a recording or a scan, where there is nothing else and a medium beside it."""
_CAPTION_KEYS = ("caption", "captions", "text")
"""Names of fields in which a list is of alternatives, not of the parts of a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The text of a record as turns, whose media are not found yet."""

    turns: list[Draft]
    paths: tuple[str, ...]
    """Paths of what the turns are made of."""
    may_lead: bool
    """Whether media stand in front if no placeholder is there: so for captions and conversations, not for documents."""
    takes_images: bool = False
    """Whether the record's list of images is a part of the document already."""
    is_pair: bool = False
    """Whether it is a question and an answer in fields of their own."""

    def places(self, kind: MediaKind) -> Iterator[Place]:
        """The places of one kind of media, in order."""
        return (piece for turn in self.turns for piece in turn.pieces if isinstance(piece, Place) and piece.kind is kind)


def parse(record: Record, images: Listed | None, spec: MappingSpec, *, has_media: bool) -> Parsed:
    """Find the text of a record and parse it into turns.

    `images`: the record's list of them. `has_media`: whether it has media of any kind beside the text.
    Raises BadSampleError with schema_error or unused_media, or for media inside of the text what `medium_of` raises.
    """
    parsed = _parse(record, images, spec, has_media=has_media)
    if parsed.turns and parsed.turns[0].role is not Role.DOCUMENT:
        learning.check_no_verdict(record.fields, spec)
        if not parsed.is_pair:
            conversation.check_beside(record.fields, spec)
    conversation.add_system(parsed.turns, record.fields, spec)
    if spec.learn == "last":
        parsed.turns[:] = learning.only_last(parsed.turns)
    return parsed


def _parse(record: Record, images: Listed | None, spec: MappingSpec, *, has_media: bool) -> Parsed:
    fields = record.fields
    if spec.text is not None:
        try:
            value = key_path.find(fields, spec.text)
        except KeyError:
            value = None
        if value is None:
            raise schema_error(spec.text, "text", None)
        return _parse_text(spec.text, value, images, spec)
    if spec.question is None:
        _check_no_preference(record, spec)
        for key in _TEXT_KEYS:
            if fields.get(key) is not None and key not in spec.ignore:
                question_answer.check_answer_is_in(key, fields, spec)
                return _parse_text(key, fields[key], images, spec)
        if fields.get(interleaved.SENTENCES) is not None:
            paths = (interleaved.SENTENCES, interleaved.MATCHES)
            return Parsed(turns=[interleaved.match(fields, spec)], paths=paths, may_lead=False)
    if pair := question_answer.find_pair(fields, spec):
        return Parsed(turns=question_answer.parse_pair(fields, *pair, spec), paths=pair, may_lead=True, is_pair=True)
    given = [key for key in _TRANSCRIPT_KEYS if isinstance(fields.get(key), str) and key not in spec.ignore]
    if len(given) == 1 and has_media:
        return _parse_text(given[0], fields[given[0]], images, spec)
    raise BadSampleError(Reason.SCHEMA_ERROR, f"none of {', '.join(_TEXT_KEYS)} is there, only {', '.join(fields) or 'nothing'}")


def _parse_text(path: str, value: Any, images: Listed | None, spec: MappingSpec) -> Parsed:
    name = path.rsplit(".", 1)[-1]
    if isinstance(value, str) and name not in _LIST_KEYS:
        _check_no_list(path, value)
        return Parsed(turns=[interleaved.join([value], spec)], paths=(path,), may_lead=True)
    items = key_path.parse_json(value) if isinstance(value, str) else value
    if not isinstance(items, list):
        raise schema_error(path, "a list" if name in _LIST_KEYS else "a string or a list", value)
    if all(item is None or isinstance(item, str) for item in items):
        if name in _TURN_KEYS and items:
            raise schema_error(path, "turns that say who speaks", "strings")
        return _parse_document(path, items, images, spec)
    return Parsed(turns=conversation.parse_turns(path, items, spec), paths=(path,), may_lead=True)


def _check_no_list(path: str, value: str) -> None:
    """Raise BadSampleError (schema_error) if a text is a list in JSON, of turns or, for a caption, of captions."""
    items = key_path.parse_json(value) if value.lstrip().startswith("[") else None
    if not isinstance(items, list) or not items:
        return
    is_captions = path.rsplit(".", 1)[-1] == "caption" and all(isinstance(item, str) for item in items)
    if is_captions or all(isinstance(item, dict) for item in items):
        kind = "captions" if is_captions else "objects, not a text"
        raise BadSampleError(
            Reason.SCHEMA_ERROR,
            f"{path} is a list of {len(items)} {kind}, in JSON: name one, as in the mapping 'text: {path}.0', or write it under "
            "messages or conversations",
        )


def _parse_document(path: str, items: list[str | None], images: Listed | None, spec: MappingSpec) -> Parsed:
    if None in items or (images and None in (images.media or ())):
        document = interleaved.alternate(path, items, images, spec)
        return Parsed(turns=[document], paths=(path,), may_lead=False, takes_images=True)
    document = interleaved.join([item for item in items if item is not None], spec)
    name = path.rsplit(".", 1)[-1]
    if name in _CAPTION_KEYS and len(items) > 1 and not any(isinstance(piece, Place) for piece in document.pieces):
        raise BadSampleError(
            Reason.SCHEMA_ERROR, f"{path} is a list of {len(items)} captions: name one, as in the mapping 'text: {path}.0'"
        )
    return Parsed(turns=[document], paths=(path,), may_lead=len(items) == 1 and name not in _LIST_KEYS)


def _check_no_preference(record: Record, spec: MappingSpec) -> None:
    if all(record.fields.get(name) is not None and name not in spec.ignore for name in ("chosen", "rejected")):
        raise BadSampleError(
            Reason.SCHEMA_ERROR,
            "chosen and rejected are a preference between two answers, which is not trained on: to learn the chosen one, name it "
            "as the mapping's text if it is a conversation, or as its answer beside a question",
        )
