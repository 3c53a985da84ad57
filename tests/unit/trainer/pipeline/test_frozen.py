"""Frozen matrices in half precision: one copy of them, whatever is in flight, and the results that casts of them give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from headrace.model_shape import ModelShape, TransformerShape
from headrace.sample import UNIT_COLUMNS
from headrace.spec import parse
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.pipeline.layer_partition import bounds
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.recovery.held_layers import Holding
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, make_row, packed, whole_model

BF16 = torch.bfloat16
IN_FLIGHT = 4


WIDE = replace(SHAPE, llm=TransformerShape(layers=2, width=128, heads=4, kv_heads=4, mlp=256, gated=True))
"""Its weights are many times what a short sample has of activations."""


def stage_of(unit: str, dtype: torch.dtype, *, shape: ModelShape = SHAPE, **fields: bool) -> Stage:
    topology = parse(PipelineTopology, {"units": {"vision": {}, "audio": {}, "llm": {}, unit: fields}}, "topology")
    cuts = bounds(topology, shape, vocab_size=VOCAB, image=IMAGE, audio=AUDIO)[unit]
    cpu = torch.device("cpu")
    make = partial(whole_model, shape)
    (stage,) = build_stages(make, topology, Place(unit, 0, 0, 0), cuts, seed=1, device=cpu, slices=None, dtype=dtype)
    return stage


def microbatch(unit: str, samples: int = 4) -> PackedMicrobatch:
    return packed([make_row(number, audio=True) for number in range(samples)], UNIT_COLUMNS[unit])


def tokens_for_the_llm(batch: PackedMicrobatch, stage: Stage) -> dict[str, Tensor]:
    """Of both encoders, of which something learns."""
    generator = torch.Generator().manual_seed(0)
    counts = {unit: int(stage.input_token_counts(unit, batch).sum()) for unit in ("vision", "audio")}
    return {
        unit: torch.randn(count, stage.width, generator=generator).requires_grad_() for unit, count in counts.items() if count
    }


@contextmanager
def kept_for_backward(stage: Stage) -> Iterator[dict[int, int]]:
    """Bytes by storage, without the parameters' own."""
    own = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    kept: dict[int, int] = {}
    alive = []  # else another tensor could take a storage's place

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_kept_of_a_frozen_unit_has_no_copy_of_its_weights(checkpointing: bool) -> None:
    """A learning unit has one for all microbatches; what each further one keeps are its activations."""
    growth = {}
    for frozen in (False, True):
        stage = stage_of("llm", BF16, shape=WIDE, frozen=frozen, checkpointing=checkpointing)
        batch = microbatch("llm", samples=1)
        outputs, sizes = [], []
        with kept_for_backward(stage) as kept, torch.autocast("cpu", BF16):
            for _ in range(IN_FLIGHT):
                outputs.append(stage(stage.prepare(batch), None, tokens_for_the_llm(batch, stage)))
                sizes.append(sum(kept.values()))
        assert all(output.loss is not None and output.loss.loss_sum.requires_grad for output in outputs)
        growth[frozen] = sizes[-1] - sizes[0]
    assert growth[True] <= growth[False]


def test_a_frozen_encoder_gives_to_the_bit_what_casts_of_it_give() -> None:
    batch = microbatch("vision")
    rows, gradients = [], []
    for dtype in (torch.float32, BF16):
        stage = stage_of("vision", dtype, frozen=True)
        with torch.autocast("cpu", BF16):
            output = stage(stage.prepare(batch), None, {})
        assert output.rows is not None
        output.rows.float().square().sum().backward()
        rows.append(output.rows)
        gradients.append([parameter.grad for parameter in stage.parameters() if parameter.requires_grad])
    assert torch.equal(*rows)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_frozen_llm_differs_by_the_rounding_of_its_embeddings() -> None:
    batch = microbatch("llm")
    losses = []
    for dtype in (torch.float32, BF16):
        stage = stage_of("llm", dtype, frozen=True)
        with torch.autocast("cpu", BF16):
            output = stage(stage.prepare(batch), None, tokens_for_the_llm(batch, stage))
        assert output.loss is not None
        losses.append(float(output.loss.loss_sum.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_what_learns_and_what_is_small_stays_float32() -> None:
    for unit in ("vision", "llm"):
        stage = stage_of(unit, BF16, frozen=True)
        halved = [parameter for parameter in stage.parameters() if parameter.dtype == BF16]
        assert halved
        assert all(parameter.ndim == 2 and not parameter.requires_grad for parameter in halved)
    assert all(parameter.dtype == torch.float32 for parameter in stage_of("llm", BF16).parameters())


def test_nodes_hand_on_what_they_hold_unchanged() -> None:
    giver, taker = (Holding(stage_of("llm", BF16, frozen=True), ("llm", 0, 6)) for _ in range(2))
    with torch.no_grad():
        for parameter in taker.parameters.values():
            parameter.zero_()
    for name in giver.parameters:
        state = giver.state(name)
        assert all(part.dtype == torch.float32 for part in state), "what moves from node to node, with a digest, is float32"
        taker.set_state(name, state)
        assert torch.equal(giver.parameters[name], taker.parameters[name])
        assert all(map(torch.equal, taker.state(name), state))
