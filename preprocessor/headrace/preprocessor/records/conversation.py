"""Parses the text of a record into turns with places for media; record_to_sample lists the shapes, told apart by value.

What a turn says in fields other than those of its shape must not get lost. A system prompt beside the turns becomes the first
turn, and a weight of 0 keeps an answer from being learnt. Tools, calls of them and thoughts are carried to the template
(template_fields). Media of single turns, a system prompt beside a document, and other names for a weight have no place in one,
and are refused by name unless the mapping lists them under `ignore`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records import unused_media
from headrace.preprocessor.records.template_fields import NAME, fields_of_turn, is_empty, no_place
from headrace.quarantine import BadSampleError, Reason

LIST_KEYS = ("texts", "conversations", "messages")
"""Record fields whose text must be a list, never a caption."""
_SYSTEM_FIELDS = ("system", "system_prompt")
_TOOL_FIELDS = ("tools", "functions")
_NOT_TAKEN = (
    "function_call", *_TOOL_FIELDS, *_SYSTEM_FIELDS, "refusal", "image", "images", "audio", "audios", "video", "videos",
)  # fmt: skip
"""Fields of a turn that no template has a place for."""
_WEIGHT_SYNONYMS = ("loss", "train", "loss_weight", "mask")
"""Other trainers' names for the weight of a turn. For some, a mask of 1 means that it is learnt, for others that it is not."""
_INLINE_MEDIA = ("image", "image_url", "audio", "audio_url", "input_audio", "url", "path", "bytes", "data")
"""Fields of a typed part that hold or name the medium itself, which is not supported."""


class Role(StrEnum):
    """The speaker of a turn. A caption or document is one turn with the role DOCUMENT, which has no speaker."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    DOCUMENT = "document"


class MediaKind(Enum):
    """The kind of a medium."""

    IMAGE = "image"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a medium in a turn's text."""

    kind: MediaKind
    index: int | None = None
    """Index in the record's list of media of that kind; None means the next one."""


Piece = str | Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A turn whose media are places, not yet loaded."""

    role: Role
    pieces: list[Piece]
    learnt: bool = True
    """Whether the turn is learnt, if its role is one whose words are learnt at all."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the turn's message for a template, such as `tool_calls` and `reasoning_content`."""

    @property
    def empty(self) -> bool:
        """Whether the turn has no medium, no text except white space, and no field beside them that says something."""
        return not self.extra.keys() - {NAME} and not any(isinstance(piece, Place) or piece.strip() for piece in self.pieces)


def parse_turns(key: str, value: Any, fields: Mapping[str, Any], spec: MappingSpec) -> list[Draft]:
    """Parse the text `value` of a record, which is under `key` beside the record's other `fields`, into turns.

    Raises BadSampleError with schema_error or unused_media.
    """
    turns = _turns_of(key, value, spec)
    is_document = bool(turns) and turns[0].role is Role.DOCUMENT
    for name in ("functions", *(("tools", *_SYSTEM_FIELDS) if is_document else ())):
        _check_nothing(name, fields.get(name), name, spec)
    for name in _SYSTEM_FIELDS:
        if turns and not is_document and fields.get(name) and name not in spec.ignore:
            _put_system_in_front(turns, name, _split(_string(name, fields[name]), spec))
    return turns


def check_learnable(turns: list[Draft]) -> None:
    """Raise BadSampleError with empty_sample if all turns are empty, none is to be learnt, or an answer to be learnt is empty."""
    if all(turn.empty for turn in turns):
        raise BadSampleError(Reason.EMPTY_SAMPLE, "no text and no media")
    if turns[0].role is Role.DOCUMENT:
        return
    for index, turn in enumerate(turns):
        if turn.role is Role.ASSISTANT and turn.learnt and turn.empty:
            raise BadSampleError(
                Reason.EMPTY_SAMPLE,
                f"turn {index} is an answer without a word, and would be learnt: leave it out, or weight it 0",
            )
    if not any(turn.role is Role.ASSISTANT and turn.learnt for turn in turns):
        raise BadSampleError(Reason.EMPTY_SAMPLE, "no turn of an assistant that is to be learnt, so nothing to learn")


def _turns_of(key: str, value: Any, spec: MappingSpec) -> list[Draft]:
    if isinstance(value, str) and key not in LIST_KEYS:
        return [Draft(role=Role.DOCUMENT, pieces=_split(value, spec))]
    if not isinstance(value, list):
        raise schema_error(key, "a list" if key in LIST_KEYS else "a string or a list", value)
    if all(isinstance(item, str) for item in value):
        return [Draft(role=Role.DOCUMENT, pieces=[piece for item in value for piece in _split(item, spec)])]
    return [turn for index, item in enumerate(value) for turn in _turns(f"{key}[{index}]", item, spec)]


def _turns(field: str, item: Any, spec: MappingSpec) -> list[Draft]:
    if not isinstance(item, dict):
        raise schema_error(field, "a turn like the others' or strings only", item)
    for name in _NOT_TAKEN:
        _check_nothing(f"{field}.{name}", item.get(name), name, spec)
    for names, read in _SHAPES.items():
        if item.keys() >= set(names):
            *others, last = read(field, item, spec)
            return [*others, replace(last, extra=fields_of_turn(field, item, spec))]
    raise schema_error(field, "{user, assistant}, {from, value} or {role, content}", f"the keys {', '.join(item) or '(none)'}")


