"""Encoders, projectors and language models of the user's, joined in Python: beside the same forward by hand, trained, and cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headrace.errors import UserError
from headrace.manifest import Vocabulary
from headrace.spec import parse_spec
from headrace.trainer.models.glue import EncoderModule, GluedModel, in_units, input_features, pixel_values
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.train_step import TrainStep, make_optimizer
from tests.unit.trainer.models.glue_world import (
    LLM,
    MERGE,
    SPEC,
    VISION,
    VOCABULARY,
    ByHand,
    batch,
    encoders,
    glued,
    language_model,
    tower,
    whisper,
)
from tests.unit.trainer.models.huggingface_world import assert_close

KINDS = ["linear", "mlp", "cross_attention"]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2", "Gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_microbatch_is_what_the_modules_make_of_each_sample_by_hand(kind: str, family: str) -> None:
    llm = language_model(family)
    untouched = copy.deepcopy(llm)
    model = glued(kind, llm)
    by_hand = ByHand(model, untouched)
    data = batch(range(6))

    loss = model(data)
    expected = by_hand(data)
    loss.loss_sum.backward()
    expected.backward()

    assert loss.num_targets == 6 * 5
    assert_close(loss.loss_sum, expected)
    for ours, theirs in (
        (model.vision.layers[0].module, by_hand.towers["vision"]),
        (model.audio.layers[0].module, by_hand.towers["audio"]),
        (model.vision_projector.projection, by_hand.projectors["vision"]),
        (model.audio_projector.projection, by_hand.projectors["audio"]),
        (llm, untouched),
    ):
        gradients = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            if gradients[name].grad is not None:
                assert_close(parameter.grad, gradients[name].grad)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_all_learns_but_what_is_frozen(kind: str) -> None:
    model = glued(kind)
    model.vision.layers.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step = TrainStep(model, make_optimizer(learning, OptimizerSpec(learning_rate=1e-2)))
    losses = []
    for _ in range(8):
        for numbers in (range(4), range(4, 6)):
            step.accumulate(batch(numbers))
        losses.append(step.finish(1e-2).loss)

    assert losses[-1] < losses[0] / 2
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if not name.startswith("vision.") and "embed_positions" not in name}


def test_equal_seeds_make_equal_projectors_and_weights_stay_the_users() -> None:
    tensors = [dict(glued("cross_attention").named_parameters()) for _ in range(2)]
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
    llm = language_model()
    before = {name: tensor.clone() for name, tensor in llm.state_dict().items()}
    model = glued("mlp", llm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in llm.state_dict().items())
    assert model.decoder.embed.weight is llm.get_input_embeddings().weight
