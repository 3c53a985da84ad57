"""The matrices of a slice, each as one node of the graph with the exchange of rows in front of it or behind it.

One autograd function of Python replaces those of an exchange and of a matrix, so that a slice costs the host less (the idea of
Megatron-LM's `ColumnParallelLinear`). And it overlaps what the slices send with what they compute, as far as a microbatch's rows
are in several pieces (`SliceRows`): products are computed with one piece while the next is gathered, and a piece of the products
is summed while the next is computed (StepCCL: DistTrain, Zhang et al. 2024, section 7). Gradients of rows are summed while those
of the weights are computed, however many pieces there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.trainer.models.block import cast_once
from headrace.trainer.pipeline.slice_collectives import PlainFunction, add_sum, added, gather_rows
from headrace.trainer.pipeline.slice_rows import SliceRows
from headrace.trainer.pipeline.weight_gradients import puts_off


def gathered_product(share: Tensor, rows: SliceRows, matrix: nn.Linear) -> Tensor:
    """Return the product (T, out) of a column-parallel matrix and the rows of all slices, from this slice's share (S, W).

    The backward sums the gradients of the rows over all slices, and each gets the sum of its share. Under autocast the rows are
    gathered in its dtype.
    """
    share = cast_once(share)
    if _does_more(matrix):
        product: Tensor = matrix(gather_rows(share, rows))
        return product
    return _GatheredProduct.apply(share, rows, *matrix._parameters.values())  # type: ignore[no-any-return]  # attributes are slower


def add_summed_product(x: Tensor, inner: Tensor, rows: SliceRows, matrix: nn.Linear) -> Tensor:
    """Return x (S, W) + this slice's share of the slices' sum of a row-parallel matrix's products with inner (T, in)."""
    if rows.pieces == 1 or _does_more(matrix):
        return add_sum(x, matrix(inner), rows)
    return _AddSummedProduct.apply(x, inner, rows, *matrix._parameters.values())  # type: ignore[no-any-return]


def _does_more(matrix: nn.Linear) -> bool:
    """Whether a matrix has to be called as a module, since its gradients are put off, or values of its product are dropped."""
    return puts_off(matrix) or bool(matrix._forward_hooks)


class _GatheredProduct(PlainFunction):
    @staticmethod
    def forward(ctx: Any, share: Tensor, rows: SliceRows, weight: Tensor, bias: Tensor | None) -> Tensor:
        whole, works = rows.start_gather(share)
        ctx.rows = rows
        ctx.save_for_backward(whole if ctx.needs_input_grad[2] else None, weight)
        products = []
        for work, (piece,) in zip(works, rows.piecewise(whole), strict=True):
            work.wait()
            products.append(functional.linear(piece, weight, bias))
        return products[0] if len(products) == 1 else torch.cat(products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole, weight = ctx.saved_tensors
        rows: SliceRows = ctx.rows
        of_share, _, of_weight, of_bias = ctx.needs_input_grad
        share, works = None, []
        if of_share:
            share = gradient.new_empty(rows.num_own, weight.shape[1])
            for index, (piece,) in enumerate(rows.piecewise(gradient)):
                works.append(rows.start_sum(_product(piece, weight), share, index))
        of_rows = gradient.T @ whole if of_weight else None  # autograd casts it to the weight's dtype
        of_all = gradient.sum(0) if of_bias else None
        for work in works:
            work.wait()
        return share, None, of_rows, of_all


class _AddSummedProduct(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Tensor, rows: SliceRows, weight: Tensor, bias: Tensor | None) -> Tensor:
        share, works = None, []
        for index, (piece,) in enumerate(rows.piecewise(inner)):
            part = functional.linear(piece, weight, bias)
            if share is None:
                share = part.new_empty(rows.num_own, part.shape[1])
            works.append(rows.start_sum(part, share, index))
        assert share is not None, "there is a piece"
        ctx.rows, ctx.dtype = rows, share.dtype
        ctx.save_for_backward(inner if ctx.needs_input_grad[3] else None, weight)
        for work in works:
            work.wait()
        return added(x, share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inner, weight = ctx.saved_tensors
        rows: SliceRows = ctx.rows
        of_x, of_inner, _, of_weight, of_bias = ctx.needs_input_grad
        whole, works = rows.start_gather(gradient.to(ctx.dtype))
        products = []
        for work, (piece,) in zip(works, rows.piecewise(whole), strict=True):
            work.wait()
            if of_inner:
                products.append(_product(piece, weight))
        return (
            gradient if of_x else None,
            (products[0] if len(products) == 1 else torch.cat(products)) if of_inner else None,
            None,
            whole.T @ inner if of_weight else None,
            whole.sum(0) if of_bias else None,
        )


def _product(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient (T, in) of the rows that a matrix has taken, from that of their product (T, out)."""
    if gradient.dtype == weight.dtype:
        return gradient @ weight
    # The forward ran under autocast, whose cache has the weight's cast. Its context manager would clear that: in a backward's
    # thread it is the outermost.
    device = gradient.device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, gradient.dtype)
    torch.set_autocast_enabled(device, True)
    try:
        return gradient @ weight
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
