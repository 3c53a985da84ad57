"""Collectives among the tensor-parallel slices of a stage, as functions that autograd can go through.

Between layers a slice has its share of the rows only (sequence parallelism, Korthikanti et al. 2022, section 4.2.2): of T rows
in n slices, slice i has the S rows from i * S on, where S = ceil(T / n). Rows past T are padding: zeros when they are made, and
dropped where the shares come together. In the shapes, ... is nothing, or the batch of one of layers of `transformers`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

_SUM = dist.ReduceScatterOptions()  # their default, made once


def gather_rows(share: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all slices, (..., T, W), from this slice's share (..., S, W). `num_rows`: T.

    The backward sums the gradients of all slices, and each gets the sum of its share (reduce-scatter).
    """
    return _GatherRows.apply(share, num_rows, group)  # type: ignore[no-any-return]


def sum_to_share(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this slice's share (..., S, W) of the sum of all slices' parts (..., T, W): a reduce-scatter.

    The backward gathers the gradients of all shares.
    """
    return _SumToShare.apply(part, group)  # type: ignore[no-any-return]


def add_sum(x: Tensor, part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x + sum_to_share(part, group)` for x of (S, W), as one node of the graph."""
    return _AddSum.apply(x, part, group)  # type: ignore[no-any-return]


def join_sum(x: Tensor, part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `join_rows(add_sum(x, part, group), T, group)` for a part of (T, W), as one node of the graph.

    Its backward sends nothing: the gradient of all rows, which every slice has, is that of its part.
    """
    return _JoinSum.apply(x, part, group)  # type: ignore[no-any-return]


def split_rows(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this slice's share (..., S, W) of rows (..., T, W) that all slices have.

    The backward gathers the gradients of all shares: every slice gets the whole gradient.
    """
    return _SplitRows.apply(whole, group)  # type: ignore[no-any-return]


def join_rows(share: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all slices, (..., T, W), with which every slice then computes the same. `num_rows`: T.

    So the gradients of all slices are equal, and the backward takes this slice's share of its own.
    """
    return _JoinRows.apply(share, num_rows, group)  # type: ignore[no-any-return]


def sum_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all slices' parts, with which every slice then computes the same.

    So the gradients of all slices are equal, and the backward passes this slice's on to its part.
    """
    return _SumParts.apply(part, group)  # type: ignore[no-any-return]


def reduce(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Replace a contiguous tensor by its sum over the slices, and return it."""
    group.allreduce(part).wait()
    return part


def gather(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all slices, joined along the first dimension. Their shapes are equal."""
    whole = share.new_empty(share.shape[0] * group.size(), *share.shape[1:])
    group._allgather_base(whole, share.contiguous()).wait()
    return whole


def gathered(share: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Return what `gather_rows` does, outside the graph."""
    if share.dim() == 3:
        return gathered(share[0], num_rows, group)[None]
    whole = share.new_empty(len(share) * group.size(), share.shape[1])
    group._allgather_base(whole, share.contiguous()).wait()
    return whole if len(whole) == num_rows else whole[:num_rows]


def summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what `sum_to_share` does, outside the graph."""
    if part.dim() == 3:
        return summed(part[0], group)[None]
    if len(part) % group.size():
        part = _padded(part, group)
    share = part.new_empty(len(part) // group.size(), part.shape[1])
    group._reduce_scatter_base(share, part.contiguous(), _SUM).wait()
    return share


def _added(x: Tensor, part: Tensor, group: dist.ProcessGroup) -> Tensor:
    share = summed(part, group)
    return share.add_(x) if share.dtype == x.dtype else x + share


def _own(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = _padded(whole, group)
    rows = whole.shape[-2] // group.size()
    return whole.narrow(-2, group.rank() * rows, rows).clone()


def _padded(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return rows (..., T, W) with zeros behind them, (..., n * S, W)."""
    missing = -whole.shape[-2] % group.size()
    return functional.pad(whole, (0, 0, 0, missing)) if missing else whole


class PlainFunction(Function):
    """A function whose `apply` does not look for functorch's transforms first, which takes 2 of 6.5 us of a call."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super(Function, cls).apply(*args)  # type: ignore[misc]


class _GatherRows(PlainFunction):
    @staticmethod
    def forward(ctx: Any, share: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(share, num_rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return summed(gradient, ctx.group), None, None


class _SumToShare(PlainFunction):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.num_rows = group, part.shape[-2]
        return summed(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gathered(gradient, ctx.num_rows, ctx.group), None


class _AddSum(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.num_rows, ctx.dtype = group, len(part), part.dtype
        return _added(x, part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, gathered(gradient.to(ctx.dtype), ctx.num_rows, ctx.group), None


class _JoinSum(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.dtype = group, part.dtype
        return gathered(_added(x, part, group), len(part), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _own(gradient, ctx.group), gradient.to(ctx.dtype), None


class _SplitRows(PlainFunction):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.num_rows = group, whole.shape[-2]
        return _own(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gathered(gradient, ctx.num_rows, ctx.group), None


class _JoinRows(PlainFunction):
    @staticmethod
    def forward(ctx: Any, share: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(share, num_rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _own(gradient, ctx.group), None, None


class _SumParts(PlainFunction):
    @staticmethod
    def forward(_: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return reduce(part.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None
