"""Random masks of the three kinds that Cornstarch measures (arXiv:2503.11367, figure 11 and table 4; dissertation, figure 3.5).

The paper says that each is "randomly generated", and not how. Here lengths of media and of text between them are log-uniform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from headrace.attention_mask import AttentionMask
from headrace.mask_layouts import AUDIO, TEXT, VISION, packed

Runs = list[tuple[int, int]]
_MEDIA, _TEXT, _SAMPLE = (256, 4096), (32, 2048), (1024, 16_384)  # least and most tokens of a medium, of text, of a sample


def prepended(rng: np.random.Generator, num_tokens: int) -> AttentionMask:
    """EP: media in front of all text, from a quarter to three quarters of the tokens."""
    return packed([_prepended(rng, num_tokens)])


def embedded(rng: np.random.Generator, num_tokens: int) -> AttentionMask:
    """EE: media and text in turn."""
    return packed([_embedded(rng, num_tokens)])


def multimodal_packing(rng: np.random.Generator, num_tokens: int) -> AttentionMask:
    """MP: samples of both kinds in one sequence."""
    return packed([(_embedded if rng.random() < 0.5 else _prepended)(rng, length) for length in _cut(rng, num_tokens, *_SAMPLE)])


MASKS: Mapping[str, Callable[[np.random.Generator, int], AttentionMask]] = {
    "EP": prepended,
    "EE": embedded,
    "MP": multimodal_packing,
}


def _prepended(rng: np.random.Generator, num_tokens: int) -> Runs:
    of_media = int(num_tokens * rng.uniform(0.25, 0.75))
    return [*((_medium(rng), length) for length in _cut(rng, of_media, *_MEDIA)), (TEXT, num_tokens - of_media)]


def _embedded(rng: np.random.Generator, num_tokens: int) -> Runs:
    runs: Runs = []
    while num_tokens:
        of_text = not runs or runs[-1][0] != TEXT
        length = min(num_tokens, _length(rng, *(_TEXT if of_text else _MEDIA)))
        runs.append((TEXT if of_text else _medium(rng), length))
        num_tokens -= length
    return runs


def _cut(rng: np.random.Generator, num_tokens: int, least: int, most: int) -> list[int]:
    """Cut a number of tokens into lengths between these, of which the last may be shorter."""
    lengths = []
    while num_tokens:
        lengths.append(min(num_tokens, _length(rng, least, most)))
        num_tokens -= lengths[-1]
    return lengths


def _length(rng: np.random.Generator, least: int, most: int) -> int:
    return int(np.exp(rng.uniform(np.log(least), np.log(most))))


def _medium(rng: np.random.Generator) -> int:
    return VISION if rng.random() < 0.75 else AUDIO
