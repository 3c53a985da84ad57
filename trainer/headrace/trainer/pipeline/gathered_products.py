"""Products of gathered rows with several matrices, as one node of the graph: the way into attention and MLP of a slice.

One autograd function of Python replaces that of the gather, a node of each matrix and the sums of their gradients by the rows, so
that a slice costs the host less (the idea of Megatron-LM's `ColumnParallelLinear`). The matrices stay several parameters, as
checkpoints name them: a single one made whole layers 4 % faster on 8 rows, and no faster on 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from headrace.trainer.models.block import cast_once
from headrace.trainer.pipeline.slice_collectives import PlainFunction, gather_rows, gathered, summed
from headrace.trainer.pipeline.weight_gradients import puts_off


def gathered_products(
    share: Tensor, num_rows: int, matrices: Sequence[nn.Linear], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Return the product (T, out) of each column-parallel matrix and the rows of all slices, from this slice's share (S, W).

    `num_rows`: T. The backward sums the gradients of the rows over all slices, and each gets the sum of its share. Under autocast
    the rows are gathered in its dtype.
    """
    share = cast_once(share)
    if puts_off(matrices[0]):
        rows = gather_rows(share, num_rows, group)
        return tuple([matrix(rows) for matrix in matrices])
    tensors = [tensor for matrix in matrices for tensor in matrix._parameters.values()]  # an attribute of a module is slower
    return _GatheredProducts.apply(share, num_rows, group, *tensors)  # type: ignore[no-any-return]


class _GatheredProducts(PlainFunction):
    """Takes weight and bias, or None, of each matrix in turn."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, num_rows: int, group: dist.ProcessGroup, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        rows = gathered(share, num_rows, group)
        weights = tensors[::2]
        ctx.group = group
        ctx.save_for_backward(rows if True in ctx.needs_input_grad[3:] else None, *weights)
        return tuple([functional.linear(rows, w, b) for w, b in zip(weights, tensors[1::2], strict=True)])  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        of_share, _, _, *of_tensors = ctx.needs_input_grad
        found: list[Tensor | None] = [summed(_of_rows(gradients, weights), ctx.group) if of_share else None, None, None]
        for index, gradient in enumerate(gradients):
            found.append(gradient.T @ rows if of_tensors[2 * index] else None)  # autograd casts it to the weight's dtype
            found.append(gradient.sum(0) if of_tensors[2 * index + 1] else None)
        return tuple(found)


def _of_rows(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the gradient (T, W) of the rows from those of the products, each (T, out)."""
    first, *others = gradients
    if first.dtype == weights[0].dtype:
        return _sum_of_products(first, others, weights)
    # The forward ran under autocast, whose cache has the weights' casts. Its context manager would clear that: in a backward's
    # thread it is the outermost.
    device = first.device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, first.dtype)
    torch.set_autocast_enabled(device, True)
    try:
        return _sum_of_products(first, others, weights)
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _sum_of_products(first: Tensor, others: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total = first @ weights[0]
    for gradient, weight in zip(others, weights[1:], strict=True):
        total = torch.addmm(total, gradient, weight)
    return total
