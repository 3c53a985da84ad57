"""A sample as the LLM gets it, and how it is built up: text in pieces, control tokens, media.

Each label is at the position of its own token (the model predicts label i from the tokens before i); the first token of a
sequence has nothing before it, so its label is ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.manifest import Vocabulary
from headrace.preprocessor.records.record_to_sample import Sample, Text
from headrace.preprocessor.text import TextEncoder
from headrace.preprocessor.text.media_markup import MediumTokens
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import LABEL_IGNORED

NO_TOKEN = -1
"""The id given for a placeholder that a template does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """A sample as the LLM gets it: token ids and labels, two int32 arrays of equal length."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    num_disarmed: int = 0
    """Number of times that the sample's own text has the name of a special token, which is text there."""

    @property
    def num_targets(self) -> int:
        """Number of tokens that carry loss."""
        return int(np.count_nonzero(self.labels != LABEL_IGNORED))


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


class SequenceBuilder:
    """Ids and labels of a sequence under construction, up to a limit. Text is buffered until a control token ends it."""

    def __init__(self, encoder: TextEncoder, max_tokens: int) -> None:
        self._encoder = encoder
        self._max_tokens = max_tokens
        self._ids, self._labels = array("i"), array("i")
        self._text: list[str] = []
        self._text_length = 0
        self._learnt: list[tuple[int, int]] = []  # spans of the buffered text
        self._inner = False  # whether a control token stands before the buffered text

    def begin(self, pieces: Iterable[str | int]) -> None:
        """Add what tokenizers put in front of a text; what follows still counts as the beginning of the text."""
        self.add(pieces, loss=False)
        self._inner = False

    def add(self, pieces: Iterable[str | int], *, loss: bool) -> None:
        for piece in pieces:
            if isinstance(piece, int):
                self.add_control(piece, loss=loss)
                continue
            if loss:
                self._learnt.append((self._text_length, self._text_length + len(piece)))
            self._text.append(piece)
            self._text_length += len(piece)

    def add_control(self, token: int, *, count: int = 1, loss: bool) -> None:
        self._encode_text()
        self._inner = True
        self._append(array("i", [token]) * count, array("i", [token if loss else LABEL_IGNORED]) * count)

    def finish(self, *, num_disarmed: int) -> TokenSequence:
        self._encode_text()
        self._labels[0] = LABEL_IGNORED
        return TokenSequence(
            input_ids=np.frombuffer(self._ids, np.int32),
            labels=np.frombuffer(self._labels, np.int32),
            num_disarmed=num_disarmed,
        )

    def _encode_text(self) -> None:
        if not self._text_length:
            return
        ids, learnt = self._encoder.encode_spans("".join(self._text), self._learnt, self._max_tokens, inner=self._inner)
        tokens = array("i", ids)
        labels = array("i", [LABEL_IGNORED]) * len(ids)
        for span in learnt:
            labels[span.start : span.stop] = tokens[span.start : span.stop]
        self._append(tokens, labels)
        self._text, self._text_length, self._learnt = [], 0, []

    def _append(self, ids: array[int], labels: array[int]) -> None:
        self._ids += ids
        self._labels += labels
        if len(self._ids) > self._max_tokens:
            raise BadSampleError(Reason.TOO_LONG, f"more than {self._max_tokens} tokens")


def count_disarmed(sample: Sample, encoder: TextEncoder) -> int:
    """Return how often the words of a sample have the name of a special token, which is text there."""
    texts = (segment.text for segment in sample.segments if isinstance(segment, Text))
    return sum(1 for text in texts for _ in encoder.disarmed.finditer(text))
