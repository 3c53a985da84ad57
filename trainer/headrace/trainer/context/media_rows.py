"""Tokens of media, from the ranks that encode them to the ranks that have their placeholders: one all-to-all of a kind of media.

All ranks of the group know the whole microbatch's layout, and so how many rows each sends to each: no lengths are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.attention_mask import Ints
from headrace.errors import HeadraceError
from headrace.trainer.loading.token_shares import TokenShares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaRows:
    """Where the tokens of one kind of media go, as one rank of the group sees it."""

    group: dist.ProcessGroup | None
    order: Tensor
    """(e,) int64: the tokens that this rank encodes, in the order in which it sends them."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    """Number of tokens to, and from, each rank."""
    rows: Tensor
    """(p,) int64: the rows of this rank's share that are placeholders, in the order in which their tokens come."""

    @classmethod
    def of(cls, places: Ints, encoders: Ints, shares: TokenShares, group: dist.ProcessGroup | None) -> Self:
        """Make them for t tokens, in the order of the media.

        places: (t,) their placeholders in the sequence. encoders: (t,) the ranks that encode them, each its own in this order.
        """
        rank = dist.get_rank(group) if group is not None else 0
        owners = shares.owners(places)
        own, kept = np.flatnonzero(encoders == rank), np.flatnonzero(owners == rank)
        kept = kept[np.argsort(encoders[kept], kind="stable")]
        return cls(
            group=group,
            order=torch.from_numpy(np.argsort(owners[own], kind="stable")),
            sent=tuple(np.bincount(owners[own], minlength=shares.num_ranks).tolist()),
            received=tuple(np.bincount(encoders[kept], minlength=shares.num_ranks).tolist()),
            rows=torch.from_numpy(shares.rows()[places[kept]]),
        )

    def fill(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return this rank's rows x (T_r, width) with the tokens of media in the place of its placeholders.

        tokens: (e, width) that this rank has encoded, in the order of the media. On all ranks they are to require gradients, or
        on none, those without a row too: the backward sends gradients back. Raises HeadraceError for another number of tokens.
        """
        if len(tokens) != len(self.order):
            raise HeadraceError(
                f"{len(tokens)} tokens of media were encoded for {len(self.order)} placeholders: preprocessor and trainer "
                "disagree on the patch grid or the mel frames"
            )
        sorted_tokens = tokens.to(x.dtype)[self.order]
        if self.group is not None:
            sorted_tokens = _Exchange.apply(sorted_tokens, self.sent, self.received, self.group)  # type: ignore[no-untyped-call]
        return x.index_copy(0, self.rows, sorted_tokens)


def encoding_ranks(lengths: Ints, num_ranks: int) -> Ints:
    """Give media of these lengths to ranks, the longest first, each to the rank with the least so far: (m,) ranks."""
    ranks, loads = np.zeros(len(lengths), np.int64), np.zeros(num_ranks, np.int64)
    for medium in np.argsort(-lengths, kind="stable"):
        ranks[medium] = loads.argmin()
        loads[ranks[medium]] += lengths[medium]
    return ranks


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows, whose gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.splits = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.splits
        return _exchanged(grad, received, sent, group), None, None, None


def _exchanged(rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    output = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(output, rows.contiguous(), list(received), list(sent), group=group)
    return output
