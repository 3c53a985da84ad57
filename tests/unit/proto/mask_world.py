"""Attention masks for tests: drawn ones, and their matrix written out pair by pair."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from headrace.attention_mask import AttentionMask, field
from headrace.mask_layouts import AUDIO, TEXT, VISION, packed

TOKENS = st.builds(
    dict,
    sees=st.integers(0, 7),
    own=st.integers(0, 2),
    group=st.integers(0, 3),
    whole_group=st.booleans(),
    all_groups=st.booleans(),
    causal=st.booleans(),
)


@st.composite
def masks(draw, most_tokens=40):
    """Masks in which every token has fields of its own, drawn at random, in segments and padding."""
    fields = []
    for segment in draw(st.lists(st.integers(0, 1), max_size=5)):
        number = len(fields) + 1 if segment else 0
        tokens = draw(st.lists(TOKENS, min_size=1, max_size=most_tokens // 4))
        repeats = [draw(st.integers(1, 4)) for _ in tokens]
        for token, times in zip(tokens, repeats, strict=True):
            fields += [field(segment=number, **token) if number else 0] * times
    return AttentionMask(fields=np.array(fields, np.int64))


@st.composite
def packed_masks(draw, most_tokens=30):
    """Masks as training has them: samples of text and media, and padding at the end."""
    run = st.tuples(st.sampled_from([TEXT, VISION, AUDIO]), st.integers(1, most_tokens))
    samples = draw(st.lists(st.lists(run, min_size=1, max_size=5), min_size=1, max_size=4))
    return packed(samples, padding=draw(st.integers(0, 9)))


def written_out(mask: AttentionMask) -> np.ndarray:
    """The (T, T) matrix by the sentence in the module's text."""
    tokens = [unpacked(int(value)) for value in mask.fields]
    matrix = np.zeros((len(tokens), len(tokens)), bool)
    for i, query in enumerate(tokens):
        for j, key in enumerate(tokens):
            matrix[i, j] = (
                query["segment"] == key["segment"] != 0
                and key["own"] in query["sees"]
                and (query["all_groups"] or key["group"] in (0, query["group"]))
                and (j <= i or not query["causal"] or (query["whole_group"] and key["group"] == query["group"] != 0))
            )
    return matrix


def unpacked(value: int) -> dict:
    bits = f"{value & (1 << 64) - 1:064b}"
    return {
        "causal": bits[0] == "1",
        "all_groups": bits[1] == "1",
        "whole_group": bits[2] == "1",
        "group": int(bits[3:23], 2),
        "segment": int(bits[23:44], 2),
        "own": int(bits[44:48], 2),
        "sees": {number for number in range(16) if bits[63 - number] == "1"},
    }
