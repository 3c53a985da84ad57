"""Which words of a conversation are learnt: all answers or the last, by their weights, and with or without their thoughts.

Thoughts stand in an answer between `<think>` and `</think>`, or in a field of their own beside it. The mapping's `thinking` says
what becomes of them: `keep` learns them, `mask` leaves them where they are without learning them, `drop` takes them out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.draft import Draft, Piece
from headrace.preprocessor.records.record import is_absent, schema_error
from headrace.preprocessor.records.template_fields import THOUGHT_FIELDS, no_place
from headrace.preprocessor.records.turn import Role, Text
from headrace.quarantine import BadSampleError, Reason

_OTHER_WEIGHTS = ("train", "trainable", "loss", "loss_weight")
"""Other trainers' names for the `weight` of a turn, such as Axolotl's and ms-swift's."""
_WEIGHTS = (1e-6, 1e6)  # with room to the smallest and largest float32, which sums of losses stay within
_MASKS = ("mask", "masked", "loss_mask")
_VERDICTS = ("label", "kto_tag")
"""Fields of KTO's data, which say whether an answer is wanted or not."""
_BEGIN, _END = "<think>", "</think>"
_END_AND_BLANK = re.compile(r"</think>\s*")

Words = list[tuple[str, bool]]
"""Texts in order, each with whether it is learnt if its turn is."""


def weight_of(field: str, item: Mapping[str, Any], role: Role, spec: MappingSpec) -> float:
    """Return by how much the loss of a turn counts, by OpenAI's `weight` or another trainer's name for it; 0: it is not learnt.

    It is 0 or 1, false or true, or any number where the mapping has `weights`. Raises BadSampleError (schema_error) for any other
    weight, for two that differ, and for a `mask`: for some a 1 means that the turn is learnt, for others that it is not.
    """
    weights = {}
    if item.get("weight") is not None:
        weights["weight"] = item["weight"]
        if not _is_weight(item["weight"], spec):
            raise schema_error(f"{field}.weight", _rule(spec), repr(item["weight"])[:80])
    for name in (*_OTHER_WEIGHTS, *_MASKS):
        value = item.get(name)
        if value is None or name in spec.ignore:
            continue
        if name in _MASKS or not (_is_weight(value, spec) if name == "loss_weight" else value in (0, 1)):
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                f"{field}.{name} is {repr(value)[:80]}, which is not followed: write a weight of 0 or 1 to say whether a turn is "
                f"learnt, and list {name!r} under the mapping's ignore",
            )
        weights[name] = value
    if role is Role.ASSISTANT and len(set(weights.values())) > 1:
        raise BadSampleError(Reason.SCHEMA_ERROR, f"{field}: {' and '.join(weights)} differ: list one under the mapping's ignore")
    return float(min(weights.values(), default=1))


def _is_weight(value: Any, spec: MappingSpec) -> bool:
    if value in (0, 1):
        return True
    least, most = _WEIGHTS
    return spec.weights and isinstance(value, int | float) and least <= value <= most


def _rule(spec: MappingSpec) -> str:
    least, most = _WEIGHTS
    return (
        f"0 or a number from {least:g} to {most:g}"
        if spec.weights
        else "0 or 1 (other numbers need `weights: true` in the mapping)"
    )


def thought_of(prefix: str, item: Mapping[str, Any], spec: MappingSpec) -> str:
    """Return the thoughts that an object has in a field of their own, beside its answer; "" if it has none.

    Raises BadSampleError (schema_error) if the mapping does not say what becomes of them, they are no text, or fields differ.
    """
    names = [name for name in item if name in THOUGHT_FIELDS and name not in spec.ignore]
    given = {name: item[name] for name in names if not is_absent(item[name])}
    for name, value in given.items():
        if spec.thinking is None:
            raise no_place(f"{prefix}{name}", name)
        if not isinstance(value, str):
            raise schema_error(f"{prefix}{name}", "a string", value)
    if len(set(given.values())) > 1:
        raise BadSampleError(
            Reason.SCHEMA_ERROR, f"{' and '.join(prefix + name for name in given)} differ: list one under the mapping's ignore"
        )
    return next(iter(given.values()), "")


def thought_words(thought: str, spec: MappingSpec) -> Words:
    """Return what a thought from a field of its own puts in front of the answer, written as Qwen3 and DeepSeek write it."""
    return _kept([(f"{_BEGIN}\n{thought.strip(chr(10))}\n{_END}\n\n", False)], spec) if thought else []


def answer_words(field: str, text: str, spec: MappingSpec, *, has_thought: bool) -> Words:
    """Cut an answer into thoughts and what is said, as far as the mapping wants them told apart.

    The white space behind a thought belongs to it. `has_thought`: whether the thoughts have been found beside the answer
    already. Raises BadSampleError (schema_error) if they are in it too, or cannot be told apart.
    """
    if has_thought and (_BEGIN in text or _END in text):
        raise BadSampleError(
            Reason.SCHEMA_ERROR, f"{field} has thoughts in a field of its own and in its text: one of them is to be taken out"
        )
    return [(text, True)] if spec.thinking in (None, "keep") else _kept(_cut(field, text), spec)


def as_one_string(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces of one string, in which a text behind a text goes on."""
    behind_text = [False, *(isinstance(piece, Text) for piece in pieces)]
    return [
        dataclasses.replace(piece, goes_on=True) if goes_on and isinstance(piece, Text) else piece
        for piece, goes_on in zip(pieces, behind_text, strict=False)
    ]


def _kept(words: Words, spec: MappingSpec) -> Words:
    """Return words, in which thoughts are those not learnt, as `thinking` has it."""
    if spec.thinking == "drop":
        return [(text, learnt) for text, learnt in words if learnt]
    return [(text, learnt or spec.thinking == "keep") for text, learnt in words]


def _cut(field: str, text: str) -> Words:
    words: Words = []
    position = 0
    while (start := text.find(_BEGIN, position)) >= 0:
        end = _END_AND_BLANK.search(text, start)
        if end is None or _BEGIN in text[start + len(_BEGIN) : end.start()]:
            raise _unpaired(field)
        words += [(text[position:start], True), (text[start : end.end()], False)]
        position = end.end()
    words.append((text[position:], True))
    if any(_END in part for part, learnt in words if learnt):
        raise _unpaired(field)
    return words


def _unpaired(field: str) -> BadSampleError:
    return BadSampleError(
        Reason.SCHEMA_ERROR, f"{field}: {_BEGIN} and {_END} do not pair, so that the thought cannot be told from the answer"
    )


def only_last(turns: list[Draft]) -> list[Draft]:
    """Return the turns with all answers as context but the last."""
    last = max((index for index, turn in enumerate(turns) if turn.role is Role.ASSISTANT), default=-1)
    return [
        dataclasses.replace(turn, learnt=turn.learnt and (index == last or turn.role is not Role.ASSISTANT))
        for index, turn in enumerate(turns)
    ]


def check_no_verdict(fields: Mapping[str, Any], spec: MappingSpec) -> None:
    """Raise BadSampleError (schema_error) if a field says whether the record's answer is a good one, as for KTO."""
    for name in _VERDICTS:
        value = fields.get(name)
        if name not in spec.ignore and (isinstance(value, bool) or str(value).lower() in ("true", "false", "0", "1")):
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                f"{name} says whether the answer is a good one, which is not followed: keep the good ones, and list {name!r} "
                "under the mapping's ignore",
            )


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
