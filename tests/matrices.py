"""Weights and gradients of a model, by the names of checkpoints, in which fused matrices are several."""

from __future__ import annotations

from torch import Tensor, nn

from headrace.trainer.models.fused_linear import parts_of


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Views of the weights."""
    return {part.name: part.of(parameter.detach()) for parameter, fused in parts_of(module) for part in fused}


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Views of the gradients that there are."""
    return {
        part.name: part.of(parameter.grad)
        for parameter, fused in parts_of(module)
        if parameter.grad is not None
        for part in fused
    }
