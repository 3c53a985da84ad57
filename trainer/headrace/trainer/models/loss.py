"""Cross entropy over the target tokens of a packed sequence, with a bound on the memory of the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from headrace.sample import LABEL_IGNORED

MAX_LOGITS = 2**28
"""1 GiB in float32: 1,664 targets of a vocabulary of 152,064. With fewer, adding to the weight's gradient takes longer than the
products that are added."""
_TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLoss:
    """The summed loss of one microbatch, to be added up over microbatches and ranks and then divided by all targets."""

    loss_sum: Tensor
    """float32 scalar: the loss summed over all targets of the microbatch."""
    target_weight: float
    """What to divide by: the weights of the text tokens that carry loss, 1 each unless the job has `weights`, and 1 for each
    image token of a generator."""
    is_shared: bool = False
    """Whether processes that share its sequences compute the rest of it, which this one meets in the backward, even if it has no
    target itself. In a pipeline, whether the LLM has `cp`."""


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


def token_loss(
    hidden: Tensor,
    targets: Targets,
    output_weight: Tensor,
    *,
    max_logits: int = MAX_LOGITS,
    at_once: bool = True,
    compiled: bool = False,
) -> Tensor:
    """Return the sum of the cross entropies of the targets, each times its weight, a float32 scalar.

    hidden: (T, width); output_weight: (vocab, width). Logits exist for at most `max_logits / vocab` targets at a time. at_once:
    whether the gradients are computed together with the loss, for which a gradient of `output_weight` is held until the backward;
    else the backward computes the logits again, which takes a third more time and is for microbatches that wait for theirs.
    compiled: whether torch compiles what is done with logits.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    learns = torch.is_grad_enabled() and hidden.requires_grad, torch.is_grad_enabled() and output_weight.requires_grad
    chunk = targets_at_a_time(len(output_weight), max_logits)
    settings = _Settings(chunk=chunk, dtype=dtype, at_once=at_once, compiled=compiled, learns=learns)
    loss: Tensor = _LinearCrossEntropy.apply(hidden[targets.rows], targets, output_weight, settings)  # type: ignore[no-untyped-call]
    return loss


def targets_at_a_time(vocabulary: int, max_logits: int = MAX_LOGITS) -> int:
    """Return for how many targets there are logits at a time: a multiple of what a matrix product is tiled by, if it can be."""
    most = max(1, max_logits // vocabulary)
    return most - most % _TILE if most > _TILE else most


def losses_and_gradients(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (n,) float32 cross entropies of (n, vocab) logits, and their gradients in the logits' dtype.

    ids: (n,) int64. All is computed in float32. The gradient of a target's own logit is exact also where the model is nearly sure
    of it: it is not the rounded probability, less 1.
    """
    log_probabilities = functional.log_softmax(logits.float(), dim=1).gather(1, ids[:, None])
    of_targets = torch.expm1(log_probabilities).to(logits.dtype)
    return -log_probabilities.squeeze(1), logits.softmax(dim=1).scatter(1, ids[:, None], of_targets)


@cache
def _compiled_losses_and_gradients() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(losses_and_gradients, dynamic=True)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which may have a dtype with more bits: on a GPU, nothing is rounded before it is added."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    chunk: int
    """Number of targets that have logits at a time."""
    dtype: torch.dtype
    """Of matrix products."""
    at_once: bool
    compiled: bool
    learns: tuple[bool, bool]
    """Whether gradients of the hidden states, and of the weight, are asked for."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of a linear head in chunks of targets.

    The weight's gradient is summed over the chunks. Autograd would sum it in the dtype of the products, which in bfloat16 loses
    more the more chunks there are. Here it is summed in the dtype of the weight.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Targets, weight: Tensor, settings: _Settings) -> Tensor:
        if any(settings.learns) and settings.at_once:
            total, ctx.gradients = _loss_and_gradients(hidden, targets, weight, settings)
            return total
        with torch.autocast(hidden.device.type, enabled=False):  # it would cache this cast, which has no gradient, for other uses
            cast, total = weight.to(settings.dtype), torch.zeros((), device=hidden.device)
            for x, y in zip(torch.split(hidden, settings.chunk), targets.split(settings.chunk), strict=True):
                total += y.loss(functional.linear(x.to(settings.dtype), cast))
        if any(settings.learns):
            ctx.save_for_backward(hidden, weight)
            ctx.targets, ctx.settings = targets, settings
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saved_tensors:
            hidden, weight = ctx.saved_tensors
            _, gradients = _loss_and_gradients(hidden, ctx.targets, weight, ctx.settings)
        else:
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                raise RuntimeError("the gradients of this loss are used up: call backward once, or token_loss with at_once=False")
        of_hidden, of_weight = (None if one is None else one.mul_(gradient) for one in gradients)
        return of_hidden, None, of_weight, None


def _loss_and_gradients(
    hidden: Tensor, targets: Targets, weight: Tensor, settings: _Settings
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return the summed loss, and its gradients of the hidden states and of the weight where they are asked for."""
    learns_hidden, learns_weight = settings.learns
    of_hidden = torch.empty_like(hidden) if learns_hidden else None
    of_weight = torch.zeros_like(weight) if learns_weight else None
    total, parts = torch.zeros((), device=hidden.device), targets.split(settings.chunk)
    of_loss = _compiled_losses_and_gradients() if settings.compiled else losses_and_gradients
    with torch.autocast(hidden.device.type, enabled=False):
        cast = weight.to(settings.dtype)
        for begin, y in zip(range(0, len(parts) * settings.chunk, settings.chunk), parts, strict=True):
            rows = slice(begin, begin + settings.chunk)
            x = hidden[rows].to(settings.dtype)
            losses, of_logits = of_loss(functional.linear(x, cast), y.ids)
            total += y.weighted_sum(losses)
            if of_hidden is not None:
                of_x = of_logits @ cast
                of_hidden[rows] = of_x if y.weights is None else of_x * y.weights[:, None]
            if of_weight is not None:
                add_product(of_weight, of_logits.T, x if y.weights is None else (x * y.weights[:, None]).to(x.dtype))
    return total, (of_hidden, of_weight)
