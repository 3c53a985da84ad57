"""The packs of a microbatch: which of its samples share a sequence, and the padding that makes all packs equally long.

Padding has no targets and is a segment of its own, so it neither attends to samples nor is attended to: loss and gradients are
those of the samples alone. Its cost is memory and time for the LLM, as if every pack were full.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED
from headrace.spec import JobSpec
from headrace.trainer.loading.buffers import BufferPool
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.loading.mrope import mrope_position_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How packs are padded to one length."""

    pack_tokens: int
    """Length of every pack in tokens."""
    segment_tokens: int
    """Most tokens of one segment of padding; longer padding is several segments. Attention, whose time grows with the square of a
    segment's length, then takes no more for padding than for the longest samples."""
    token: int
    """The token id of padding: any that is not a placeholder of images or audio, since what it embeds reaches no target."""

    @classmethod
    def of(cls, spec: JobSpec, vocabulary: Vocabulary) -> Self | None:
        """Return the padding that a job asks for (`pad_to_max_length`), or None."""
        if not spec.pad_to_max_length:
            return None
        assert spec.pack_tokens is not None, "the spec was checked"
        segment_tokens = min(spec.pack_tokens, spec.text.max_tokens)
        return cls(pack_tokens=spec.pack_tokens, segment_tokens=segment_tokens, token=padding_token(vocabulary))


def padding_token(vocabulary: Vocabulary) -> int:
    """Return the token id that padding has: the first one that is no placeholder of images or recordings."""
    return next(i for i in count() if i not in (vocabulary.image_token, vocabulary.audio_token))


def collate_packs(
    batches: Sequence[pa.RecordBatch],
    packs: Sequence[Collection[int]],
    spec: JobSpec,
    vocabulary: Vocabulary,
    buffers: BufferPool,
) -> PackedMicrobatch:
    """Collate batches into a microbatch, as the job asks for it. packs: as for `in_packs`; empty where the job does not pack."""
    data = collate(
        batches,
        patch_values=3 * spec.image.patch**2,
        mel_bins=spec.audio.mel_bins,
        vocab_size=vocabulary.size,
        buffers=buffers,
    )
    data = in_packs(data, packs, Padding.of(spec, vocabulary)) if packs else data
    return _with_mrope(data, vocabulary.image_token, spec.image.merge) if spec.mrope and len(data.input_ids) else data


def _with_mrope(data: PackedMicrobatch, image_token: int, merge: int) -> PackedMicrobatch:
    """Return a microbatch with tokens, whose payload is on the host, with M-RoPE's position ids too."""
    arrays = (tensor.numpy() for tensor in (data.input_ids, data.cu_seqlens, data.image_grids))
    positions = mrope_position_ids(*arrays, image_token=image_token, merge=merge)
    return replace(data, mrope_position_ids=torch.from_numpy(positions))


def in_packs(microbatch: PackedMicrobatch, packs: Sequence[Collection[int]], padding: Padding | None = None) -> PackedMicrobatch:
    """Return a collated microbatch divided into packs, each padded at its end if `padding` is given. The payload is on the host.

    packs: the sample ids of each pack, in the order of the microbatch's rows. Samples that did not arrive are left out of their
    packs, and packs without any sample that arrived are left out. A microbatch without tokens, as units other than the LLM get
    it, stays without.

    Raises HeadraceError where a pack to be padded is longer than `padding.pack_tokens`.
    """
    arrived = set(microbatch.sample_ids.tolist())
    sizes = [size for samples in packs if (size := len(arrived.intersection(samples)))]
    first_sample = np.cumsum([0, *sizes])
    assert first_sample[-1] == len(arrived), "every sample is in one pack"
    offsets = microbatch.cu_seqlens.numpy()[first_sample]
    if padding is None or not len(microbatch.input_ids):
        return replace(microbatch, pack_offsets=torch.from_numpy(offsets))
    return _padded(microbatch, first_sample, offsets, padding)


def _padded(
    microbatch: PackedMicrobatch, first_sample: NDArray[np.int64], offsets: NDArray[np.int32], padding: Padding
) -> PackedMicrobatch:
    """Pad p packs that have the samples, and the tokens, between consecutive entries of `first_sample` and `offsets` (p + 1,)."""
    tokens_of_packs, of_samples = np.diff(offsets), microbatch.cu_seqlens.diff().tolist()
    if tokens_of_packs.max() > padding.pack_tokens:
        raise HeadraceError(
            f"a pack arrived with {tokens_of_packs.max()} tokens, but was planned for at most {padding.pack_tokens}: "
            "trainer and preprocessors disagree on the job's tokens"
        )
    lengths: list[int] = []
    sample_segments: list[int] = []
    for (start, end), num_tokens in zip(pairwise(first_sample.tolist()), tokens_of_packs.tolist(), strict=True):
        sample_segments += range(len(lengths), len(lengths) + end - start)
        lengths += of_samples[start:end]
        whole, rest = divmod(padding.pack_tokens - num_tokens, padding.segment_tokens)
        lengths += [padding.segment_tokens] * whole + [rest] * (rest > 0)
    num_packs = len(tokens_of_packs)
    new_offsets = np.arange(num_packs + 1, dtype=np.int32) * np.int32(padding.pack_tokens)
    shifts = np.repeat(new_offsets[:-1] - offsets[:-1], tokens_of_packs)
    places = torch.from_numpy(np.arange(len(shifts)) + shifts)
    cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
    total, weights = int(new_offsets[-1]), microbatch.target_weights
    return replace(
        microbatch,
        input_ids=_placed(microbatch.input_ids, places, total, padding.token),
        labels=_placed(microbatch.labels, places, total, LABEL_IGNORED),
        target_weights=_placed(weights, places, total, 0) if len(weights) else weights,
        position_ids=torch.from_numpy(np.arange(total) - np.repeat(cu_seqlens[:-1], lengths)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        pack_offsets=torch.from_numpy(new_offsets),
        sample_segments=torch.tensor(sample_segments, dtype=torch.int32),
    )


def _placed(values: Tensor, places: Tensor, total: int, fill: int) -> Tensor:
    """Return (total,) values: `values` (T,) at `places` (T,), and `fill` everywhere else."""
    return torch.full((total,), fill, dtype=values.dtype).index_copy(0, places, values)
