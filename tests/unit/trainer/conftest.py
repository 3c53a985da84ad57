"""Samples with real token layouts and random contents, the smallest model that has every part, preprocessors to fetch from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from headrace.model_shape import ModelShape, TransformerShape
from headrace.sample import LABEL_IGNORED, SCHEMA
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.models.multimodal import MultimodalModel, initialise
from tests.unit.proto.transport import payload_world

VOCAB, IMAGE_TOKEN, AUDIO_TOKEN = 64, 1, 2
IMAGE = ImageSpec(patch=2, merge=2, min_pixels=16, max_pixels=4096)
AUDIO = AudioSpec(mel_bins=4)

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """(sample_id, text=, answer=, grids=, frames=) -> a row: opening token, media, question, answer that carries the loss."""

    def make(
        sample_id: int,
        *,
        text: int = 3,
        answer: int = 4,
        grids: Sequence[tuple[int, int, int]] = (),
        frames: Sequence[int] = (),
    ) -> Row:
        rng = np.random.default_rng(sample_id)
        image_tokens = sum(t * h * w for t, h, w in grids) // IMAGE.merge**2
        audio_tokens = sum(-(-count // AUDIO.frames_per_token) for count in frames)
        words = rng.integers(3, VOCAB, 1 + text + answer)
        ids = np.concatenate([words[:1], [IMAGE_TOKEN] * image_tokens, [AUDIO_TOKEN] * audio_tokens, words[1:]]).astype(np.int32)
        carries_loss = np.arange(len(ids)) >= len(ids) - answer
        num_patches = sum(t * h * w for t, h, w in grids)
        return {
            "sample_id": sample_id,
            "input_ids": ids,
            "labels": np.where(carries_loss, ids, LABEL_IGNORED).astype(np.int32),
            "patches": rng.integers(0, 256, num_patches * 3 * IMAGE.patch**2, dtype=np.uint8),
            "image_grids": [list(grid) for grid in grids],
            "mel": rng.standard_normal(sum(frames) * AUDIO.mel_bins).astype(np.float16),
            "mel_frames": list(frames),
            "flags": 0,
            "image_sizes": [[7 * h, 5 * w] for _, h, w in grids],
        }

    return make


@pytest.fixture
def make_batch() -> Callable[[Sequence[Row]], pa.RecordBatch]:
    return lambda rows: pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA)


@pytest.fixture
def mixed_rows(make_row: Callable[..., Row]) -> list[Row]:
    """Text, image, audio, several of each, odd clip lengths, equal and unequal neighbours."""
    return [
        make_row(10, text=5, answer=6),
        make_row(11, grids=[(1, 4, 6)]),
        make_row(12, frames=[13]),
        make_row(13, grids=[(1, 2, 2), (1, 2, 2), (1, 6, 4)], frames=[8, 1, 21], answer=9),
        make_row(14, text=0, answer=2),
        make_row(15, grids=[(1, 4, 4)], answer=1),
    ]


@pytest.fixture
def make_model() -> Callable[..., MultimodalModel]:
    def make(seed: int = 0, *, generator: bool = False) -> MultimodalModel:
        encoder = TransformerShape(layers=2, width=16, heads=2, kv_heads=2, mlp=32, gated=False)
        decoder = TransformerShape(layers=2, width=32, heads=4, kv_heads=2, mlp=48, gated=True)
        model = MultimodalModel(
            ModelShape(vision=encoder, audio=encoder, llm=decoder, generator=encoder if generator else None),
            vocab_size=VOCAB,
            image=IMAGE,
            audio=AUDIO,
            image_token_id=IMAGE_TOKEN,
            audio_token_id=AUDIO_TOKEN,
        )
        initialise(model, seed)
        with torch.no_grad():  # larger than a training start, so that every path shows in the gradients
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(5)
        return model

    return make


@pytest.fixture
def make_part() -> Callable[..., pa.RecordBatch]:
    """(num_bytes, sample_id) -> a part of one sample whose payload bytes are all sample_id % 256."""
    make: Callable[..., pa.RecordBatch] = payload_world.make_batch
    return make


@pytest.fixture
def make_producer() -> Iterator[Callable[..., Any]]:
    """(budget_bytes, **options) -> a preprocessor's store and servers, stopped at the end."""
    with ExitStack() as stack:

        def make(budget_bytes: int = 16 << 20, **options: Any) -> Any:
            producer = payload_world.Producer(budget_bytes, **options)
            stack.callback(producer.stop)
            return producer

        yield make
