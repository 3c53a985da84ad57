"""A sample as the LLM gets it, and how it is built up: text in pieces, control tokens, media.

Each label is at the position of its own token (the model predicts label i from the tokens before i); the first token of a
sequence has nothing before it, so its label is ignored.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.manifest import Vocabulary
from headrace.preprocessor.records.draft import MediaKind
from headrace.preprocessor.records.record_to_sample import Sample, Text
from headrace.preprocessor.text import TextEncoder
from headrace.preprocessor.text.media_markup import MediumTokens
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import LABEL_IGNORED
from headrace.text_spec import TooLong

NO_TOKEN = -1
"""The id given for a placeholder that a template does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """A sample as the LLM gets it: token ids and labels, two int32 arrays of equal length."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    num_disarmed: int
    """Number of times that the sample's own text has the name of a special token, which is text there."""
    images: range
    """Which of the sample's images, by their place among them, the sequence has; those that a cut has taken away are missing."""
    recordings: range
    is_truncated: bool = False
    """Whether the sample had more tokens than a sequence may have, and was cut."""
    target_weights: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """By how much the loss of each token counts, 0 where its label is ignored; empty: that of each target counts 1."""

    @property
    def num_targets(self) -> int:
        """Number of tokens that carry loss."""
        return int(np.count_nonzero(self.labels != LABEL_IGNORED))

    @property
    def target_weight(self) -> float | None:
        """Sum of the weights of the tokens that carry loss; None: each weighs 1."""
        return float(self.target_weights.sum(dtype=np.float64)) if len(self.target_weights) else None


class PromptTemplate(ABC):
    """What makes the token sequence of a sample. Stateless and thread-safe."""

    encoder: TextEncoder
    vocabulary: Vocabulary
    """Size of the vocabulary and ids of the placeholders; NO_TOKEN for a kind of media that the template takes none of."""

    @abstractmethod
    def render(self, sample: Sample, media_tokens: Sequence[MediumTokens]) -> TokenSequence:
        """Render a sample to token ids and labels; `media_tokens` are the tokens of each medium, in order.

        Raises BadSampleError.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Text between two control tokens, with the spans of characters that are learnt, each with its weight in the loss."""

    text: str
    learnt: list[tuple[int, int, float]]
    inner: bool
    """Whether a control token stands before the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A control token, so many times."""

    token: int
    count: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """What a cut takes as a whole, if it is a medium: its control tokens and what is between them. Other units have one item."""

    kind: MediaKind | None = None
    items: list[_Words | _Run] = field(default_factory=list)

    def is_token_in(self, tokens: Collection[int]) -> bool:
        """Whether the unit is no medium, and one of these control tokens."""
        return self.kind is None and any(isinstance(item, _Run) and item.token in tokens for item in self.items)


_Tokens = tuple["array[int]", "array[int]", "array[float]"]
"""Ids and labels, of equal length; the weights of these in the loss, or none where they all weigh 1."""


