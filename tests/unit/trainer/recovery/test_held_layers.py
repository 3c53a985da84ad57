"""What a node holds of the model: in a checkpoint and out of it, and how another one comes to hold the same."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.trainer.models.multimodal import initialise
from headrace.trainer.pipeline.checkpoint_files import Checkpoint, TensorKey, write
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import LlmStage
from headrace.trainer.recovery.held_layers import Holding, copies_of
from tests.verify.batches import whole_model


def holding(seed: int) -> Holding:
    stage: Stage = LlmStage(whole_model(), "llm", 0, 1)
    stage.to_empty(device="cpu")
    initialise(stage.model, seed)
    return Holding(stage, ("llm", 0, 1))


def test_a_checkpoint_has_fused_matrices_one_by_one_and_is_loaded_into_them(tmp_path: Path) -> None:
    held, other = holding(1), holding(2)
    for parameter in held.learning.values():
        parameter.grad = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(3))
    held.update(1e-2)
    tensors = {key: tensor for name in held.parameters for key, tensor in held.tensors(name).items()}
    fused, query = (held.parameters["decoder.layers.0.attention.qkv.weight"], "decoder.layers.0.attention.query.weight")
    assert torch.equal(tensors[TensorKey(name=query, kind="weight")], fused[:32])
    assert not any("qkv" in key.name for key in tensors)
    write(tmp_path, 1, 0, 1, {}, tensors)
    other.load(Checkpoint.newest(tmp_path))
    assert all(torch.equal(*map(torch.cat, (held.state(name), other.state(name)))) for name in held.parameters)


def update(held: Holding) -> None:
    for parameter in held.learning.values():
        parameter.grad = torch.ones_like(parameter)
    held.update(1e-3)


def states(held: Holding) -> dict[str, torch.Tensor]:
    return {name: torch.cat(held.state(name)) for name in held.parameters}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_who_was_given_the_state_goes_on_like_its_source() -> None:
    source, target = holding(1), holding(2)
    update(source)
    for name in source.parameters:
        target.set_state(name, copies_of(source.state(name)))
    before = states(source)
    assert equal(states(target), before)
    update(source)
    assert equal(states(target), before), "they share no memory"
    update(target)
    assert equal(states(target), states(source))


def test_what_was_received_is_kept_where_it_is() -> None:
    source, target = holding(1), holding(2)
    update(source)
    for name in source.learning:
        received = copies_of(source.state(name))
        target.set_state(name, received)
        *tensors, _ = target.state(name)
        assert [part.data_ptr() for part in tensors] == [part.data_ptr() for part in received[:-1]]
        assert target.parameters[name].requires_grad
