"""What the planner counts that a layer keeps of a position, beside what autograd keeps of it.

The count is for a GPU. The CPU's kernels keep more: keys and values of every query head, outputs once more where segments are
joined, and both factors of an RMSNorm. Here they are EMULATED by functions that keep what torch's kernels for GPUs keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.model_shape import ModelShape, TransformerShape
from headrace.reorder_service.planning.cost_model.kept_bytes import Keeping, kept_bytes
from headrace.spec import parse
from headrace.trainer.models import block
from headrace.trainer.models.attention import Segments, packed_attention
from headrace.trainer.pipeline.kept_activations import KeptActivations, measure_kept
from headrace.trainer.pipeline.layer_partition import bounds, with_cuts
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from tests.verify.batches import AUDIO, IMAGE, VOCAB, whole_model

TOLERANCE = 0.01
"""Of the bytes of a layer. Beside activations, a layer in half precision has the rounded mean of a norm, or not."""
BF16 = torch.bfloat16
INNER = 2
"""A layer that is neither first nor last, nor the one in which the first one's input is freed."""
ENCODER = TransformerShape(layers=4, width=32, heads=4, kv_heads=4, mlp=80, gated=False)
SHAPE = ModelShape(
    vision=ENCODER,
    audio=ENCODER,
    llm=TransformerShape(layers=4, width=64, heads=8, kv_heads=2, mlp=176, gated=True),
    generator=ENCODER,
)
UNITS = ("vision", "audio", "llm", "generator")


class FlashAttention(torch.autograd.Function):
    """Keeps what a variable-length flash kernel keeps: its inputs, its output and a float32 number for each query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, causal: bool) -> Tensor:
        output = packed_attention(q, k, v, segments, causal=causal)
        ctx.save_for_backward(q, k, v, output, q.new_zeros(q.shape[:2], dtype=torch.float32))
        return output


class FusedRmsNorm(torch.autograd.Function):
    """Keeps its input, its weight and a float32 number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_zeros(len(x), dtype=torch.float32))
        return x * weight


@pytest.fixture
def kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool) -> Tensor:
        return FlashAttention.apply(q, k, v, segments, causal)

    def rms_norm(x: Tensor, _: Any, weight: Tensor, __: float) -> Tensor:
        return FusedRmsNorm.apply(x, weight)

    monkeypatch.setattr(block, "packed_attention", attention)
    monkeypatch.setattr(functional, "rms_norm", rms_norm)
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda norm, x: rms_norm(x, None, norm.weight, 0.0))


@contextmanager
def slices_of(tp: int) -> Iterator[dist.ProcessGroup | None]:
    """The first of several slices, whose collectives send nothing: EMULATED."""
    if tp == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    yield dist.group.WORLD
    dist.destroy_process_group()


def measured(unit: str, **settings: Any) -> KeptActivations:
    units = {name: settings if name == unit else {} for name in UNITS}
    topology = parse(PipelineTopology, {"units": units}, "topology")
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "image": IMAGE, "audio": AUDIO}
    topology = with_cuts(topology, SHAPE, **sizes)
    place, cuts = Place(unit, 0, 0, 0), bounds(topology, SHAPE, **sizes)[unit]
    with slices_of(settings.get("tp", 1)) as group:
        make, cpu = partial(whole_model, SHAPE), torch.device("cpu")
        (stage,) = build_stages(make, topology, place, cuts, seed=1, device=cpu, slices=group, dtype=BF16)
        return measure_kept(stage, topology, place, 0, dtype=BF16, image=IMAGE, audio=AUDIO)


@pytest.mark.usefixtures("kernels_of_gpus")
@pytest.mark.parametrize("fp32_residual", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("unit", UNITS)
def test_a_layer_keeps_what_is_planned(unit: str, tp: int, fp32_residual: bool) -> None:
    found = measured(unit, tp=tp, fp32_residual_connection=fp32_residual)
    keeping = {"tp": tp, "fp32_residual": fp32_residual}
    planned = kept_bytes(SHAPE.units[unit], Keeping(**keeping)) / len(found.layers)
    assert found.layers[INNER] == pytest.approx(planned, rel=TOLERANCE)
    checkpointed = kept_bytes(SHAPE.units[unit], Keeping(checkpointing=True, **keeping)) / len(found.layers)
    assert found.inputs[INNER] == pytest.approx(checkpointed, rel=TOLERANCE)


@pytest.mark.usefixtures("kernels_of_gpus")
@pytest.mark.parametrize("unit", ["llm", "generator"])
def test_a_frozen_layer_behind_something_that_learns_keeps_what_is_planned(unit: str) -> None:
    found = measured(unit, frozen=True)
    planned = kept_bytes(SHAPE.units[unit], Keeping(frozen=True)) / len(found.layers)
    assert found.layers[INNER] == pytest.approx(planned, rel=TOLERANCE)


def test_a_frozen_layer_with_nothing_that_learns_in_front_keeps_nothing() -> None:
    found = measured("vision", frozen=True)
    assert found.layers[1:] == (0.0, 0.0, 0.0)
    assert found.savings == [], "so that there is nothing to save by running it again"


def test_first_layers_that_are_frozen_keep_nothing() -> None:
    found = measured("vision", frozen_layers=2)
    assert found.layers[1] == 0.0 < found.layers[2]
    assert [index for index, _ in found.savings] == [2, 3]


def test_what_a_stage_keeps_of_a_row_is_the_sum_over_its_layers() -> None:
    found = KeptActivations(layers=(100.0, 60.0, 100.0), inputs=(10.0, 70.0, 20.0), ends=5.0)
    assert found.of_row(()) == 265.0
    assert found.of_row({0}) == 175.0
    assert found.savings == [(0, 90.0), (2, 80.0)], "the middle one would keep more"