class SequenceBuilder:
    """A sequence under construction. Text is buffered until a control token ends it, and becomes tokens in `finish`.

    What is added says its `loss`: by how much the loss of its tokens counts, 0 (or False) if it is not learnt.
    """

    def __init__(self, encoder: TextEncoder, max_tokens: int, too_long: TooLong) -> None:
        """`too_long`: what becomes of a sequence of more than `max_tokens` tokens."""
        self._encoder = encoder
        self._max_tokens = max_tokens
        self._too_long = too_long
        self._units: list[_Unit] = []
        self._medium: _Unit | None = None  # the medium that is being added
        self._opening: Collection[int] = ()  # control tokens that belong to that medium if they stand right before it
        self._closing: Collection[int] = ()  # those that belong to the medium which has just been added if they follow now
        self._text: list[str] = []
        self._text_length = 0
        self._learnt: list[tuple[int, int, float]] = []  # spans of the buffered text
        self._is_weighted = False  # whether something is learnt with another weight than 1
        self._inner = False  # whether a control token stands before the buffered text

    def begin(self, pieces: Iterable[str | int]) -> None:
        """Add what tokenizers put in front of a text; what follows still counts as the beginning of the text."""
        self.add(pieces, loss=False)
        self._inner = False

    def add(self, pieces: Iterable[str | int], *, loss: float) -> None:
        for piece in pieces:
            if isinstance(piece, int):
                self.add_control(piece, loss=loss)
                continue
            if loss:
                self._learnt.append((self._text_length, self._text_length + len(piece), loss))
                self._is_weighted |= loss != 1
            self._text.append(piece)
            self._text_length += len(piece)

    def add_control(self, token: int, *, count: int = 1, loss: float) -> None:
        self._is_weighted |= loss not in (0, 1)
        self._end_text()
        self._inner = True
        self._put(_Run(token=token, count=count, loss=loss))

    @contextlib.contextmanager
    def medium(self, kind: MediaKind, opening: Collection[int] = (), closing: Collection[int] = ()) -> Iterator[None]:
        """Take the control tokens added in the block, and the text between them, for one medium, which is never cut in two.

        So do control tokens in `opening` right before and in `closing` right behind it. Text in front of the first token and
        behind the last one is tokenised together with the text beside the medium.
        """
        self._medium, self._opening = _Unit(kind=kind), opening
        yield
        self._medium, self._closing = None, closing

    def finish(self, *, num_disarmed: int) -> TokenSequence:
        """Return the sequence. Raises BadSampleError (too_long) if it is too long, or has nothing to learn when it is cut."""
        self._end_text()
        at_start = self._too_long == "truncate_start"
        parts: list[_Tokens] = []
        room, kept, is_truncated = self._max_tokens, dict.fromkeys(MediaKind, 0), False
        for unit in reversed(self._units) if at_start else self._units:
            ids, labels, weights = self._tokens(unit)
            if is_truncated := len(ids) > room:
                if self._too_long == "refuse":
                    raise BadSampleError(Reason.TOO_LONG, f"more than {self._max_tokens} tokens")
                within = slice(len(ids) - room, None) if at_start else slice(room)
                parts += [(ids[within], labels[within], weights[within])] if unit.kind is None else []
                break
            parts.append((ids, labels, weights))
            room -= len(ids)
            if unit.kind is not None:
                kept[unit.kind] += 1
        input_ids, labels, weights = array("i"), array("i"), array("f")
        for part in reversed(parts) if at_start else parts:
            input_ids += part[0]
            labels += part[1]
            weights += part[2]
        if labels:
            labels[0] = LABEL_IGNORED
        if weights:
            weights[0] = 0.0
        if is_truncated and labels.count(LABEL_IGNORED) == len(labels):
            side = "last" if at_start else "first"
            raise BadSampleError(Reason.TOO_LONG, f"nothing to learn is within the {side} {self._max_tokens} tokens")
        images, recordings = (self._kept(kind, kept[kind], at_start=at_start) for kind in (MediaKind.IMAGE, MediaKind.AUDIO))
        return TokenSequence(
            input_ids=np.frombuffer(input_ids, np.int32),
            labels=np.frombuffer(labels, np.int32),
            num_disarmed=num_disarmed,
            images=images,
            recordings=recordings,
            is_truncated=is_truncated,
            target_weights=np.frombuffer(weights, np.float32),
        )

    def _kept(self, kind: MediaKind, count: int, *, at_start: bool) -> range:
        """Return the places, among the media of a kind, of the `count` ones that a cut has left."""
        total = sum(unit.kind is kind for unit in self._units)
        return range(total - count, total) if at_start else range(count)

    def _end_text(self) -> None:
        if self._text_length:
            self._put(_Words(text="".join(self._text), learnt=self._learnt, inner=self._inner))
            self._text, self._text_length, self._learnt = [], 0, []

    def _put(self, item: _Words | _Run) -> None:
        medium, closing = self._medium, self._closing
        if medium is None and isinstance(item, _Run) and item.token in closing:
            self._units[-1].items.append(item)
            return
        self._closing = ()
        if medium is None or (isinstance(item, _Words) and not medium.items):
            self._units.append(_Unit(items=[item]))
            return
        if not medium.items:
            while self._units and self._units[-1].is_token_in(self._opening):
                medium.items[:0] = self._units.pop().items
            self._units.append(medium)
        medium.items.append(item)

    def _tokens(self, unit: _Unit) -> _Tokens:
        """Return the tokens of a unit. Raises BadSampleError as `encode_spans` does."""
        ids, labels, weights = array("i"), array("i"), array("f")
        for item in unit.items:
            if isinstance(item, _Run):
                ids += array("i", [item.token]) * item.count
                labels += array("i", [item.token if item.loss else LABEL_IGNORED]) * item.count
                weights += array("f", [item.loss]) * (item.count * self._is_weighted)
                continue
            words = item if self._too_long == "refuse" else self._shortened(item)
            spans = [(start, stop) for start, stop, _ in words.learnt]
            encoded, learnt = self._encoder.encode_spans(words.text, spans, self._max_tokens, inner=words.inner)
            tokens, of_words = array("i", encoded), array("i", [LABEL_IGNORED]) * len(encoded)
            for span in learnt:
                of_words[span.start : span.stop] = tokens[span.start : span.stop]
            ids += tokens
            labels += of_words
            if self._is_weighted:
                weights += _weights([loss for *_, loss in words.learnt], learnt, len(tokens))
        return ids, labels, weights

    def _shortened(self, words: _Words) -> _Words:
        """Return words without what a cut takes away in any case, so that tokenising takes bounded time."""
        most = self._max_tokens * self._encoder.longest
        begin = max(0, len(words.text) - most) if self._too_long == "truncate_start" else 0
        end = begin + most
        learnt = [
            (max(start, begin) - begin, min(stop, end) - begin, loss)
            for start, stop, loss in words.learnt
            if start < end and stop > begin
        ]
        return _Words(text=words.text[begin:end], learnt=learnt, inner=words.inner)


def _weights(losses: Sequence[float], spans: Sequence[range], num_tokens: int) -> array[float]:
    """Return the weights of words of so many tokens, of which these spans are learnt with these weights."""
    weights = array("f", bytes(4 * num_tokens))
    for loss, span in zip(losses, spans, strict=True):
        weights[span.start : span.stop] = array("f", [loss]) * len(span)
    return weights


def count_disarmed(sample: Sample, encoder: TextEncoder) -> int:
    """Return how often the words of a sample have the name of a special token, which is text there."""
    texts = (segment.text for segment in sample.segments if isinstance(segment, Text))
    return sum(1 for text in texts for _ in encoder.disarmed.finditer(text))
