"""Where the tokens of images and recordings go in what a chat template writes.

A template writes a short placeholder for a medium, and the model's processor puts as many tokens in its place as the medium
has: mostly the placeholder itself, repeated. EXPANSIONS has the published exceptions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import SpecError
from headrace.preprocessor.text import TextEncoder
from headrace.preprocessor.text.media_markup import Markup
from headrace.preprocessor.text.templates.gemma import GEMMA3
from headrace.preprocessor.text.templates.pixtral import PIXTRAL
from headrace.preprocessor.text.templates.smolvlm import SMOLVLM

Render = Callable[[list[dict[str, object]]], str | None]
"""Renders a user's message with this content, and an answer to it; None if the template refuses it."""

TOKENS = {
    "image": ("<|image_pad|>", "<image>", "<|image|>", "<IMG_CONTEXT>", "[IMG]", "<image_soft_token>", "<start_of_image>"),
    "audio": ("<|audio_pad|>", "<|AUDIO|>", "<audio>", "<|audio|>", "[AUDIO]", "<audio_soft_token>"),
}
"""Published placeholders, by the kind of the medium."""

EXPANSIONS = {
    "<start_of_image>": GEMMA3.image,
    "<IMG_CONTEXT>": Markup(before="<img>", token="<IMG_CONTEXT>", behind="</img>"),  # InternVL, whose template ends the line
    "[IMG]": PIXTRAL.image,
    "<image>": SMOLVLM.image,
}
"""What takes the place of what a template writes, where the tokenizer has the control tokens in it."""

_BEFORE, _BEHIND = "before", "behind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """The placeholder of one kind of media."""

    written: str
    """Name of the control token that the template writes."""
    markup: Markup
    """What takes its place."""
    head: str
    """What the template writes around the placeholder between two texts, in front of it and behind it; for documents."""
    tail: str


def find_placeholder(kind: str, render: Render, encoder: TextEncoder, named: str) -> Placeholder | None:
    """Return the placeholder of images (`kind`: image) or recordings (audio); None if the template has none that is known.

    `named` is the token that the job names, or "". Raises SpecError if the template does not write that.
    """
    texts: list[dict[str, object]] = [{"type": "text", "text": _BEFORE}, {"type": "text", "text": _BEHIND}]
    without, between = render(texts), render([texts[0], {"type": kind}, texts[1]])
    tokens = [] if without is None or between is None else _tokens(between, without, encoder)
    options = [option for token in tokens for option in _options(token, encoder)]
    if named:
        chosen = next((option for option in options if named in (option[0], option[1].token)), None)
        if chosen is None:
            said = ", ".join(tokens) or "nothing"
            raise SpecError(f"text.{kind}_token: for a part of type {kind} the chat template writes {said}, not {named}")
    else:
        known = [option for option in options if option[0] in TOKENS[kind]]
        chosen = known[0] if known else options[0] if len(tokens) == 1 else None
    if chosen is None or between is None:
        return None
    written, markup = chosen
    head, tail = _around(between, written)
    return Placeholder(written=written, markup=markup, head=head, tail=tail)


def _options(token: str, encoder: TextEncoder) -> list[tuple[str, Markup]]:
    """Return a written token with what may take its place with this tokenizer, the likeliest first."""
    published = EXPANSIONS.get(token)
    return [*([(token, published)] if published and _has_all(encoder, published) else []), (token, Markup(token=token))]


def _has_all(encoder: TextEncoder, markup: Markup) -> bool:
    left = markup.before + markup.token + markup.row_break + markup.behind
    for token in sorted(encoder.control, key=len, reverse=True):
        left = left.replace(token, "")
    return not left.strip()


def _tokens(between: str, without: str, encoder: TextEncoder) -> list[str]:
    """Return the control tokens that stand more often in one rendering than in the other."""
    more = Counter({token: between.count(token) - without.count(token) for token in encoder.control})
    return [token for token in +more if token]


def _around(text: str, written: str) -> tuple[str, str]:
    """Return what stands around the placeholder between the two texts; nothing where it is not between them."""
    _, found, rest = text.partition(_BEFORE)
    markup, behind, _ = rest.partition(_BEHIND)
    head, at, tail = markup.partition(written)
    return (head, tail) if found and behind and at else ("", "")
