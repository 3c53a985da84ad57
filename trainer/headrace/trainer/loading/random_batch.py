"""Microbatches of made-up samples: random content of given sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from headrace.anyres import uncut_tokens
from headrace.sample import SCHEMA, Probe
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.collate import PackedMicrobatch, collate


def random_batch(
    probes: Sequence[Probe], *, image: ImageSpec, audio: AudioSpec, placeholders: tuple[int, int]
) -> PackedMicrobatch:
    """Return samples of the sizes in `probes`, whose images are square, as a microbatch on the host. Every token is a target,
    and has one position along all axes.

    placeholders: token ids that stand for images and recordings; the least of the other ids stands for all text.
    """
    dice = np.random.default_rng(len(probes))
    text_id = min(set(range(3)) - set(placeholders))
    rows = []
    for number, probe in enumerate(probes):
        image_tokens = sum(uncut_tokens(patches, image) for patches in probe.image_patches)
        audio_tokens = sum(map(audio.num_tokens, probe.mel_frames))
        text = np.full(probe.num_tokens - image_tokens - audio_tokens, text_id)
        ids = np.concatenate([text[:1], np.repeat(placeholders, (image_tokens, audio_tokens)), text[1:]]).astype(np.int32)
        rows.append(
            {
                "sample_id": number,
                "input_ids": ids,
                "labels": ids,
                "patches": dice.integers(0, 256, sum(probe.image_patches) * 3 * image.patch**2, dtype=np.uint8),
                "image_grids": [[1, math.isqrt(patches), math.isqrt(patches)] for patches in probe.image_patches],
                "mel": dice.standard_normal(sum(probe.mel_frames) * audio.mel_bins).astype(np.float16),
                "mel_frames": probe.mel_frames,
                "flags": 0,
                "image_sizes": [[1, 1] for _ in probe.image_patches if image.fit == "anyres"],
            }
        )
    data = collate([pa.RecordBatch.from_pylist([row], schema=SCHEMA) for row in rows])
    return replace(data, mrope_position_ids=data.position_ids.repeat(3, 1))
