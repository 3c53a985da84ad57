"""Cross entropy over the target tokens of a packed sequence, with a bound on the memory of the logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from headrace.sample import LABEL_IGNORED

MAX_LOGITS = 2**26  # 256 MiB in float32: 441 tokens of a vocabulary of 152,064


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLoss:
    """The summed loss of one microbatch, to be added up over microbatches and ranks and then divided by all targets."""

    loss_sum: Tensor
    """float32 scalar: the loss summed over all targets of the microbatch."""
    target_weight: float
    """What to divide by: the weights of the text tokens that carry loss, 1 each unless the job has `weights`, and 1 for each
    image token of a generator."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """The n tokens of a packed sequence that carry loss."""

    rows: Tensor
    """(n,) int64: the positions that predict them."""
    ids: Tensor
    """(n,) int64: the tokens."""
    weights: Tensor | None = None
    """(n,) float32: by how much the loss of each counts; None: by 1."""

    @classmethod
    def of(cls, labels: Tensor, weights: Tensor | None = None) -> Self:
        """Find the targets in (T,) int64 labels, where `labels[t]` is predicted at t. To be called on the host, which waits.

        weights: (T,) float32, or (0,) or None where each counts 1.
        """
        rows = (labels != LABEL_IGNORED).nonzero().squeeze(1)
        return cls(rows=rows, ids=labels[rows], weights=weights[rows] if weights is not None and len(weights) else None)

    def loss(self, logits: Tensor) -> Tensor:
        """Return the weighted sum of the cross entropies of the (n, vocab) logits, a float32 scalar."""
        if self.weights is None:
            return functional.cross_entropy(logits.float(), self.ids, reduction="sum")
        return self.weighted_sum(functional.cross_entropy(logits.float(), self.ids, reduction="none"))

    def weighted_sum(self, losses: Tensor) -> Tensor:
        """Return the sum of the (n,) losses of the targets, each times its weight."""
        return (losses if self.weights is None else losses * self.weights).sum()

    def gradients(self, of_sum: Tensor) -> Tensor:
        """Return the gradients of the losses by that of their weighted sum: a scalar, or (n, 1)."""
        return of_sum if self.weights is None else (of_sum * self.weights)[:, None]

    def split(self, most: int) -> list[Self]:
        """Return the targets in order, at most so many together."""
        rows, ids = torch.split(self.rows, most), torch.split(self.ids, most)
        weights = [None] * len(rows) if self.weights is None else torch.split(self.weights, most)
        parts = zip(rows, ids, weights, strict=True)
        return [replace(self, rows=of_rows, ids=of_ids, weights=of_weights) for of_rows, of_ids, of_weights in parts]


def token_loss(hidden: Tensor, targets: Targets, output_weight: Tensor, *, max_logits: int = MAX_LOGITS) -> Tensor:
    """Return the sum of the cross entropies of the targets, each times its weight, a float32 scalar.

    hidden: (T, width); output_weight: (vocab, width). Logits exist for at most `max_logits / vocab` tokens at a time; if that is
    fewer than all, the backward pass recomputes them.
    """
    predicting = hidden[targets.rows]
    chunk = max(1, max_logits // output_weight.shape[0])
    if len(predicting) <= chunk:
        logits = functional.linear(predicting, output_weight)
        return targets.loss(logits)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    loss: Tensor = _ChunkedCrossEntropy.apply(predicting, targets, output_weight, chunk, dtype)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of a linear head in chunks of tokens, with matrix products in `dtype`.

    The weight's gradient is summed over the chunks. Autograd would sum it in the dtype of the products, which in bfloat16 loses
    more the more chunks there are. Here it is summed in the dtype of the weight.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Targets, weight: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.targets, ctx.chunk, ctx.dtype = targets, chunk, dtype
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):  # it would cache this cast, which has no gradient, for other uses
            cast = weight.to(dtype)
            for x, y in zip(torch.split(hidden, chunk), targets.split(chunk), strict=True):
                logits = functional.linear(x.to(dtype), cast)
                total += y.loss(logits)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        cast = weight.to(ctx.dtype)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
        chunks = ctx.targets.split(ctx.chunk), *(torch.split(rows, ctx.chunk) for rows in (hidden, of_hidden))
        for y, x, of_x in zip(*chunks, strict=True):
            x = x.to(ctx.dtype)
            of_logits = functional.linear(x, cast).float().softmax(dim=1)
            of_logits[torch.arange(len(x), device=x.device), y.ids] -= 1
            of_logits = of_logits.mul_(y.gradients(gradient)).to(ctx.dtype)
            of_x.copy_(of_logits @ cast)
            if of_weight is not None:
                of_weight += of_logits.T @ x
        return of_hidden, None, of_weight, None, None
