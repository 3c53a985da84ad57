"""Gradients of weights apart from those of inputs: what schedule `zero-bubble` fills the time with in which a stage would wait.

The backward of a linear layer is two products that do not need each other. For the gradient of its input the stage in front
waits; for that of its weights nobody does, until the step ends. So a backward computes the former and keeps what the latter
needs. What else learns stays in the backward: norms and embeddings, which are small, and the LLM's head, whose loss is computed
in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Left(NamedTuple):
    """What a backward has left to do."""

    layer: nn.Linear
    x: Tensor
    """(..., in) the layer's input."""
    gradient: Tensor
    """(..., out) of the layer's output."""


class WeightGradients:
    """Of the linear layers of a module that learn: from now on its backward leaves them to whoever takes them."""

    def __init__(self, module: nn.Module) -> None:
        self._left: list[_Left] = []
        for layer in module.modules():
            if type(layer) is nn.Linear and layer.weight.requires_grad:  # others may compute something else
                layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]

    def take(self) -> Callable[[], None]:
        """Adds to `grad`, when it is called, what the backwards have left since the last time. To be called once."""
        left = self._left.copy()
        self._left.clear()
        return partial(_add_gradients, left)

    def _forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # once, and kept as it is computed with
        y: Tensor = _Linear.apply(x, layer.weight, layer.bias, layer, self._left)  # type: ignore[no-untyped-call]
        return y


class _Linear(torch.autograd.Function):
    """`functional.linear` whose backward keeps what the gradients of its weights need instead of computing them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, left: list[_Left]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.left = layer, left
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.left.append(_Left(ctx.layer, x.detach(), gradient))
        of_x = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return of_x, None, None, None, None


@torch.no_grad()
def _add_gradients(left: Sequence[_Left]) -> None:
    for layer, x, gradient in left:
        rows = gradient.reshape(-1, gradient.shape[-1])
        _add(layer.weight, rows.T @ x.reshape(-1, x.shape[-1]))
        if layer.bias is not None and layer.bias.requires_grad:
            _add(layer.bias, rows.sum(0))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
