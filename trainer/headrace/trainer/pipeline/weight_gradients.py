"""Weight gradients computed separately from input gradients: under `zero-bubble`, they fill the time a stage would wait.

The backward of a linear layer is two independent matrix products. The stage before waits for the gradient of the layer's input;
nothing waits for the gradient of its weights until the step ends. So a backward computes the former, and keeps the tensors that
the latter needs. Other trainable parameters get their gradients in the backward: norms and embeddings, which are small, and the
LLM's head, whose loss is computed in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.trainer.models.fused_linear import FusedLinear


class _DeferredGradient(NamedTuple):
    """The weight gradient of one linear layer that a backward put off, with the tensors it needs."""

    layer: nn.Linear
    x: Tensor
    """(..., in) input of the layer."""
    gradient: Tensor
    """(..., out) gradient of the layer's output."""


class WeightGradients:
    """Makes the backwards of a module put off the weight gradients of its trainable linear layers until they are taken."""

    def __init__(self, module: nn.Module) -> None:
        self._deferred: list[_DeferredGradient] = []
        for layer in module.modules():
            # Another subclass may compute something else.
            if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, FusedLinear) and layer.weight.requires_grad:
                layer.forward = partial(self._forward, layer)  # type: ignore[method-assign]

    def take(self) -> Callable[[], None]:
        """Return a function that adds to `grad` the weight gradients put off since the last `take`. Call the function once."""
        deferred = self._deferred.copy()
        self._deferred.clear()
        return partial(_add_gradients, deferred)

    def _forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # cast once, and kept in that dtype for the weight gradient
        y: Tensor = _Linear.apply(x, layer.weight, layer.bias, layer, self._deferred)  # type: ignore[no-untyped-call]
        return y


def puts_off(layer: nn.Linear) -> bool:
    """Whether some `WeightGradients` computes the layer, so that it must be called as a module."""
    return "forward" in vars(layer)


class _Linear(torch.autograd.Function):
    """`functional.linear` whose backward puts off the gradients of weight and bias, and keeps the tensors that they need."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, deferred: list[_DeferredGradient]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.deferred = layer, deferred
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.deferred.append(_DeferredGradient(ctx.layer, x.detach(), gradient))
        of_x = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return of_x, None, None, None, None


@torch.no_grad()
def _add_gradients(deferred: Sequence[_DeferredGradient]) -> None:
    for layer, x, gradient in deferred:
        rows = gradient.reshape(-1, gradient.shape[-1])
        _add(layer.weight, rows.T @ x.reshape(-1, x.shape[-1]))
        if layer.bias is not None and layer.bias.requires_grad:
            _add(layer.bias, rows.sum(0))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
