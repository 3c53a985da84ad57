"""The forms in which models of other libraries take a microbatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headrace.errors import UserError
from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED
from headrace.spec import JobSpec
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.packs import padding_token
from headrace.trainer.loading.padded import unshifted


def packed_inputs(
    data: PackedMicrobatch,
    vocabulary: Vocabulary,
    *,
    labels_are_shifted: bool = False,
    media: bool = False,
    weights: bool = False,
) -> dict[str, Any]:
    """Return a microbatch as models of Hugging Face take packed samples: `input_ids`, `position_ids` and `labels`, each (1, T).

    Positions start from 0 at every sample: with them, without an attention mask and without a cache, these models keep attention
    inside of samples. With M-RoPE, position ids are (3, 1, T). There is one token at least, without a label.

    labels_are_shifted: whether `labels[t]` is to be the token that follows t; models of Hugging Face shift labels themselves.
    media: add those that there are as they are: `patches` with `image_grids`, `mel` with `mel_frames`.
    weights: add `target_weights`, (1, T), at the labels, if there are any; they are for `weighted_loss`, as no model knows them.

    Raises UserError where targets have weights that were not asked for: the loss of a model would leave them out.
    """
    if len(data.target_weights) and not weights:
        raise UserError(
            "targets have weights, which the loss of a model of Hugging Face leaves out: make the inputs with weights=True and "
            "take `weighted_loss`, or take `weights` out of the job's mappings"
        )
    data = with_tokens(data, vocabulary)
    mrope = data.mrope_position_ids
    inputs: dict[str, Any] = {
        "use_cache": False,
        "input_ids": data.input_ids[None],
        "position_ids": mrope[:, None] if mrope.shape[1] else data.position_ids[None],
        "labels": (data.labels if labels_are_shifted else data.unshifted_labels)[None],
    }
    if len(data.target_weights):
        of_targets = data.target_weights if labels_are_shifted else unshifted(data.target_weights, data.cu_seqlens, 0)
        inputs["target_weights"] = of_targets[None]
    if media:
        inputs |= {"patches": data.patches, "image_grids": data.image_grids, "mel": data.mel, "mel_frames": data.mel_frames}
    return inputs


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of the cross entropies of the targets, each times its weight.

    logits: (1, T, vocab), of a model called without labels; labels, weights: of `packed_inputs`, not shifted.
    """
    losses = functional.cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="none", ignore_index=LABEL_IGNORED)
    return (losses * weights[0, 1:]).sum()


def check_no_weights(spec: JobSpec, library: str) -> None:
    """Raise UserError where targets of a job have weights, which the losses of a library do not take."""
    for source in spec.sources:
        if source.mapping.weights:
            raise UserError(
                f"source {source.name!r} has weights of targets, which the loss of {library} leaves out: take `weights` out of "
                "its mapping, or another loop"
            )


def with_tokens(data: PackedMicrobatch, vocabulary: Vocabulary) -> PackedMicrobatch:
    """Return a microbatch as it is or, where it has no token, with one of padding, since most models cannot run on none."""
    if len(data.input_ids):
        return data
    return replace(
        data,
        input_ids=torch.tensor([padding_token(vocabulary)]),
        labels=torch.tensor([LABEL_IGNORED]),
        target_weights=data.target_weights[:0],
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        pack_offsets=torch.tensor([0, 1], dtype=torch.int32),
    )
