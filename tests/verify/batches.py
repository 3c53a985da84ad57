"""A small model with every unit, and global batches of random samples for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from headrace.model_shape import ModelShape, TransformerShape
from headrace.sample import LABEL_IGNORED, SCHEMA
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.models.decoder import Decoder
from headrace.trainer.models.dropout import ResidualDropout
from headrace.trainer.models.multimodal import MultimodalModel

VOCAB, IMAGE_TOKEN, AUDIO_TOKEN = 64, 1, 2
IMAGE = ImageSpec(patch=2, merge=2, min_pixels=16, max_pixels=4096)
AUDIO = AudioSpec(mel_bins=4, max_seconds=30)
_ENCODER = TransformerShape(layers=4, width=16, heads=2, kv_heads=2, mlp=32, gated=False)
SHAPE = ModelShape(
    vision=_ENCODER,
    audio=_ENCODER,
    llm=TransformerShape(layers=6, width=32, heads=4, kv_heads=2, mlp=48, gated=True),
)
GENERATING = replace(SHAPE, generator=_ENCODER)


def whole_model(shape: ModelShape = SHAPE, *, tied: bool = True, dropout: float = 0.0) -> MultimodalModel:
    """On the meta device. `tied`: whether the LLM's head is its embedding, as in models of this width."""
    with torch.device("meta"):
        model = MultimodalModel(
            shape, vocab_size=VOCAB, image=IMAGE, audio=AUDIO, image_token_id=IMAGE_TOKEN, audio_token_id=AUDIO_TOKEN
        )
        if not tied:
            model.decoder = Decoder(shape.llm, vocab_size=VOCAB, tied=False)
    if dropout:
        model.decoder.dropout = ResidualDropout(model.decoder.layers, dropout, seed=0)
    return model


def enlarge(module: torch.nn.Module) -> None:
    """Weights larger than a training start, so that every path shows in the gradients."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5)


def make_row(sample_id: int, *, audio: bool) -> dict[str, Any]:
    """Text, images, recordings, several of each, or nothing of a kind; a few samples have no target at all."""
    rng = np.random.default_rng(sample_id)
    grids = [[1, 2 * int(h), 2 * int(w)] for h, w in rng.integers(1, 5, (rng.integers(0, 3), 2))]
    frames = [int(count) for count in rng.integers(1, 40, rng.integers(0, 3))] if audio else []
    num_patches = sum(t * h * w for t, h, w in grids)
    image_tokens = num_patches // IMAGE.merge**2
    audio_tokens = sum(-(-count // AUDIO.frames_per_token) for count in frames)
    words = rng.integers(3, VOCAB, rng.integers(4, 24))
    answer = int(rng.integers(0, 4)) and int(rng.integers(1, len(words)))
    ids = np.concatenate([words[:1], [IMAGE_TOKEN] * image_tokens, [AUDIO_TOKEN] * audio_tokens, words[1:]]).astype(np.int32)
    carries_loss = np.arange(len(ids)) >= len(ids) - answer
    weighs = carries_loss[1:].any() and sample_id % 2  # eighths, whose sums are exact in any order
    return {
        "sample_id": sample_id,
        "input_ids": ids,
        "labels": np.where(carries_loss, ids, LABEL_IGNORED).astype(np.int32),
        "patches": rng.integers(0, 256, num_patches * 3 * IMAGE.patch**2, dtype=np.uint8),
        "image_grids": grids,
        "mel": rng.standard_normal(sum(frames) * AUDIO.mel_bins).astype(np.float16),
        "mel_frames": frames,
        "flags": 0,
        "target_weights": np.where(carries_loss, rng.integers(1, 17) / 8, 0).astype(np.float32) if weighs else [],
    }


def costs_of(rows: Sequence[dict[str, Any]], units: Iterable[str]) -> dict[str, np.ndarray]:
    """Something for the planner to balance: what a unit has of each sample, and a bit."""
    images = ("patches",)
    columns = {
        "encoder": ("patches", "mel"), "vision": images, "audio": ("mel",), "llm": ("input_ids",), "generator": images
    }  # fmt: skip
    return {unit: np.array([1e-3 + sum(len(row[name]) for name in columns[unit]) for row in rows]) for unit in units}


def packed(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> PackedMicrobatch:
    """As a rank receives these samples that fetches these columns; None: all."""
    batches = [pa.RecordBatch.from_pylist([row], schema=SCHEMA).select(list(columns or SCHEMA.names)) for row in rows]
    return collate(batches, patch_values=3 * IMAGE.patch**2, mel_bins=AUDIO.mel_bins)


@lru_cache(maxsize=4096)
def packed_samples(samples: tuple[int, ...], *, audio: bool, columns: tuple[str, ...] | None = None) -> PackedMicrobatch:
    """The same of `make_row`'s samples, kept: neighbouring cases have most of their portions in common."""
    return packed([make_row(sample, audio=audio) for sample in samples], columns)
