"""Some of the media of a microbatch, as a microbatch that has no others: what one rank encodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.attention_mask import Ints
from headrace.trainer.loading.collate import PackedMicrobatch, cumulative


def with_media(data: PackedMicrobatch, images: Ints, recordings: Ints) -> PackedMicrobatch:
    """Return a microbatch, whose tensors are on the host, with only these of its images and recordings, given by rising numbers.

    Its tokens stay as they are.
    """
    of_images, of_recordings = (torch.from_numpy(np.asarray(chosen, np.int64)) for chosen in (images, recordings))
    frames = data.mel_frames[of_recordings]
    return replace(
        data,
        patches=data.patches[_rows(data.image_cu_seqlens, of_images)] if len(data.patches) else data.patches,
        image_grids=data.image_grids[of_images],
        image_sizes=data.image_sizes[of_images] if len(data.image_sizes) else data.image_sizes,
        image_cu_seqlens=cumulative(data.image_cu_seqlens.diff()[of_images]),
        mel=data.mel[_rows(data.mel_cu_seqlens, of_recordings)] if len(data.mel) else data.mel,
        mel_frames=frames,
        mel_cu_seqlens=cumulative(frames),
        images_per_sample=_per_sample(data.images_per_sample, of_images),
        recordings_per_sample=_per_sample(data.recordings_per_sample, of_recordings),
    )


def _rows(offsets: Tensor, chosen: Tensor) -> Tensor:
    """Return the rows of the chosen ones of the media that lie between consecutive offsets."""
    starts, lengths = offsets[:-1][chosen].long(), offsets.diff()[chosen].long()
    firsts = cumulative(lengths)[:-1].long()
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - firsts, lengths)


def _per_sample(counts: Tensor, chosen: Tensor) -> Tensor:
    """Return how many of the chosen media each sample has, of `counts` (n,) in all."""
    samples = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.bincount(samples[chosen], minlength=len(counts)).to(counts.dtype)
