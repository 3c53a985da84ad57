"""Gradients of weights that a backward leaves for later are those that it would have computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.trainer.pipeline.weight_gradients import WeightGradients

WIDTH = 8


class Net(nn.Module):
    """Linear layers with and without bias, a frozen one and a norm."""

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointing else self.inner(x)
        return y

    def inner(self, x: Tensor) -> Tensor:
        y = self.norm(torch.relu(self.first(x)))
        return x + self.last(self.frozen(y))


def nets(*, checkpointing: bool) -> tuple[Net, Net, WeightGradients]:
    """The same twice, and of the second one the weights apart."""
    torch.manual_seed(0)
    plain, split = Net(checkpointing=checkpointing), Net(checkpointing=checkpointing)
    split.load_state_dict(plain.state_dict())
    return plain, split, WeightGradients(split)


def back(net: Net, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The gradient of the input, after a backward as the executor runs it."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = net(x).float().square().sum()
        with torch.autocast("cpu", enabled=False):
            loss.backward()
    return x.grad


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_what_one_backward_computes_and_of_the_same_type(dtype: torch.dtype, checkpointing: bool) -> None:
    plain, split, gradients = nets(checkpointing=checkpointing)
    microbatches = torch.randn(3, 5, WIDTH)
    put_off = []
    for x in microbatches:
        torch.testing.assert_close(back(split, x, dtype), back(plain, x, dtype))
        put_off.append(gradients.take())
    assert split.first.weight.grad is None, "nothing of the weights in the backward"
    for compute in put_off:
        compute()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in split.named_parameters() if p.grad is not None}
    assert {name: gradient.dtype for name, gradient in found.items()} == dict.fromkeys(expected, torch.float32)
    torch.testing.assert_close(found, expected)


def test_what_was_taken_is_of_the_backwards_since_the_last_time() -> None:
    plain, split, gradients = nets(checkpointing=False)
    one, other = torch.randn(2, 5, WIDTH)
    back(split, one, torch.float32)
    gradients.take()
    back(split, other, torch.float32)
    gradients.take()()
    back(plain, other, torch.float32)
    torch.testing.assert_close(split.last.weight.grad, plain.last.weight.grad)


def test_a_layer_whose_input_has_no_gradient_learns_too() -> None:
    net = nn.Linear(WIDTH, 1)
    gradients = WeightGradients(net)
    x = torch.randn(5, WIDTH)
    net(x).sum().backward()
    gradients.take()()
    assert net.weight.grad is not None
    torch.testing.assert_close(net.weight.grad[0], x.sum(0))
