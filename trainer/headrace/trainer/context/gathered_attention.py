"""Attention of one rank's tokens to those of all ranks of a group: keys and values are gathered by heads, while others attend.

After Cornstarch (dissertation, section 3.3.2; arXiv:2503.11367, section 4.3) and Llama 3 (arXiv:2407.21783, section 3.3.2): an
all-gather and not a ring, as a mask of any form then costs nothing but the work that it has, wherever the tokens are. Heads are
gathered a few at a time, so that a rank never holds all keys of all heads, and the gathering of the next ones takes place under
the attention of these. The backward gathers again, and sums the gradients of keys and values by reduce-scatter to the ranks that
have them, the sums of one group of heads under the gradients of the next.

Ranks may have different numbers of tokens: each sends as many rows as the rank with most, the last of which nobody reads. Every
rank of the group calls this with the same mask and the same shapes in the same order: whatever is refused is refused in all of
them, before a collective begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.attention_mask import AttentionMask
from headrace.errors import UserError
from headrace.trainer import collectives
from headrace.trainer.loading.token_shares import TokenShares
from headrace.trainer.models.attention import Segments, packed_attention
from headrace.trainer.models.masked_attention import (
    MaskRuns,
    attend_runs,
    check_heads,
    dtype_of_sums,
    gradients_of_runs,
    masked_attention,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatheredAttention:
    """What attends in every layer of a microbatch: made once for all layers, on the host (`to_device` brings it to a device)."""

    group: dist.ProcessGroup | None
    """The ranks that share the sequence; None: this one has all of it."""
    runs: MaskRuns
    """What the rank's tokens see of the whole sequence."""
    num_ranks: int
    longest: int
    """Number of rows that each rank sends."""
    rows: Tensor
    """(T,) int64: for each token of the sequence, its row among those that all ranks send."""
    heads_at_once: int = 1
    """Heads of keys that are gathered together. Two groups of them are held at a time."""

    @classmethod
    def of(
        cls,
        mask: AttentionMask,
        shares: TokenShares,
        group: dist.ProcessGroup | None,
        *,
        rank: int | None = None,
        heads_at_once: int = 1,
    ) -> Self:
        """Make it for this process, whose rank in the group is the rank of its share.

        rank: that of its share where the group is put in its place later, before it attends. Raises UserError where the shares
        are of other tokens than the mask, or for another number of ranks than the group has.
        """
        size = shares.num_ranks
        if rank is None:
            rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        if size != shares.num_ranks or mask.num_tokens != shares.num_tokens:
            raise UserError(
                f"{shares.num_tokens} tokens are distributed over cp {shares.num_ranks}, but the attention mask is of "
                f"{mask.num_tokens} and the group of {size} processes: make shares of this mask for this group"
            )
        if heads_at_once < 1:
            raise UserError(f"heads_at_once is {heads_at_once}: gather at least one head of keys at a time")
        sent = shares.owners(np.arange(shares.num_tokens)) * shares.longest + shares.rows()
        return cls(
            group=group,
            runs=MaskRuns.of(mask, block=shares.block, chosen=shares.blocks(rank)),
            num_ranks=size,
            longest=shares.longest,
            rows=torch.from_numpy(sent),
            heads_at_once=heads_at_once,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's tokens to all that they see.

        q: (T_r, H, D) and k, v: (T_r, H_kv, D) of the rank's own tokens, in the order of their places; H is a multiple of H_kv.
        Returns (T_r, H, D), zeros for tokens that see nothing. Gradients of k and v are sums over all ranks.

        Raises UserError where the heads do not divide, or the rows are not those of the rank's share.
        """
        check_heads(q.shape[1], k.shape[1])
        if not q.shape[0] == k.shape[0] == v.shape[0] == self.runs.num_queries:
            raise UserError(
                f"the rank's share of the sequence is {self.runs.num_queries} tokens, but there are {q.shape[0]} queries, "
                f"{k.shape[0]} keys and {v.shape[0]} values: give those of its own tokens, and let it gather the others"
            )
        if self.group is None or not self.longest:
            return masked_attention(q, k, v, self.runs)
        attended: Tensor = _Gathered.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return attended

    @property
    def num_rows(self) -> int:
        """Number of the rank's own tokens."""
        return self.runs.num_queries

    def gathered_bytes(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return how many bytes of keys and values a rank receives in a layer's forward, and again in its backward."""
        return (self.num_ranks - 1) * self.longest * 2 * kv_heads * head_dim * dtype.itemsize

    def scattered_bytes(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return how many bytes of their gradients a rank sends to others in a layer's backward."""
        return self.gathered_bytes(kv_heads, head_dim, dtype_of_sums(dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedSequences:
    """What attends in causal sequences of which this rank has all tokens: the kernels of packed sequences."""

    segments: Segments

    @property
    def num_rows(self) -> int:
        """Number of tokens."""
        return sum(self.segments.lengths)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `GatheredAttention`, without any exchange."""
        return packed_attention(q, k, v, self.segments, causal=True)

    def gathered_bytes(self, *_: object) -> int:
        """As of `GatheredAttention`: none."""
        return 0

    scattered_bytes = gathered_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBySequence:
    """What attends where each sequence of a microbatch has ranks of its own, which alone exchange its keys and values."""

    parts: tuple[GatheredAttention | PackedSequences, ...]
    """Of the sequences of which this rank has tokens, in an order that all ranks have."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `GatheredAttention`, with the rows of one sequence behind those of the sequence before."""
        counts = [part.num_rows for part in self.parts]
        split = zip(self.parts, *(torch.split(x, counts) for x in (q, k, v)), strict=True)
        return torch.cat([part(*rows) for part, *rows in split])

    def gathered_bytes(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """As of `GatheredAttention`, of all its sequences."""
        return sum(part.gathered_bytes(kv_heads, head_dim, dtype) for part in self.parts)

    def scattered_bytes(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """As of `GatheredAttention`, of all its sequences."""
        return sum(part.scattered_bytes(kv_heads, head_dim, dtype) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Heads:
    """Heads of keys that are gathered together, and those of queries that attend to them."""

    keys: slice
    queries: slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sum:
    """Gradients of keys and values of some heads that are being summed."""

    work: Any
    numbers: Tensor
    """What this rank has of them; held until the sum is done."""
    share: Tensor
    """(longest, 2, h, D): the sums of this rank's tokens."""
    heads: _Heads


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: GatheredAttention) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.attention = attention
        output = torch.empty_like(q)
        for heads, keys, values in _gather(attention, _groups(q, k, attention.heads_at_once), k, v):
            output[:, heads.queries] = attend_runs(q[:, heads.queries], keys, values, attention.runs)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        attention: GatheredAttention = ctx.attention
        of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        pending: _Sum | None = None
        for heads, keys, values in _gather(attention, _groups(q, k, attention.heads_at_once), k, v):
            of_q[:, heads.queries], of_keys, of_values = gradients_of_runs(
                q[:, heads.queries], keys, values, grad[:, heads.queries], attention.runs
            )
            following = _begin_sum(attention, heads, of_keys, of_values)
            if pending is not None:
                _end_sum(pending, of_k, of_v)
            pending = following
        if pending is not None:
            _end_sum(pending, of_k, of_v)
        return of_q, of_k, of_v, None


def _groups(q: Tensor, k: Tensor, heads_at_once: int) -> list[_Heads]:
    """Return the heads of keys, so many at a time, with the neighbouring heads of queries that share each."""
    shared, num_heads = q.shape[1] // k.shape[1], k.shape[1]
    bounds = [(first, min(first + heads_at_once, num_heads)) for first in range(0, num_heads, heads_at_once)]
    return [_Heads(keys=slice(first, end), queries=slice(first * shared, end * shared)) for first, end in bounds]


def _gather(attention: GatheredAttention, groups: list[_Heads], k: Tensor, v: Tensor) -> Iterator[tuple[_Heads, Tensor, Tensor]]:
    """Yield each group of heads with its keys and values (T, h, D) of the whole sequence, the next ones being on their way."""
    pending = _begin_gather(attention, groups[0], k, v)
    for number, heads in enumerate(groups):
        work, _, received = pending
        if number + 1 < len(groups):
            pending = _begin_gather(attention, groups[number + 1], k, v)
        work.wait()
        whole = received.index_select(0, attention.rows)
        yield heads, whole[:, 0], whole[:, 1]


def _begin_gather(attention: GatheredAttention, heads: _Heads, k: Tensor, v: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Begin to gather some heads. Returns the work, what is sent, which is held until it is done, and what is received."""
    own = torch.stack((k[:, heads.keys], v[:, heads.keys]), dim=1)
    sent = own if len(own) == attention.longest else torch.cat((own, own.new_zeros(attention.longest - len(own), *own.shape[1:])))
    received = sent.new_empty(attention.num_ranks * attention.longest, *sent.shape[1:])
    return collectives.all_gather(received, sent, attention.group, async_op=True), sent, received


def _begin_sum(attention: GatheredAttention, heads: _Heads, of_keys: Tensor, of_values: Tensor) -> _Sum:
    """Begin to sum the gradients (T, h, D) of some heads over the ranks."""
    of_both = torch.stack((of_keys, of_values), dim=1)
    numbers = of_both.new_zeros(attention.num_ranks * attention.longest, *of_both.shape[1:]).index_copy_(
        0, attention.rows, of_both
    )
    share = numbers.new_empty(attention.longest, *numbers.shape[1:])
    work = collectives.reduce_scatter(share, numbers, attention.group, async_op=True)
    return _Sum(work=work, numbers=numbers, share=share, heads=heads)


def _end_sum(pending: _Sum, of_k: Tensor, of_v: Tensor) -> None:
    """Wait for a sum, and write it into the gradients of this rank's keys and values."""
    pending.work.wait()
    for number, gradient in enumerate((of_k, of_v)):
        gradient[:, pending.heads.keys] = pending.share[: len(gradient), number]
