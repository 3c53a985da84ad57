"""What tensor parallelism cuts; that its slices compute the whole, the comparison with one process shows."""

from __future__ import annotations

import pytest
from torch import nn

from headrace.errors import UserError
from headrace.trainer.pipeline.tensor_parallel import cut_dimension, cut_to_first_slice


@pytest.mark.parametrize(
    ("name", "dimension"),
    [
        ("vision.layers.3.attention.qkv.weight", 0),
        ("decoder.layers.0.mlp.gate_up.weight", 0),
        ("vision.layers.3.attention.query.weight", 0),
        ("vision.layers.3.attention.query.bias", 0),
        ("decoder.layers.0.mlp.gate.weight", 0),
        ("decoder.layers.0.mlp.out.weight", 1),
        ("vision.layers.3.mlp.out.bias", None),
        ("vision.layers.3.attention_norm.weight", None),
        ("vision_projector.up.weight", None),
        ("vision.embed.weight", None),
        ("decoder.embed.weight", 0),
        ("decoder.head.weight", 0),
        ("generator.head.weight", None),
        ("decoder.layers.1.layer.self_attn.k_proj.bias", 0),
        ("decoder.layers.1.layer.self_attn.k_norm.weight", None),
        ("vision.layers.0.layer.mlp.fc2.weight", 1),
        ("vision.layers.0.layer.mlp.fc2.bias", None),
        ("vision.layers.0.layer.attn.qkv.key.bias", 0),
        ("vision.layers.0.layer.attn.proj.weight", 1),
        ("vision.layers.0.layer.attn.proj.bias", None),
        ("audio.layers.0.layer.fc1.bias", 0),
        ("audio.layers.0.layer.fc2.weight", 1),
        ("audio.layers.0.layer.final_layer_norm.weight", None),
    ],
)
def test_only_matrices_of_blocks_and_of_the_vocabulary_are_cut(name: str, dimension: int | None) -> None:
    assert cut_dimension(name) == dimension


def test_layers_that_it_does_not_know_are_refused() -> None:
    with pytest.raises(UserError, match=r"matrix 'Linear', of which it is not known how.*set the unit's tp to 1"):
        cut_to_first_slice(nn.Linear(2, 2), 2)