def _check_nothing(field: str, value: Any, name: str, spec: MappingSpec) -> None:
    """Raise BadSampleError (schema_error) if a field without a place in a template has a value and is not ignored."""
    if not is_empty(value) and name not in spec.ignore:
        raise no_place(field, name)


def _put_system_in_front(turns: list[Draft], name: str, pieces: list[Piece]) -> None:
    if turns[0].role is not Role.SYSTEM:
        turns.insert(0, Draft(role=Role.SYSTEM, pieces=pieces))
    elif turns[0].pieces != pieces:
        raise BadSampleError(
            Reason.SCHEMA_ERROR,
            f"{name} and the first turn are two system turns: list {name!r} under the mapping's ignore, or mend it",
        )


def _pair(field: str, item: dict[str, Any], spec: MappingSpec) -> list[Draft]:
    user, assistant = (_split(_string(f"{field}.{name}", item[name]), spec) for name in ("user", "assistant"))
    return [
        Draft(role=Role.USER, pieces=user),
        Draft(role=Role.ASSISTANT, pieces=assistant, learnt=_learnt(field, item, Role.ASSISTANT, spec)),
    ]


def _conversation(field: str, item: dict[str, Any], spec: MappingSpec) -> list[Draft]:
    role = _role(f"{field}.from", item["from"], spec)
    pieces = _split(_string(f"{field}.value", item["value"]), spec)
    return [Draft(role=role, pieces=pieces, learnt=_learnt(field, item, role, spec))]


def _message(field: str, item: dict[str, Any], spec: MappingSpec) -> list[Draft]:
    role, content = _role(f"{field}.role", item["role"], spec), item["content"]
    if content is None and fields_of_turn(field, item, spec).keys() - {NAME}:
        content = ""  # calls of tools come without words
    if isinstance(content, list):
        pieces = [_part(f"{field}.content[{index}]", part) for index, part in enumerate(content)]
    else:
        pieces = _split(_string(f"{field}.content", content), spec)
    return [Draft(role=role, pieces=pieces, learnt=_learnt(field, item, role, spec))]


_SHAPES: dict[tuple[str, str], Callable[[str, dict[str, Any], MappingSpec], list[Draft]]] = {
    ("user", "assistant"): _pair,
    ("from", "value"): _conversation,
    ("role", "content"): _message,
}


def _learnt(field: str, item: dict[str, Any], role: Role, spec: MappingSpec) -> bool:
    """Return whether a turn is learnt, by OpenAI's `weight`, 0 or 1.

    Raises BadSampleError (schema_error) if another name for a weight asks for anything but what is done anyway.
    """
    for name in _WEIGHT_SYNONYMS:
        value = item.get(name)
        usual = (None,) if name == "mask" else (None, 1) if role is Role.ASSISTANT else (None, 0, 1)
        if value not in usual and name not in spec.ignore:
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                f"{field}.{name} is {repr(value)[:80]}, which is not followed: write a weight of 0 or 1 to say whether a turn is "
                f"learnt, and list {name!r} under the mapping's ignore",
            )
    weight = item.get("weight")
    if weight not in (None, 0, 1):
        raise schema_error(f"{field}.weight", "0 or 1", repr(weight))
    return weight != 0


def _part(field: str, part: Any) -> Piece:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return _string(f"{field}.text", part.get("text"))
    if kind not in ("image", "audio"):
        raise schema_error(field, "a part of type text, image or audio", part if kind is None else f"the type {kind!r}")
    for name in _INLINE_MEDIA:
        if part.get(name):
            raise BadSampleError(
                Reason.SCHEMA_ERROR, f"{field}.{name}: media inside of parts are not taken; list them in order under {kind}s"
            )
    index = part.get("index")
    if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
        raise schema_error(f"{field}.index", "a number from 0 on", str(index))
    return Place(kind=MediaKind(kind), index=index)


def _role(field: str, value: Any, spec: MappingSpec) -> Role:
    known = {
        **dict.fromkeys(spec.system_roles, Role.SYSTEM),
        **dict.fromkeys(spec.user_roles, Role.USER),
        **dict.fromkeys(spec.assistant_roles, Role.ASSISTANT),
    }
    known.setdefault("tool", Role.TOOL)
    role = known.get(_string(field, value))
    if role is None:
        raise BadSampleError(Reason.SCHEMA_ERROR, f"{field}: expected one of {', '.join(known)}, got {value!r}")
    return role


def _split(text: str, spec: MappingSpec) -> list[Piece]:
    """Cut text at its placeholders, without empty pieces. Raises BadSampleError for placeholders of other trainers."""
    unused_media.check_text(text, spec)
    places = {spec.image_placeholder: Place(kind=MediaKind.IMAGE), spec.audio_placeholder: Place(kind=MediaKind.AUDIO)}
    parts = re.split("(" + "|".join(map(re.escape, places)) + ")", text)
    return [places.get(part, part) for part in parts if part]


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise schema_error(field, "a string", value)
    return value


def schema_error(field: str, expected: str, got: Any) -> BadSampleError:
    """Return the error that a field has another shape than `expected`."""
    shown = got if isinstance(got, str) else "null" if got is None else type(got).__name__
    return BadSampleError(Reason.SCHEMA_ERROR, f"{field}: expected {expected}, got {str(shown)[:80]}")
