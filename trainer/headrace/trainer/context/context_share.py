"""One rank's share of a sequence, for a loop of one's own: its tokens, its attention to all others, and its media.

    share = ContextShare.of(mask, group)  # once a microbatch, on the host
    x = embed(share.take(input_ids))
    ...
    mixed = share.attention(q, k, v)  # in every layer
    loss = cross_entropy(head(x), share.take(labels), reduction="sum")

Sums of losses and gradients over the group are those of one rank that has the whole sequence (docs/context.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.attention_mask import AttentionMask, Ints
from headrace.block_distribution import BLOCK
from headrace.trainer.context.gathered_attention import AttentionBySequence, GatheredAttention
from headrace.trainer.context.media_rows import MediaRows
from headrace.trainer.loading.token_shares import TokenShares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextShare:
    """The tokens of a sequence that this process has, of a group that has all of them."""

    shares: TokenShares
    group: dist.ProcessGroup | None
    places: Tensor
    """(T_r,) int64: the rising places of the rank's tokens in the sequence, which are the rows of its tensors."""
    attention: GatheredAttention | AttentionBySequence
    """What attends in every layer, on the host: of all sequences as one, or of each by itself (`degree_share`).
    `headrace.trainer.loading.device_copy.to_device` brings it to a device."""

    @classmethod
    def of(
        cls,
        mask: AttentionMask,
        group: dist.ProcessGroup | None,
        *,
        block: int = BLOCK,
        heads_at_once: int = 1,
        shares: TokenShares | None = None,
    ) -> Self:
        """Make this process's share of a sequence with this mask. All processes of `group` call it alike; None: it has all.

        heads_at_once: heads of keys that are gathered together. shares: a distribution of one's own; None: by blocks of `block`
        tokens, with level work.

        Raises UserError where there are fewer blocks than ranks, or no token sees another.
        """
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        shares = shares or TokenShares.of(mask, size, block=block)
        return cls(
            shares=shares,
            group=group,
            attention=GatheredAttention.of(mask, shares, group, heads_at_once=heads_at_once),
            places=torch.from_numpy(shares.places(rank)),
        )

    def take(self, values: Tensor, dim: int = -1) -> Tensor:
        """Return of values of all tokens, which lie along `dim`, those of this rank's: ids, labels, positions, weights.

        Labels are to stand at the tokens that predict them, as `PackedMicrobatch.labels` do: the next token may be elsewhere.
        """
        return values.index_select(dim, self.places.to(values.device))

    def media(self, places: Ints, encoders: Ints) -> MediaRows:
        """Return where the tokens of media go: see `MediaRows.of`."""
        return MediaRows.of(places, encoders, self.shares, self.group)
