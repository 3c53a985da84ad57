"""Rows with a question and its answer in fields of their own, which are a turn of the user and one of the assistant.

    {"question": "...", "answer": "..."}        also query, prompt, problem, and response, completion, output, solution
    {"question": "...", "answers": ["...", ...]}             the first answer; `multiple_choice_answer` beside it goes before it
    {"instruction": "...", "input": "...", "output": "..."}  the input (or `context`) is in a line behind the instruction
    {"prompt": [MESSAGE, ...], "completion": [MESSAGE, ...]} messages, of which those of the completion are learnt

What a question may need and nothing uses (a context, choices) is refused by name, as are rows in which several fields ask or
answer: the mapping's `question` and `answer` name two, or its `ignore` the others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records import conversation, key_path, learning
from headrace.preprocessor.records.draft import Draft
from headrace.preprocessor.records.record import is_absent, schema_error
from headrace.quarantine import BadSampleError, Reason

_ASKING = ("question", "query", "prompt", "instruction", "problem")
_ANSWERING = ("answer", "answers", "response", "completion", "output", "solution")
_CHOSEN_ANSWER = "multiple_choice_answer"  # the one of VQA's ten `answers` that most people gave
_OF_INSTRUCTION = ("input", "context")
"""Fields of Alpaca and Dolly that stand in a line of their own behind the instruction."""
_NEEDED = (
    *_OF_INSTRUCTION, "contexts", "passage", "passages", "paragraph", "article", "document", "documents", "story", "table",
    "evidence", "history", "dialog", "dialogue", "choices", "options", "hint", "mc_options", "candidates", "ctx", "background",
)  # fmt: skip
"""Fields without which a question may not be understood."""

_CHOICE = re.compile(r"[A-F]|op(?:tion)?_?(?:[a-fA-F]|[0-9])|choice_?(?:[a-fA-F]|[0-9])|sol[0-9]|ending_?[0-9]")
"""Names of fields that hold one of several answers to choose from, as in MMBench, MedMCQA, PIQA and HellaSwag."""


def find_pair(fields: Mapping[str, Any], spec: MappingSpec) -> tuple[str, str] | None:
    """Return the paths of the question and the answer, which the mapping names or which are usual; None if there is no pair.

    Raises BadSampleError (schema_error) if several fields ask or answer.
    """
    if spec.question is not None and spec.answer is not None:
        return spec.question, spec.answer
    asking, answering = ([name for name in names if _is_given(name, fields, spec)] for names in (_ASKING, _ANSWERING))
    if _is_given(_CHOSEN_ANSWER, fields, spec):
        answering = [_CHOSEN_ANSWER]
    if not asking or not answering:
        return None
    for what, names in (("asks", asking), ("answers", answering)):
        if len(names) > 1:
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                f"nothing says which of {', '.join(names)} {what}: name it in the mapping's question or answer, or list others "
                "under its ignore",
            )
    return asking[0], answering[0]


def parse_pair(fields: Mapping[str, Any], question: str, answer: str, spec: MappingSpec) -> list[Draft]:
    """Return the turns of a question and an answer at these paths. Raises BadSampleError (schema_error)."""
    asked, answered = _value(fields, question), _value(fields, answer)
    used = {key_path.field_of(fields, path) for path in (question, answer)}
    more = _more(question, fields, spec)
    used.update(more)
    choices = [name for name in fields if _CHOICE.fullmatch(name)]
    for name in (*_NEEDED, *(choices if len(choices) > 1 else ())):
        if name not in used and _is_given(name, fields, spec):
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                f"{question} may not be understood without {name}, which nothing uses: write it into the question, or list "
                f"{name!r} under the mapping's ignore",
            )
    if isinstance(asked, list) and isinstance(answered, list):
        context = conversation.parse_turns(question, asked, spec)
        return [
            *(dataclasses.replace(turn, learnt=False) for turn in context),
            *conversation.parse_turns(answer, answered, spec),
        ]
    if more:
        asked = "\n".join(conversation.string(name, value) for name, value in {question: asked, **more}.items())
    thought = learning.thought_of("", fields, spec)
    return [
        conversation.user_turn(question, asked, spec),
        conversation.answer_turn(answer, _one(answer, answered), thought, spec),
    ]


def check_answer_is_in(text: str, fields: Mapping[str, Any], spec: MappingSpec) -> None:
    """Raise BadSampleError (schema_error) if the field `text` is a string beside a question and its answer, and has not both.

    Alpaca's `text` is the question and the answer once more; any other text would train without them.
    """
    asking, answering = ([name for name in names if _is_given(name, fields, spec)] for names in (_ASKING, _ANSWERING))
    if not isinstance(fields[text], str) or not asking or not answering:
        return
    asked, answered = ([fields[name] for name in names if isinstance(fields[name], str)] for names in (asking, answering))
    if not all(any(said.strip() in fields[text] for said in some) for some in (asked, answered)):
        raise BadSampleError(
            Reason.SCHEMA_ERROR,
            f"nothing says whether {text} is learnt or {answering[0]}, the answer to {asking[0]}: name {text!r} as the mapping's "
            f"text, or list it under its ignore",
        )


def _is_given(name: str, fields: Mapping[str, Any], spec: MappingSpec) -> bool:
    return not is_absent(fields.get(name)) and name not in spec.ignore


def _more(question: str, fields: Mapping[str, Any], spec: MappingSpec) -> dict[str, Any]:
    """Return the field that belongs to an instruction; nothing for other questions, and where several may."""
    given = {name: fields[name] for name in _OF_INSTRUCTION if _is_given(name, fields, spec)}
    return given if question == "instruction" and len(given) == 1 else {}


def _value(fields: Mapping[str, Any], path: str) -> Any:
    try:
        return key_path.find(fields, path)
    except KeyError as err:
        raise schema_error(path, "text", "nothing of that name") from err


def _one(field: str, answered: Any) -> str:
    """Return the answer; the first of a list under `answers`, where they are strings or objects with an `answer`."""
    if isinstance(answered, list) and answered and field == "answers":
        first = answered[0]
        return conversation.string("answers[0]", first.get("answer") if isinstance(first, Mapping) else first)
    if isinstance(answered, list):
        raise schema_error(field, f"one answer (the mapping can name it: 'answer: {field}.0')", answered)
    return conversation.string(field, answered)
