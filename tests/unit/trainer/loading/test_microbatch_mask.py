"""The mask of a microbatch as a loader packs it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.errors import UserError
from headrace.mask_layouts import AUDIO, TEXT, VISION, Sight, packed
from headrace.sample import Probe
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.microbatch_mask import microbatch_mask
from headrace.trainer.loading.random_batch import random_batch

IMAGE, SOUND = 7, 8
SPECS = {"image": ImageSpec(merge=2), "audio": AudioSpec(frames_per_token=8)}
PROBES = [
    Probe(name="a", num_tokens=9, num_targets=9, image_patches=(16, 4)),
    Probe(name="b", num_tokens=7, num_targets=7, mel_frames=(16, 20)),
    Probe(name="c", num_tokens=3, num_targets=3),
]


def mask_of(data, **options):
    return microbatch_mask(data, **{**SPECS, "image_token": IMAGE, "audio_token": SOUND, **options})


def matrix(mask):
    everywhere = np.arange(mask.num_tokens)
    return mask.visible(everywhere, everywhere)


def batch():
    return random_batch(PROBES, **SPECS, placeholders=(IMAGE, SOUND))


def test_samples_and_media_are_apart():
    frames = [SPECS["audio"].num_tokens(count) for count in (16, 20)]
    rest = 7 - 1 - sum(frames)
    expected = packed(
        [
            [(TEXT, 1), (VISION, 4), (VISION, 1), (TEXT, 3)],
            [(TEXT, 1), *((AUDIO, count) for count in frames), (TEXT, rest)],
            [(TEXT, 3)],
        ]
    )
    np.testing.assert_array_equal(matrix(mask_of(batch())), matrix(expected))


def test_all_may_be_causal():
    mask = mask_of(batch(), images=Sight.TEXT, recordings=Sight.TEXT)
    np.testing.assert_array_equal(matrix(mask), matrix(packed([[(TEXT, 9)], [(TEXT, 7)], [(TEXT, 3)]])))


def test_padding_sees_nothing():
    data = replace(batch(), sample_segments=torch.tensor([0, 1], dtype=torch.int32))
    assert not matrix(mask_of(data))[16:].any()


def test_what_has_no_mask_is_refused():
    with pytest.raises(UserError, match="a context-parallel slice of one: leave out cp"):
        mask_of(replace(batch(), rows=torch.arange(3)))
    with pytest.raises(UserError, match="a microbatch has no attention mask: 0 tokens have the id 9"):
        mask_of(batch(), image_token=9)
    with pytest.raises(UserError, match=r"images with image\.fit: anyres"):
        mask_of(batch(), image=SPECS["image"].model_copy(update={"fit": "anyres"}))
