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


def derived_spans(text: str, answers: Sequence[int], num_turns: int, control: re.Pattern[str], render: RenderTurns) -> list[Span]:
    """Return the span of each answer in the `text` of a whole conversation of `num_turns` turns.

    `answers` are indices of turns, `control` finds control tokens. Raises BadSampleError with schema_error if the turns before
    an answer are not rendered as in its prompt, and whatever `render` raises.
    """
    return [_span(text, answer, num_turns, control, render) for answer in answers]


def common_spans(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the characters that are in both lists."""
    both = ((max(start, begin), min(stop, end)) for start, stop in spans for begin, end in others)
    return [(start, stop) for start, stop in both if start < stop]


def _span(text: str, answer: int, num_turns: int, control: re.Pattern[str], render: RenderTurns) -> Span:
    prompt = render(answer, add_generation_prompt=True)
    start = len(prompt) if text.startswith(prompt) else _departure(text, answer, prompt, control, render)
    until = text if answer == num_turns - 1 else render(answer + 1)
    tokens = list(control.finditer(until, start)) if until.startswith(text[:start]) else []
    if text.startswith(until):
        stop = len(until)
        if tokens and not until[tokens[-1].end() :].strip():
            stop = tokens[-1].end()
    else:
        stop = _end(text, answer, start, [token[0] for token in tokens], control)
    if stop <= start:
        raise _unknown(answer, "adds nothing for it")
    return start, stop


def _departure(text: str, answer: int, prompt: str, control: re.Pattern[str], render: RenderTurns) -> int:
    """Return where an answer begins whose opening is not the one of its prompt, as where that opens a thought.

    It begins behind the last control token or the last line break that both have behind the turns before it.
    """
    context = render(answer)
    if not (text.startswith(context) and prompt.startswith(context)):
        raise _unknown(answer, "renders the turns before it in another way than with them")
    common = next((place for place, (ours, asked) in enumerate(zip(text, prompt, strict=False)) if ours != asked), len(text))
    ends = [match.end() for match in control.finditer(prompt, len(context)) if match.end() <= common]
    ends.append(prompt.rfind("\n", len(context), common) + 1)
    if max(ends) <= len(context):
        raise _unknown(answer, "renders it without the head that its prompt has")
    return max(ends)


def _end(text: str, answer: int, start: int, tokens: Sequence[str], control: re.Pattern[str]) -> int:
    """Return the end of an answer that the template writes otherwise where it is the last one, there with these control tokens.

    It ends with the same token as there, or where there is none, in front of the next turn's first one.
    """
    matches = list(control.finditer(text, start))
    if not tokens:
        return matches[0].start() if matches else len(text)
    ends = [match.end() for match in matches if match[0] == tokens[-1]]
    if len(ends) < tokens.count(tokens[-1]):
        raise _unknown(answer, "ends it in another way where turns follow")
    return ends[tokens.count(tokens[-1]) - 1]


def _unknown(answer: int, why: str) -> BadSampleError:
    return BadSampleError(
        Reason.SCHEMA_ERROR,
        f"turn {answer}: the chat template {why}, so that nobody can say what is to be learnt: put {{% generation %}} around it "
        "in the template, or weight the turn 0",
    )
