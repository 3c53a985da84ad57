"""A vote that found no number leaves what a node has of the model as it is."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.trainer.models.multimodal import initialise
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import LlmStage
from headrace.trainer.recovery.held_layers import Holding
from headrace.trainer.recovery.recoverable_step import apply
from tests.verify.batches import whole_model


def holding() -> Holding:
    stage: Stage = LlmStage(whole_model(), "llm", 0, 1)
    stage.to_empty(device="cpu")
    initialise(stage.model, 1)
    return Holding(stage, ("llm", 0, 1))


@pytest.mark.parametrize("grad_norm", [math.nan, math.inf])
def test_no_number_updates_nothing(grad_norm: float) -> None:
    held = holding()
    before = {name: torch.cat(held.state(name)) for name in held.parameters}
    for parameter in held.learning.values():
        parameter.grad = torch.full_like(parameter, grad_norm)
    apply(held, grad_norm, 1e-3, 1.0)
    assert all(torch.equal(torch.cat(held.state(name)), state) for name, state in before.items())
    assert all(parameter.grad is None for parameter in held.learning.values())


def test_a_number_updates() -> None:
    held = holding()
    before = {name: torch.cat(held.state(name)) for name in held.parameters}
    for parameter in held.learning.values():
        parameter.grad = torch.ones_like(parameter)
    apply(held, 3.0, 1e-3, 1.0)
    assert not any(torch.equal(torch.cat(held.state(name)), state) for name, state in before.items())
