"""Prompt templates: from the turns of a sample to token ids and labels.

ChatML, as Qwen uses it. A turn is

    <|im_start|>ROLE\\nCONTENT<|im_end|>\\n

with loss on CONTENT and <|im_end|> of the assistant. No system turn is made up. A document (caption, interleaved text) is
its content followed by <|endoftext|>, all with loss. An image of n tokens is <|vision_start|>, n times <|image_pad|>,
<|vision_end|>; a recording likewise; neither ever carries loss. Labels stand at their own token's place (the model predicts
label i from the tokens before i); the first token of a sequence has nothing before it, so its label is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.quarantine import BadSampleError, Reason
from headrace.sample import LABEL_IGNORED
from preprocessor.mapping import Image, Role, Sample, Text, Turn
from preprocessor.text import (
    AUDIO_END,
    AUDIO_PAD,
    AUDIO_START,
    END_OF_TEXT,
    IMAGE_END,
    IMAGE_PAD,
    IMAGE_START,
    TURN_END,
    TURN_START,
    TextEncoder,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """What the LLM sees of a sample: two arrays of one length, int32."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]

    @property
    def num_targets(self) -> int:
        """Tokens that carry loss."""
        return int(np.count_nonzero(self.labels != LABEL_IGNORED))


class ChatTemplate:
    """ChatML over one tokenizer."""

    def __init__(self, encoder: TextEncoder, max_tokens: int) -> None:
        self._encoder = encoder
        self._max_tokens = max_tokens
        self._control = encoder.control
        self._newline = encoder.encode("\n")
        self._heads = {role: [self._control[TURN_START], *encoder.encode(f"{role}\n")] for role in Role}

    def render(self, sample: Sample, media_tokens: list[int]) -> Sequence:
        """The sequence of a sample whose media, in order, have so many tokens each.

        Raises BadSampleError with too_long or encoding_error.
        """
        draft = _Draft(self._max_tokens)
        media = iter(media_tokens)
        for turn in sample.turns:
            if turn.role is Role.DOCUMENT:
                self._content(draft, turn, media)
                draft.add([self._control[END_OF_TEXT]], loss=True)
            else:
                draft.add(self._heads[turn.role], loss=False)
                self._content(draft, turn, media)
                draft.add([self._control[TURN_END]], loss=turn.loss)
                draft.add(self._newline, loss=False)
        return draft.sequence()

    def _content(self, draft: _Draft, turn: Turn, media: Iterator[int]) -> None:
        for segment in turn.segments:
            if isinstance(segment, Text):
                draft.add(self._encoder.encode(segment.text, limit=self._max_tokens), loss=turn.loss)
            else:
                start, pad, end = _IMAGE if isinstance(segment, Image) else _AUDIO
                draft.add([self._control[start], *[self._control[pad]] * next(media), self._control[end]], loss=False)


_IMAGE = (IMAGE_START, IMAGE_PAD, IMAGE_END)
_AUDIO = (AUDIO_START, AUDIO_PAD, AUDIO_END)


class _Draft:
    """Ids and labels as they grow, up to a limit."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._ids: list[int] = []
        self._labels: list[int] = []

    def add(self, ids: list[int], *, loss: bool) -> None:
        self._ids += ids
        self._labels += ids if loss else [LABEL_IGNORED] * len(ids)
        if len(self._ids) > self._max_tokens:
            raise BadSampleError(Reason.TOO_LONG, f"more than {self._max_tokens} tokens")

    def sequence(self) -> Sequence:
        labels = np.array(self._labels, np.int32)
        labels[0] = LABEL_IGNORED
        return Sequence(input_ids=np.array(self._ids, np.int32), labels=labels)
