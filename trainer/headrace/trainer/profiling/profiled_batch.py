"""Microbatches on which layers are timed: packed samples of nearly one length, as random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.anyres import uncut_tokens
from headrace.plan import GENERATOR, LLM
from headrace.sample import LABEL_IGNORED, Probe
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.collate import PackedMicrobatch, cumulative
from headrace.trainer.models.audio_encoder import STRIDE

PACKED_POSITIONS = 2048
"""Positions of a microbatch of short samples. What a layer takes once per microbatch is spread over so many, as in training,
where costs are added up sample by sample."""

STAGE_TARGETS_EVERY = 8
"""Of the tokens on which a stage is timed, one of so many carries loss."""
_STAGE_SAMPLES = 1, 2, 4, 8
"""Numbers of samples of the microbatches on which a stage is timed."""
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
    targets_every: int = 1
    """Of a segment of text, one token of so many carries loss."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of positions of each segment."""
        return tuple(rows * columns for rows, columns in self.grids)

    @property
    def targets(self) -> tuple[int, ...]:
        """Number of tokens of each segment that carry loss."""
        return tuple(-(-length // self.targets_every) if self.part == LLM else 0 for length in self.lengths)

    @property
    def mean_positions(self) -> float:
        """Mean number of positions of a segment."""
        return sum(self.lengths) / len(self.grids)


def batch_shape(part: str, positions: int, image: ImageSpec, count: int | None = None, targets_every: int = 1) -> BatchShape:
    """Return the segments of a microbatch on which a part is timed for samples of about that many positions.

    count: number of segments; None: as many short ones as PACKED_POSITIONS have room for. They differ in length by a little, as
    samples do: equal ones would take a faster path.
    """
    group = image.merge if part == "vision" else 1
    rows = group * max(1, math.isqrt(positions) // group) if part in ("vision", GENERATOR) else 1
    columns = group * max(1, round(positions / rows / group))
    count = max(1, PACKED_POSITIONS // (rows * columns)) if count is None else count
    grids = tuple((rows, columns + group * (index % 2)) for index in range(count))
    return BatchShape(part=part, grids=grids, targets_every=targets_every)


def stage_shapes(part: str, positions: Sequence[int], image: ImageSpec) -> list[BatchShape]:
    """Return microbatches of one or several samples, short and long, on which a whole stage is timed.

    positions: sorted; the smallest, the largest and one between are taken. Few tokens carry loss, as in conversations.
    """
    lengths = dict.fromkeys((positions[0], positions[len(positions) // 2], positions[-1]))
    return [
        batch_shape(part, length, image, count, STAGE_TARGETS_EVERY)
        for length in lengths
        for count in _STAGE_SAMPLES
        if count == 1 or count * length <= PACKED_POSITIONS
    ]


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
    position_ids = torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64)
    input_ids, labels = (torch.randint(*token_ids, (tokens,), generator=dice) for _ in range(2))
    each = torch.ones(len(lengths), dtype=torch.int32)
    return PackedMicrobatch(
        sample_ids=torch.arange(len(lengths)),
        input_ids=input_ids,
        labels=labels.masked_fill(position_ids % shape.targets_every != 0, LABEL_IGNORED),
        position_ids=position_ids,
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
        num_targets=sum(shape.targets),
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
