"""Finds what is learnt in a rendered conversation, for chat templates that do not mark it.

What the assistant says is what a template adds to the conversation before it and the head of an answer (the generation prompt):
exactly what the model will have to write from there. White space behind the token that ends an answer is not learnt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from headrace.quarantine import BadSampleError, Reason

Span = tuple[int, int]
"""Characters [start, stop) of a rendered text."""


class RenderTurns(Protocol):
    """Renders the first turns of a conversation."""

    def __call__(self, num_turns: int, *, add_generation_prompt: bool = False) -> str: ...


def derived_spans(
    text: str, answers: Sequence[int], num_turns: int, control: re.Pattern[str], render: RenderTurns
) -> list[Span]:
    """Return the span of each answer in the `text` of a whole conversation of `num_turns` turns.

    `answers` are indices of turns, `control` finds control tokens. Raises BadSampleError with schema_error if the conversation
    does not begin with what the template writes for an answer's prompt, and whatever `render` raises.
    """
    return [_span(text, answer, num_turns, control, render) for answer in answers]


def common_spans(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the characters that are in both lists."""
    both = ((max(start, begin), min(stop, end)) for start, stop in spans for begin, end in others)
    return [(start, stop) for start, stop in both if start < stop]


def _span(text: str, answer: int, num_turns: int, control: re.Pattern[str], render: RenderTurns) -> Span:
    prompt = render(answer, add_generation_prompt=True)
    if not text.startswith(prompt):
        raise _unknown(answer, "renders the turns before it in another way than with them")
    start = len(prompt)
    until = text if answer == num_turns - 1 else render(answer + 1)
    tokens = [match for match in control.finditer(until, start)] if until.startswith(prompt) else []
    if text.startswith(until):
        stop = len(until)
    else:
        # Some templates write the last answer otherwise, with its thoughts: then an answer ends with the same token as there.
        ends = [match.end() for match in control.finditer(text, start) if tokens and match[0] == tokens[-1][0]]
        count = sum(match[0] == tokens[-1][0] for match in tokens)
        if not count or len(ends) < count:
            raise _unknown(answer, "ends it in another way where turns follow")
        return start, ends[count - 1]
    if tokens and not until[tokens[-1].end() :].strip():
        stop = tokens[-1].end()
    if stop <= start:
        raise _unknown(answer, "adds nothing for it")
    return start, stop


def _unknown(answer: int, why: str) -> BadSampleError:
    return BadSampleError(
        Reason.SCHEMA_ERROR,
        f"turn {answer}: the chat template {why}, so that nobody can say what is to be learnt: put {{% generation %}} around it in "
        "the template, or weight the turn 0",
    )
