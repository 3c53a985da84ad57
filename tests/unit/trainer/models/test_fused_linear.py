"""Matrices that are one: what they compute, the weights they begin with, and the names by which others know them."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model_shape import TransformerShape
from headrace.trainer.models.attention import Segments, packed_attention
from headrace.trainer.models.block import Block, decoder_blocks, encoder_blocks
from headrace.trainer.models.fused_linear import FusedLinear, parts_of
from headrace.trainer.models.multimodal import initialise
from headrace.trainer.models.rotary import Rotation, rotation
from headrace.trainer.pipeline.tensor_parallel import cut_to_first_slice
from tests.matrices import gradients_of, weights_of

LENGTHS = (3, 1, 7)
SHAPE = TransformerShape(layers=2, width=32, heads=4, kv_heads=2, mlp=48, gated=True)
STACKS = pytest.mark.parametrize("stack", [decoder_blocks, encoder_blocks])
Stack = Callable[[TransformerShape], nn.ModuleList]


def layers(stack: Stack, seed: int = 0) -> nn.ModuleList:
    made = stack(SHAPE)
    initialise(nn.ModuleDict({"decoder": nn.ModuleDict({"layers": made})}), seed)
    for name, weight in weights_of(made).items():
        if name.endswith(".bias"):
            nn.init.normal_(weight, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return made


def inputs() -> tuple[Tensor, Rotation, Segments]:
    tokens = sum(LENGTHS)
    x = torch.randn(tokens, SHAPE.width, generator=torch.Generator().manual_seed(1)).requires_grad_()
    angles = rotation(torch.arange(tokens)[:, None], SHAPE.width // SHAPE.heads, theta=1e4)
    return x, angles, Segments.of(torch.tensor([0, 3, 4, 11]))


def with_matrices(block: Block, weights: dict[str, Tensor], x: Tensor, angles: Rotation, segments: Segments) -> Tensor:
    """What a block computes with a matrix for each of its parts."""

    def product(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    inner = block.attention_norm(x)
    q, k, v = (product(f"attention.{name}", inner).unflatten(-1, (-1, 8)) for name in ("query", "key", "value"))
    mixed = packed_attention(angles.apply(q), angles.apply(k), v, segments, causal=block.attention.causal)
    x = x + product("attention.out", mixed.flatten(1))
    gate, up = (product(f"mlp.{name}", block.mlp_norm(x)) for name in ("gate", "up"))
    return x + product("mlp.out", functional.silu(gate) * up)


@STACKS
def test_a_block_computes_what_a_matrix_for_each_part_would(stack: Stack) -> None:
    block = layers(stack)[0]
    x, *args = inputs()
    block(x, *args).square().sum().backward()
    weights = {name: weight.clone().requires_grad_() for name, weight in weights_of(block).items()}
    same, *_ = inputs()
    with_matrices(block, weights, same, *args).square().sum().backward()  # type: ignore[arg-type]
    torch.testing.assert_close(x.grad, same.grad)
    for name, gradient in gradients_of(block).items():
        if "norm" not in name:
            torch.testing.assert_close(gradient, weights[name].grad, msg=lambda text, name=name: f"{name}: {text}")


def test_each_part_begins_with_the_weights_that_its_own_matrix_began_with() -> None:
    weights = weights_of(layers(decoder_blocks, seed=7))
    sizes = {"attention.query": 32, "attention.key": 16, "attention.value": 16, "mlp.gate": 48, "mlp.up": 48}
    for name, outputs in sizes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"7/decoder.layers.1.{name}".encode()))
        expected = torch.empty(outputs, SHAPE.width).normal_(std=0.02, generator=generator)
        assert torch.equal(weights[f"1.{name}.weight"], expected), name


@STACKS
def test_a_state_of_matrices_that_are_not_fused_is_loaded_as_it_is_when_they_are(stack: Stack) -> None:
    made = layers(stack)
    for state in (weights_of(made), made.state_dict()):
        other = layers(stack, seed=1)
        assert not torch.equal(other[1].attention.qkv.weight, made[1].attention.qkv.weight)  # type: ignore[union-attr]
        other.load_state_dict(state)
        assert all(torch.equal(one, made.get_parameter(name)) for name, one in other.named_parameters())


def test_a_state_without_one_of_the_parts_is_refused() -> None:
    made = layers(decoder_blocks)
    state = weights_of(made)
    del state["0.mlp.up.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.mlp\.gate_up\.weight"'):
        made.load_state_dict(state)


@STACKS
def test_a_slice_has_its_share_of_each_part(stack: Stack) -> None:
    block = layers(stack)[0]
    whole = {name: weight.clone() for name, weight in weights_of(block).items()}
    cut_to_first_slice(block, 2)
    mine = weights_of(block)
    for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
        for kind in ("weight", "bias"):
            if (tensor := whole.get(f"{name}.{kind}")) is not None:
                assert torch.equal(mine[f"{name}.{kind}"], tensor[: len(tensor) // 2]), name


def test_rows_of_a_part_among_some_rows_of_the_whole() -> None:
    """As FSDP ranks have them, whose borders lie anywhere."""
    whole = torch.arange(14)
    ((_, (first, second, third)),) = parts_of(nn.ModuleList([FusedLinear(1, {"a": 4, "b": 2, "c": 8}, bias=False)]))
    assert [part.name for part in (first, second, third)] == ["a.weight", "b.weight", "c.weight"], "in place of 0.weight"
    for begin, end in ((0, 14), (0, 5), (5, 10), (10, 14), (14, 14)):
        found = [part.of_rows(whole[begin:end], begin).tolist() for part in (first, second, third)]
        assert found == [[n for n in rows if begin <= n < end] for rows in (range(4), range(4, 6), range(6, 14))]
