"""Conversations: lists of turns, each of which says in one of three ways who speaks and what.

What a turn says in fields other than those of its shape must not get lost. A system prompt beside the turns becomes the first
turn, a weight of 0 keeps an answer from being learnt, and thoughts become a part of it where the mapping says so. Tools, calls of
them and other thoughts are carried to the template. Media of single turns, and other names for a weight have no place in one, and
are refused by name unless the mapping lists them under `ignore`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records import learning
from headrace.preprocessor.records.draft import Draft, Piece, split
from headrace.preprocessor.records.record import is_absent, schema_error
from headrace.preprocessor.records.template_fields import NAME, THOUGHT_FIELDS, fields_of_turn, no_place
from headrace.preprocessor.records.turn import Role, Text
from headrace.preprocessor.records.typed_part import parse_part
from headrace.quarantine import BadSampleError, Reason

_SYSTEM_FIELDS = ("system", "system_prompt", "system_message")
_BESIDE = ("history", "instruction")
_TOOL_FIELDS = ("tools", "functions")
_NOT_TAKEN = frozenset((
    "function_call", *_TOOL_FIELDS, *_SYSTEM_FIELDS, "refusal", "image", "images", "audio", "audios", "video", "videos",
))  # fmt: skip
"""Fields of a turn that no template has a place for."""
_SHAPES = (("from", "value"), ("role", "content"))
"""Keys of a turn for who speaks, and for what is said. A question with its answer, `{user, assistant}`, is two turns."""


def parse_turns(field: str, items: list[Any], spec: MappingSpec) -> list[Draft]:
    """Parse a list of turns, which `field` names in errors. Raises BadSampleError."""
    return [turn for index, item in enumerate(items) for turn in _turns(f"{field}[{index}]", item, spec)]


def add_system(turns: list[Draft], fields: Mapping[str, Any], spec: MappingSpec) -> None:
    """Put the system prompt that stands beside the turns in front of them.

    Raises BadSampleError (schema_error) for one beside a document, for a second one, and for a list of tools beside a document.
    """
    if not turns:
        return
    is_document = turns[0].role is Role.DOCUMENT
    for name in ("functions", *(("tools", *_SYSTEM_FIELDS) if is_document else ())):
        _check_nothing(name, fields.get(name), name, spec)
    for name in _SYSTEM_FIELDS:
        if not is_document and fields.get(name) and name not in spec.ignore:
            _put_in_front(turns, name, split(string(name, fields[name]), spec))


def check_beside(fields: Mapping[str, Any], spec: MappingSpec) -> None:
    """Raise BadSampleError (schema_error) if a field beside the turns belongs to the conversation too."""
    for name in _BESIDE:
        _check_nothing(name, fields.get(name), name, spec)


def user_turn(field: str, text: Any, spec: MappingSpec) -> Draft:
    """Return the turn of a user who says `text`. Raises BadSampleError (schema_error) if that is no string."""
    return Draft(role=Role.USER, pieces=split(string(field, text), spec))


def string(field: str, value: Any) -> str:
    """Return `value`. Raises BadSampleError (schema_error) if it is no string."""
    if not isinstance(value, str):
        raise schema_error(field, "a string", value)
    return value


def answer_turn(field: str, value: Any, thought: str, spec: MappingSpec) -> Draft:
    """Return the turn of an assistant who says `value`, with a `thought` from a field of its own in front ("": none).

    Raises BadSampleError (schema_error) if `value` is neither a string nor a list of typed parts.
    """
    return Draft(role=Role.ASSISTANT, pieces=_content(field, value, Role.ASSISTANT, thought, spec))


def _turns(field: str, item: Any, spec: MappingSpec) -> list[Draft]:
    if not isinstance(item, dict):
        raise schema_error(field, "a turn like the others' or strings only", item)
    for name in item:
        if name in _NOT_TAKEN:
            _check_nothing(f"{field}.{name}", item[name], name, spec)
    if item.keys() >= {"user", "assistant"}:
        return [
            user_turn(f"{field}.user", item["user"], spec),
            _turn(field, item, Role.ASSISTANT, "assistant", spec),
        ]
    for speaker, said in _SHAPES:
        if speaker in item and (said in item or not is_absent(item.get("tool_calls"))):
            return [_turn(field, item, _role(f"{field}.{speaker}", item[speaker], spec), said, spec)]
    raise schema_error(field, "{user, assistant}, {from, value} or {role, content}", f"the keys {', '.join(item) or '(none)'}")


def _turn(field: str, item: Mapping[str, Any], role: Role, key: str, spec: MappingSpec) -> Draft:
    extra = fields_of_turn(field, item, spec)
    said = item.get(key)
    if said is None and extra.keys() - {NAME}:
        said = ""  # calls of tools come without words
    if role is Role.ASSISTANT:
        thought = learning.thought_of(f"{field}.", item, spec) if spec.thinking else ""  # else it is carried
        turn = answer_turn(f"{field}.{key}", said, thought, spec)
    else:
        for name in item:
            if name in THOUGHT_FIELDS:
                _check_nothing(f"{field}.{name}", item[name], name, spec)
        turn = Draft(role=role, pieces=_content(f"{field}.{key}", said, role, "", spec))
    weight = learning.weight_of(field, item, role, spec)
    return dataclasses.replace(turn, learnt=weight > 0, weight=weight or 1.0, extra=extra)


def _content(field: str, value: Any, role: Role, thought: str, spec: MappingSpec) -> list[Piece]:
    """Return what a turn says, as a string or as typed parts, whose text is never searched for placeholders."""
    thoughts = learning.thought_words(thought, spec)

    def words(name: str, text: str) -> learning.Words:
        told = role is Role.ASSISTANT
        return learning.answer_words(name, text, spec, has_thought=bool(thought)) if told else [(text, True)]

    if not isinstance(value, list):
        text = string(field, value)
        said = [*thoughts, *words(field, text.lstrip("\n") if thoughts else text)]
        return learning.as_one_string([piece for text, learnt in said for piece in split(text, spec, learnt=learnt)])
    pieces: list[Piece] = [Text(text=text, learnt=learnt) for text, learnt in thoughts]
    for index, item in enumerate(value):
        name = f"{field}[{index}]"
        part = parse_part(name, item, spec)
        if isinstance(part, str):
            texts = learning.as_one_string([Text(text=text, learnt=learnt) for text, learnt in words(name, part)])
            is_behind_thought = len(pieces) == len(thoughts) > 0
            pieces = learning.as_one_string([*pieces, *texts]) if is_behind_thought else [*pieces, *texts]
        else:
            pieces.append(part)
    return pieces


def _check_nothing(field: str, value: Any, name: str, spec: MappingSpec) -> None:
    """Raise BadSampleError (schema_error) if a field without a place in a template has a value and is not ignored."""
    if not is_absent(value) and name not in spec.ignore:
        raise no_place(field, name)


def _put_in_front(turns: list[Draft], name: str, pieces: list[Piece]) -> None:
    if turns[0].role is not Role.SYSTEM:
        turns.insert(0, Draft(role=Role.SYSTEM, pieces=pieces))
    elif turns[0].pieces != pieces:
        raise BadSampleError(
            Reason.SCHEMA_ERROR,
            f"{name} and the first turn are two system turns: list {name!r} under the mapping's ignore, or mend it",
        )


def _role(field: str, value: Any, spec: MappingSpec) -> Role:
    known = {
        **dict.fromkeys(spec.system_roles, Role.SYSTEM),
        **dict.fromkeys(spec.user_roles, Role.USER),
        **dict.fromkeys(spec.assistant_roles, Role.ASSISTANT),
    }
    known.setdefault("tool", Role.TOOL)
    role = known.get(string(field, value))
    if role is None:
        raise BadSampleError(Reason.SCHEMA_ERROR, f"{field}: expected one of {', '.join(known)}, got {value!r}")
    return role
