"""Some of a microbatch's media: what they are, and to whom they go."""

from __future__ import annotations

import numpy as np
import torch

from headrace.trainer.context.media_parts import with_media
from headrace.trainer.context.media_rows import encoding_ranks
from tests.verify.context_models import ModelCase

CASE = ModelCase(1, samples=tuple(range(12)))


def test_the_parts_are_the_whole_in_its_order() -> None:
    data, model = CASE.microbatch(), CASE.model()
    num_images, num_recordings = len(data.image_grids), len(data.mel_frames)
    assert min(num_images, num_recordings) > 3
    with torch.no_grad():
        images, recordings = model.image_tokens(model.image_inputs(data)), model.audio_tokens(model.audio_inputs(data))
        of_images, of_recordings = [], []
        for part in range(2):
            own = with_media(data, np.arange(part, num_images, 2), np.arange(part, num_recordings, 2))
            assert int(own.images_per_sample.sum()) == len(own.image_grids)
            assert int(own.recordings_per_sample.sum()) == len(own.mel_frames)
            of_images.append(model.image_tokens(model.image_inputs(own)))
            of_recordings.append(model.audio_tokens(model.audio_inputs(own)))
    for whole, parts, counts in (
        (images, of_images, (data.image_grids.prod(dim=1) // 4).tolist()),
        (recordings, of_recordings, [-(-frames // 8) for frames in data.mel_frames.tolist()]),
    ):
        pieces = [list(part.split(counts[number::2])) for number, part in enumerate(parts)]
        joined = torch.cat([pieces[number % 2].pop(0) for number in range(len(counts))])
        torch.testing.assert_close(joined, whole, atol=1e-5, rtol=1e-5)


def test_of_none_there_is_nothing_to_encode() -> None:
    data, model = CASE.microbatch(), CASE.model()
    own = with_media(data, np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert model.image_inputs(own) is None
    assert model.audio_inputs(own) is None


def test_media_are_spread_by_their_lengths() -> None:
    lengths = np.array([5, 9, 1, 4, 4, 7])
    ranks = encoding_ranks(lengths, 3)
    assert np.bincount(ranks, weights=lengths).tolist() == [10, 11, 9]
    assert encoding_ranks(np.array([3]), 4).tolist() == [0]
