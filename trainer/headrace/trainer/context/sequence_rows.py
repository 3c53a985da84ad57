"""One rank's rows of a packed microbatch whose samples are each shared by some ranks, or on this one alone, as a plan has them.

Attention is causal in each sample, as language models are trained. What is made here needs no process group, so that it can be
made beside the step, for microbatches to come; `PlannedAttention.joined` puts the groups in their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    """The ranks that share each of them."""

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
    """The rows that one rank has of a microbatch, of each sample some."""

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

        cu_seqlens: (n + 1,) offsets of the samples. members: the rising ranks that share each sample, `rank` among them.
        Raises UserError for a sample with fewer blocks than ranks.
        """
        bounds = cu_seqlens.tolist()
        places, counts = list[np.ndarray](), list[int]()
        parts, sharing = list[GatheredAttention | PackedSequences](), list[tuple[int, ...]]()
        alone: list[int] = []  # lengths of the samples that follow each other and are on this rank alone
        for first, end, ranks in zip(bounds[:-1], bounds[1:], members, strict=True):
            own = np.arange(end - first)
            if len(ranks) == 1:
                alone.append(end - first)
            else:
                _end_run(alone, parts, sharing)
                mask = AttentionMask(fields=np.full(end - first, text_field(1), np.int64))
                shares, index = TokenShares.of(mask, len(ranks), block=block), list(ranks).index(rank)
                own = shares.places(index)
                parts.append(GatheredAttention.of(mask, shares, None, rank=index, heads_at_once=heads_at_once))
                sharing.append(tuple(ranks))
            places.append(first + own)
            counts.append(len(own))
        _end_run(alone, parts, sharing)
        return cls(
            places=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *places])),
            counts=torch.tensor(counts, dtype=torch.int64),
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
        """Return which of some rising places (t,) in the microbatch are of these rows: their indices, int64."""
        return torch.isin(places, self.places, assume_unique=True).nonzero().squeeze(1)


def _end_run(alone: list[int], parts: list[GatheredAttention | PackedSequences], sharing: list[tuple[int, ...]]) -> None:
    if alone:
        parts.append(PackedSequences(segments=Segments.of(cumulative(torch.tensor(alone)))))
        sharing.append(())
        alone.clear()
