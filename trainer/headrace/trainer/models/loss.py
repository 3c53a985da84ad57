"""Cross entropy over the target tokens of a packed sequence, with a bound on the memory of the logits."""

from __future__ import annotations

from dataclasses import dataclass
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
    num_targets: int
    """Number of targets: the text tokens that carry loss plus, with a generator, the image tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """The n tokens of a packed sequence that carry loss."""

    rows: Tensor
    """(n,) int64: the positions that predict them."""
    ids: Tensor
    """(n,) int64: the tokens."""

    @classmethod
    def of(cls, labels: Tensor) -> Self:
        """Find the targets in (T,) int64 labels, where `labels[t]` is predicted at t. To be called on the host, which waits."""
        rows = (labels != LABEL_IGNORED).nonzero().squeeze(1)
        return cls(rows=rows, ids=labels[rows])


def token_loss(hidden: Tensor, targets: Targets, output_weight: Tensor, *, max_logits: int = MAX_LOGITS) -> Tensor:
    """Return the sum of the cross entropies of the targets, a float32 scalar.

    hidden: (T, width); output_weight: (vocab, width). Logits exist for at most `max_logits / vocab` tokens at a time; if that is
    fewer than all, the backward pass recomputes them.
    """
    predicting = hidden[targets.rows]
    chunk = max(1, max_logits // output_weight.shape[0])
    if len(predicting) <= chunk:
        logits = functional.linear(predicting, output_weight)
        return functional.cross_entropy(logits.float(), targets.ids, reduction="sum")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    loss: Tensor = _ChunkedCrossEntropy.apply(predicting, targets.ids, output_weight, chunk, dtype)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of a linear head in chunks of tokens, with matrix products in `dtype`.

    The weight's gradient is summed over the chunks. Autograd would sum it in the dtype of the products, which in bfloat16 loses
    more the more chunks there are. Here it is summed in the dtype of the weight.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, weight: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, targets, weight)
        ctx.chunk, ctx.dtype = chunk, dtype
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):  # it would cache this cast, which has no gradient, for other uses
            cast = weight.to(dtype)
            for x, y in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True):
                logits = functional.linear(x.to(dtype), cast)
                total += functional.cross_entropy(logits.float(), y, reduction="sum")
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, weight = ctx.saved_tensors
        cast = weight.to(ctx.dtype)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
        for x, y, of_x in zip(*(torch.split(rows, ctx.chunk) for rows in (hidden, targets, of_hidden)), strict=True):
            x = x.to(ctx.dtype)
            of_logits = functional.linear(x, cast).float().softmax(dim=1)
            of_logits[torch.arange(len(y), device=y.device), y] -= 1
            of_logits = of_logits.mul_(gradient).to(ctx.dtype)
            of_x.copy_(of_logits @ cast)
            if of_weight is not None:
                of_weight += of_logits.T @ x
        return of_hidden, None, of_weight, None, None
