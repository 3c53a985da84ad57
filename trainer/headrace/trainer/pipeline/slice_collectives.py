"""Collectives among the slices of a stage, as functions that autograd can go through.

Between layers a tensor-parallel slice has its share of the rows only; `SliceRows` says which, and what T, S and ... are in the
shapes. Context-parallel slices gather what each has received from encoders (`gather_all`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from headrace.trainer.pipeline.slice_rows import SliceRows


def gather_rows(share: Tensor, rows: SliceRows) -> Tensor:
    """Return the rows of all slices, (..., T, W), from this slice's share (..., S, W).

    The backward sums the gradients of all slices, and each gets the sum of its share (reduce-scatter).
    """
    return _GatherRows.apply(share, rows)  # type: ignore[no-any-return]


def gather_all(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows (n S, W) of all n slices behind each other, from this slice's (S, W), to compute something else on each.

    The backward sums the gradients of all slices, and each gets the sum of its own rows, whatever it has used.
    """
    return gather_rows(share, SliceRows(share.shape[0] * group.size(), group))


def sum_to_share(part: Tensor, rows: SliceRows) -> Tensor:
    """Return this slice's share (..., S, W) of the sum of all slices' parts (..., T, W): a reduce-scatter.

    The backward gathers the gradients of all shares.
    """
    return _SumToShare.apply(part, rows)  # type: ignore[no-any-return]


def add_sum(x: Tensor, part: Tensor, rows: SliceRows) -> Tensor:
    """Return `x + sum_to_share(part, rows)` for x of (S, W), as one node of the graph."""
    return _AddSum.apply(x, part, rows)  # type: ignore[no-any-return]


def join_sum(x: Tensor, part: Tensor, rows: SliceRows) -> Tensor:
    """Return `join_rows(add_sum(x, part, rows), rows)` for a part of (T, W), as one node of the graph.

    Its backward sends nothing: the gradient of all rows, which every slice has, is that of its part.
    """
    return _JoinSum.apply(x, part, rows)  # type: ignore[no-any-return]


def split_rows(whole: Tensor, rows: SliceRows) -> Tensor:
    """Return this slice's share (..., S, W) of rows (..., T, W) that all slices have.

    The backward gathers the gradients of all shares: every slice gets the whole gradient.
    """
    return _SplitRows.apply(whole, rows)  # type: ignore[no-any-return]


def join_rows(share: Tensor, rows: SliceRows) -> Tensor:
    """Return the rows of all slices, (..., T, W), with which every slice then computes the same.

    So the gradients of all slices are equal, and the backward takes this slice's share of its own.
    """
    return _JoinRows.apply(share, rows)  # type: ignore[no-any-return]


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


def added(x: Tensor, share: Tensor) -> Tensor:
    """Return the sum of a residual stream and a share of a branch, which is overwritten where its dtype is the stream's."""
    return share.add_(x) if share.dtype == x.dtype else x + share


class PlainFunction(Function):
    """A function whose `apply` does not look for functorch's transforms first, which takes 2 of 6.5 us of a call."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super(Function, cls).apply(*args)  # type: ignore[misc]


class _GatherRows(PlainFunction):
    @staticmethod
    def forward(ctx: Any, share: Tensor, rows: SliceRows) -> Tensor:
        ctx.rows = rows
        return rows.gather(share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rows.sum(gradient), None


class _SumToShare(PlainFunction):
    @staticmethod
    def forward(ctx: Any, part: Tensor, rows: SliceRows) -> Tensor:
        ctx.rows = rows
        return rows.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rows.gather(gradient), None


class _AddSum(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor, rows: SliceRows) -> Tensor:
        ctx.rows, ctx.dtype = rows, part.dtype
        return added(x, rows.sum(part))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, ctx.rows.gather(gradient.to(ctx.dtype)), None


class _JoinSum(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor, rows: SliceRows) -> Tensor:
        ctx.rows, ctx.dtype = rows, part.dtype
        return rows.gather(added(x, rows.sum(part)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rows.own(gradient), gradient.to(ctx.dtype), None


class _SplitRows(PlainFunction):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: SliceRows) -> Tensor:
        ctx.rows = rows
        return rows.own(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rows.gather(gradient), None


class _JoinRows(PlainFunction):
    @staticmethod
    def forward(ctx: Any, share: Tensor, rows: SliceRows) -> Tensor:
        ctx.rows = rows
        return rows.gather(share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rows.own(gradient), None


class _SumParts(PlainFunction):
    @staticmethod
    def forward(_: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return reduce(part.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None
