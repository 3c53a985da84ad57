"""A computation that has become useless ends at its next layer, and nothing that it leaves behind gets into a later step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace.trainer.recovery.held_layers import make_holding
from headrace.trainer.recovery.layer_checks import checked
from headrace.trainer.recovery.layout import Layout
from headrace.trainer.recovery.mesh import MeshCutError
from headrace.trainer.recovery.nodes_spec import RecoverableUnit, RecoverySpec
from headrace.trainer.train_step import DEFAULTS
from headrace.v1.membership_pb2 import Node, Pipeline, PipelineStage, Snapshot
from tests.verify.batches import whole_model

WIDTH, LAYERS = 4, 3


class Cut:
    """A check that raises from some call on."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise MeshCutError("a node was lost")


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def gradients(layers: nn.Sequential) -> list[torch.Tensor]:
    """Of the weights that have one."""
    return [p.grad for p in layers.parameters() if p.ndim == 2 and p.grad is not None]


@pytest.mark.parametrize("computed", range(LAYERS))
def test_a_forward_ends_at_the_next_layer(computed: int) -> None:
    layers, began = net(), []
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: began.append(layer))
    with pytest.raises(MeshCutError), checked(layers, Cut(computed)):
        layers(torch.ones(WIDTH))
    assert began == list(layers)[:computed]


@pytest.mark.parametrize("computed", range(LAYERS))
def test_a_backward_ends_at_the_next_layer(computed: int) -> None:
    layers = net()
    with pytest.raises(MeshCutError), checked(layers, Cut(LAYERS + computed)):
        layers(torch.ones(WIDTH)).sum().backward()
    has_gradient = [layer.weight.grad is not None for layer in layers]
    assert has_gradient == [False] * (LAYERS - computed) + [True] * computed


def test_gradients_are_those_without_checks_and_a_frozen_layer_has_none_behind() -> None:
    layers, x = net(), torch.randn(2, WIDTH)
    layers[0].requires_grad_(False)
    layers(x).square().sum().backward()
    expected = gradients(layers)
    layers.zero_grad(set_to_none=True)
    check = Cut(calls=100)
    with checked(layers, check):
        layers(x).square().sum().backward()
    assert check.calls == 100 - LAYERS - 2
    assert len(expected) == LAYERS - 1
    for found, wanted in zip(gradients(layers), expected, strict=True):
        assert torch.equal(found, wanted)


def test_nothing_is_checked_behind_the_context() -> None:
    layers = net()
    with checked(layers, Cut(0)):
        pass
    layers(torch.ones(WIDTH)).sum().backward()


def test_what_a_backward_that_ended_midway_has_put_off_is_dropped_with_its_gradients() -> None:
    spec = RecoverySpec(nodes=1, units={"llm": RecoverableUnit()}, schedule="zero-bubble", max_failures=0)
    stages = [PipelineStage(rank=0, unit="llm", first_layer=0, end_layer=6)]
    layout = Layout.of(Snapshot(generation=1, nodes=[Node(name="a")], pipelines=[Pipeline(stages=stages)]), "a", spec)
    assert layout is not None
    holding = make_holding(layout, whole_model, DEFAULTS, device=torch.device("cpu"))
    linear = next(module for module in holding.stage.modules() if type(module) is nn.Linear)
    for is_dropped in (False, True):
        linear(torch.ones(1, linear.in_features)).sum().backward()
        if is_dropped:
            holding.discard()
        holding.stage.take_weight_gradients()()
        assert (linear.weight.grad is None) == is_dropped
