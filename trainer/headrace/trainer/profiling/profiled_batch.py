"""Microbatches on which layers are timed: packed samples of nearly one length, as random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace.anyres import uncut_tokens
from headrace.plan import GENERATOR, LLM
from headrace.sample import Probe
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.collate import PackedMicrobatch, cumulative
from headrace.trainer.models.audio_encoder import STRIDE

PACKED_POSITIONS = 2048
"""Positions of a microbatch of short samples. What a layer takes once per microbatch is spread over so many, as in training,
where costs are added up sample by sample."""

_MIXED = ((300, 10, 8.0), (150, 16, 0.0), (700, 0, 0.0), (100, 7, 15.0), (60, 12, 3.0), (450, 0, 5.0))
"""Samples as (text tokens, side of the image in image tokens, seconds of the recording)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The numbers of positions of the segments (samples, images or recordings) of one microbatch for one part of a model."""

    part: str
    """Part of the model, with the positions that its costs are given on (`coefficients.PARTS`): patches, encoder frames, tokens
    or image tokens."""
    grids: tuple[tuple[int, int], ...]
    """(rows, columns) of each segment's positions; a segment that is no image has one row."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of positions of each segment."""
        return tuple(rows * columns for rows, columns in self.grids)

    @property
    def mean_positions(self) -> float:
        """Mean number of positions of a segment."""
        return sum(self.lengths) / len(self.grids)


def batch_shape(part: str, positions: int, image: ImageSpec) -> BatchShape:
    """Return the segments of a microbatch on which a part is timed for samples of about that many positions.

    Several short segments are packed. They differ in length by a little, as samples do: equal ones would take a faster path.
    """
    group = image.merge if part == "vision" else 1
    rows = group * max(1, math.isqrt(positions) // group) if part in ("vision", GENERATOR) else 1
    columns = group * max(1, round(positions / rows / group))
    count = max(1, PACKED_POSITIONS // (rows * columns))
    return BatchShape(part=part, grids=tuple((rows, columns + group * (index % 2)) for index in range(count)))


def profiled_batch(shape: BatchShape, *, image: ImageSpec, audio: AudioSpec, token_ids: tuple[int, int]) -> PackedMicrobatch:
    """Return a microbatch of these segments with random content, on the host. token_ids: the range, exclusive, of text tokens."""
    dice = torch.Generator().manual_seed(len(shape.grids))
    lengths, none = torch.tensor(shape.lengths, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    is_image, is_llm, is_audio = shape.part in ("vision", GENERATOR), shape.part == LLM, shape.part == "audio"
    side = image.merge if shape.part == GENERATOR else 1
    grids = torch.tensor([[1, side * rows, side * columns] for rows, columns in shape.grids if is_image], dtype=torch.int32)
    image_cu_seqlens = cumulative(grids.view(-1, 3).prod(dim=1, dtype=torch.int32))
    cu_seqlens = cumulative(lengths if is_llm else torch.zeros_like(lengths))
    mel_frames = lengths * STRIDE if is_audio else none
    tokens, patches, frames = int(cu_seqlens[-1]), int(image_cu_seqlens[-1]), int(mel_frames.sum())
    positions = [torch.arange(length) for length in shape.lengths if is_llm]
    each = torch.ones(len(lengths), dtype=torch.int32)
    return PackedMicrobatch(
        sample_ids=torch.arange(len(lengths)),
        input_ids=torch.randint(*token_ids, (tokens,), generator=dice),
        labels=torch.randint(*token_ids, (tokens,), generator=dice),
        position_ids=torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        sample_segments=torch.arange(len(lengths), dtype=torch.int32),
        pack_offsets=cu_seqlens,
        patches=torch.randint(0, 256, (patches, 3 * image.patch**2), generator=dice, dtype=torch.uint8),
        image_grids=grids.view(-1, 3),
        image_cu_seqlens=image_cu_seqlens,
        mel=torch.randn(frames, audio.mel_bins, generator=dice).half(),
        mel_frames=mel_frames,
        mel_cu_seqlens=cumulative(mel_frames),
        images_per_sample=each * is_image,
        recordings_per_sample=each * is_audio,
        num_targets=tokens,
    )


def mixed_probes(image: ImageSpec, audio: AudioSpec) -> list[Probe]:
    """Return samples of several sizes, with a square image, a recording, both or neither, for a whole model."""
    probes: list[Probe] = []
    for text, side, seconds in _MIXED:
        patches, frames = (side * image.merge) ** 2, math.ceil(seconds / audio.hop_s)
        num_tokens = text + (uncut_tokens(patches, image) if patches else 0) + audio.num_tokens(frames)
        probes.append(
            Probe(
                name=f"mixed/{len(probes)}",
                num_tokens=num_tokens,
                num_targets=num_tokens,
                image_patches=(patches,) if patches else (),
                mel_frames=(frames,) if frames else (),
            )
        )
    return probes
