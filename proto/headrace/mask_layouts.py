"""Attention masks of the sequences that multimodal models are trained on.

Text sees all that came before it in its sample, of every modality. A medium (one image, one recording) sees all of itself and,
as `Sight` has it, nothing else: Cornstarch's masks (dissertation, figures 3.4 and 3.5), in which media of one modality are told
apart, too. Media before all text give masks of the kind that is called EP there (prepended), media inside of text EE (embedded),
and several samples in one sequence MP (packing).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.attention_mask import MOST_MODALITIES, AttentionMask, Ints, field

TEXT, VISION, AUDIO = 0, 1, 2
"""Numbers of the modalities; others may be up to 15."""

_EVERYTHING = (1 << MOST_MODALITIES) - 1


class Sight(enum.Enum):
    """What the tokens of a medium see."""

    ITSELF = "itself"
    """All of the medium, and nothing else."""
    BEFORE = "before"
    """All of the medium, and what came before it, as in Gemma 3 and Transfusion (arXiv:2408.11039, section 3.2)."""
    TEXT = "text"
    """What text in their place would, as in models whose language model has one causal mask for all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Media:
    """The images or recordings of a sequence of tokens."""

    token: int
    """The token id that stands for them."""
    modality: int
    lengths: Ints
    """(m,) number of tokens of each, in the order of the sequence."""
    sight: Sight = Sight.ITSELF


def text_field(segment: int, *, group: int = 0, all_groups: bool = True) -> int:
    """Return the field of a text token: causal, and it sees every modality."""
    return field(sees=_EVERYTHING, own=TEXT, segment=segment, group=group, all_groups=all_groups, causal=True)


def medium_field(modality: int, segment: int, group: int, sight: Sight = Sight.ITSELF) -> int:
    """Return the field of a token of an image or a recording, which has a group of its own."""
    if sight is Sight.ITSELF:
        return field(sees=1 << modality, own=modality, segment=segment, group=group)
    whole = sight is Sight.BEFORE
    return field(sees=_EVERYTHING, own=modality, segment=segment, group=group, whole_group=whole, all_groups=True, causal=True)


def packed(samples: Sequence[Sequence[tuple[int, int]]], padding: int = 0, sight: Sight = Sight.ITSELF) -> AttentionMask:
    """Return the mask of samples one after the other, each a sequence of (modality, number of tokens).

    Text is causal, each run of another modality is a medium of its own. padding: number of tokens behind the last sample that see
    nothing.
    """
    fields, lengths = [0], [padding]
    for segment, runs in enumerate(samples, 1):
        for number, (modality, length) in enumerate(runs, 1):
            fields.append(text_field(segment) if modality == TEXT else medium_field(modality, segment, number, sight))
            lengths.append(length)
    return _repeated(fields[1:] + fields[:1], lengths[1:] + lengths[:1])


def shared_question(question: int, answers: Sequence[int]) -> AttentionMask:
    """Return the mask of a question and its answers, in numbers of tokens: an answer sees the question and itself, causally."""
    of_answers = [text_field(1, group=number, all_groups=False) for number in range(1, len(answers) + 1)]
    return _repeated([text_field(1), *of_answers], [question, *answers])


def causal_blockwise(sinks: int, blocks: Sequence[int], last: int) -> AttentionMask:
    """Return the mask of examples in one context: each block sees the first `sinks` tokens and itself, the last one everything.

    All are numbers of tokens, and all is causal.
    """
    of_blocks = [text_field(1, group=number, all_groups=False) for number in range(1, len(blocks) + 1)]
    whole = text_field(1, group=len(blocks) + 1)
    return _repeated([text_field(1), *of_blocks, whole], [sinks, *blocks, last])


def mask_of_tokens(
    input_ids: Ints, cu_seqlens: Ints, media: Sequence[Media] = (), sample_segments: Ints | None = None
) -> AttentionMask:
    """Return the mask of a packed sequence of T tokens whose placeholders are expanded.

    input_ids: (T,). cu_seqlens: (s + 1,) offsets of its segments. sample_segments: those that are samples, where the others are
    padding; None: all are.

    Raises ValueError where the media have not as many tokens as there are placeholders of them, or one of them lies in two
    segments.
    """
    num_tokens = len(input_ids)
    if len(cu_seqlens) == 0 or cu_seqlens[0] != 0 or cu_seqlens[-1] != num_tokens or (np.diff(cu_seqlens) < 0).any():
        raise ValueError(f"the offsets of segments must rise from 0 to the number of tokens, {num_tokens}, got {cu_seqlens}")
    numbers = np.zeros(len(cu_seqlens) - 1, np.int64)
    real = np.arange(numbers.size) if sample_segments is None else np.asarray(sample_segments, np.int64)
    numbers[real] = np.arange(1, real.size + 1)
    text = np.array([0, *(text_field(number) for number in range(1, real.size + 1))], np.int64)
    of_segment = np.repeat(numbers, np.diff(cu_seqlens))
    fields = text[of_segment]
    num_groups = 0
    for kind in media:
        places = np.flatnonzero(np.asarray(input_ids) == kind.token)
        fields[places] = _of_media(kind, of_segment[places], num_groups)
        num_groups += kind.lengths.size
    fields[of_segment == 0] = 0
    return AttentionMask(fields=fields)


def _of_media(kind: Media, segments: Ints, num_groups: int) -> Ints:
    """Return the fields of the placeholders of media, which lie in these segments; their groups follow `num_groups` others."""
    if segments.size != kind.lengths.sum():
        raise ValueError(
            f"{segments.size} tokens have the id {kind.token}, but what they stand for has {kind.lengths.sum()} tokens in "
            f"{kind.lengths.size} media: give all of them the placeholder that the job's tokenizer has"
        )
    filled = np.flatnonzero(kind.lengths)
    ends = np.cumsum(kind.lengths)[filled]
    first, last = segments[ends - kind.lengths[filled]], segments[ends - 1]
    if (torn := filled[first != last]).size:
        raise ValueError(f"medium {torn[0]} of the token {kind.token} lies in two segments: cut sequences between samples only")
    of_medium = [
        medium_field(kind.modality, int(segment), num_groups + 1 + int(number), kind.sight)
        for segment, number in zip(first, filled, strict=True)
    ]
    return np.repeat(np.array(of_medium, np.int64), kind.lengths[filled])


def _repeated(fields: Sequence[int], lengths: Sequence[int]) -> AttentionMask:
    return AttentionMask(fields=np.repeat(np.array(fields, np.int64), lengths))
