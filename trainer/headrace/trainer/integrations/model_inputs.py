"""The forms in which models of other libraries take a microbatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.packs import padding_token


def packed_inputs(
    data: PackedMicrobatch, vocabulary: Vocabulary, *, labels_are_shifted: bool = False, media: bool = False
) -> dict[str, Any]:
    """Return a microbatch as models of Hugging Face take packed samples: `input_ids`, `position_ids` and `labels`, each (1, T).

    Positions start from 0 at every sample: with them, without an attention mask and without a cache, these models keep attention
    inside of samples. With M-RoPE, position ids are (3, 1, T). There is one token at least, without a label.

    labels_are_shifted: whether `labels[t]` is to be the token that follows t; models of Hugging Face shift labels themselves.
    media: add those that there are as they are: `patches` with `image_grids`, `mel` with `mel_frames`.
    """
    data = with_tokens(data, vocabulary)
    mrope = data.mrope_position_ids
    inputs: dict[str, Any] = {
        "use_cache": False,
        "input_ids": data.input_ids[None],
        "position_ids": mrope[:, None] if mrope.shape[1] else data.position_ids[None],
        "labels": (data.labels if labels_are_shifted else data.unshifted_labels)[None],
    }
    if media:
        inputs |= {"patches": data.patches, "image_grids": data.image_grids, "mel": data.mel, "mel_frames": data.mel_frames}
    return inputs


def with_tokens(data: PackedMicrobatch, vocabulary: Vocabulary) -> PackedMicrobatch:
    """Return a microbatch as it is or, where it has no token, with one of padding, since most models cannot run on none."""
    if len(data.input_ids):
        return data
    return replace(
        data,
        input_ids=torch.tensor([padding_token(vocabulary)]),
        labels=torch.tensor([LABEL_IGNORED]),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        pack_offsets=torch.tensor([0, 1], dtype=torch.int32),
    )
