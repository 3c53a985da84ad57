"""One rank's rows of a packed microbatch whose samples are each shared by some ranks, or on this one alone, as a plan has them.

Attention is causal in each sample, as language models are trained. What is made here needs no process group, so that it can be
made beside the step, for microbatches to come; `PlannedAttention.joined` puts the groups in their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.attention_mask import AttentionMask
from headrace.block_distribution import BLOCK
from headrace.mask_layouts import text_field
from headrace.sample import LABEL_IGNORED
from headrace.trainer.context.gathered_attention import AttentionBySequence, GatheredAttention, PackedSequences
from headrace.trainer.loading.collate import PackedMicrobatch, cumulative
from headrace.trainer.loading.slices import slice_of
from headrace.trainer.loading.token_shares import TokenShares
from headrace.trainer.models.attention import Segments

Groups = Mapping[tuple[int, ...], dist.ProcessGroup | None]
"""Process groups by their rising ranks, of `RankGroups.of_sets`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedAttention:
    """What will attend in every layer, once it knows the process groups."""

    parts: tuple[GatheredAttention | PackedSequences, ...]
    members: tuple[tuple[int, ...], ...]
    """The ranks that share the sequences of each of them."""

    def joined(self, groups: Groups) -> AttentionBySequence:
        """Return it with its groups."""
        parts = [
            replace(part, group=groups[ranks]) if isinstance(part, GatheredAttention) else part
            for part, ranks in zip(self.parts, self.members, strict=True)
        ]
        return AttentionBySequence(parts=tuple(parts))

    def __call__(self, *_: Tensor) -> Tensor:
        raise AssertionError("attention is joined with its groups before it runs")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceRows:
    """The rows that one rank has of a microbatch."""

    places: Tensor
    """(T_r,) int64: their rising places in the microbatch."""
    counts: Tensor
    """(n,) int64: how many are of each sample."""
    attention: PlannedAttention

    @classmethod
    def of(
        cls, cu_seqlens: Tensor, members: Sequence[Sequence[int]], rank: int, *, block: int = BLOCK, heads_at_once: int = 1
    ) -> Self:
        """Make those of rank `rank`, on the host. All ranks have the samples that they share in the same order.

        cu_seqlens: (n + 1,) offsets of the samples. members: the rising ranks that share each sample, `rank` among them. Samples
        of the same ranks that follow each other are divided together: they exchange keys and values at once, and a rank may have
        nothing of some of them. Raises UserError where they have fewer blocks than ranks.
        """
        bounds = cu_seqlens.numpy().astype(np.int64)
        places, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        parts, sharing = list[GatheredAttention | PackedSequences](), list[tuple[int, ...]]()
        begin = 0
        for ranks, samples in groupby(tuple(several) for several in members):
            end = begin + len(list(samples))
            offsets = bounds[begin : end + 1] - bounds[begin]
            if len(ranks) == 1:
                own = np.arange(offsets[-1])
                parts.append(PackedSequences(segments=Segments.of(torch.from_numpy(offsets.astype(np.int32)))))
            else:
                fields = [text_field(number) for number in range(1, end - begin + 1)]
                mask = AttentionMask(fields=np.repeat(np.array(fields, np.int64), np.diff(offsets)))
                shares, index = TokenShares.of(mask, len(ranks), block=block), ranks.index(rank)
                own = shares.places(index)
                parts.append(GatheredAttention.of(mask, shares, None, rank=index, heads_at_once=heads_at_once))
            sharing.append(ranks)
            places.append(bounds[begin] + own)
            counts.append(np.diff(np.searchsorted(own, offsets)))
            begin = end
        return cls(
            places=torch.from_numpy(np.concatenate(places)),
            counts=torch.from_numpy(np.concatenate(counts)),
            attention=PlannedAttention(parts=tuple(parts), members=tuple(sharing)),
        )

    def take(self, data: PackedMicrobatch) -> PackedMicrobatch:
        """Return the microbatch of these rows alone, of a whole one on the host: labels and positions stay those of the whole."""
        own = slice_of(data, self.places, 0)
        offsets = cumulative(self.counts)
        return replace(
            own,
            num_targets=int((own.labels != LABEL_IGNORED).sum()),
            rows=data.rows,
            cu_seqlens=offsets,
            pack_offsets=offsets,
        )

    def among(self, places: Tensor) -> Tensor:
        """Return which of some places (t,) in the microbatch, each named once, are of these rows: their rising indices, int64."""
        return torch.isin(places, self.places, assume_unique=True).nonzero().squeeze(1)
