"""A residual stream in half precision: what it costs in accuracy, and that it is half as wide everywhere between layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import SpecError, UserError
from headrace.execution_spec import ExecutionSpec
from headrace.model_shape import TransformerShape
from headrace.sample import UNIT_COLUMNS
from headrace.spec import parse
from headrace.trainer.models.block import layer_norm, rms_norm
from headrace.trainer.pipeline.layer_partition import bounds
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, make_row, packed, whole_model

BF16 = torch.bfloat16
DEEP = replace(SHAPE, llm=TransformerShape(layers=24, width=64, heads=4, kv_heads=4, mlp=256, gated=True))
MOST_ERROR = 0.02
"""Of the gradient of 24 layers; docs/memory.md has what was measured."""
MOST_RATIO = 4.0
"""Of that error over the error with the stream in float32."""


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stage_of(*, fp32_residual: bool) -> Stage:
    topology = parse(PipelineTopology, {"units": {"llm": {"fp32_residual_connection": fp32_residual}}}, "topology")
    cuts, cpu = bounds(topology, DEEP, vocab_size=VOCAB, image=IMAGE, audio=AUDIO)["llm"], torch.device("cpu")
    make = partial(whole_model, DEEP)
    (stage,) = build_stages(make, topology, Place("llm", 0, 0, 0), cuts, seed=1, device=cpu, slices=None)
    return stage


def gradient_of(stage: Stage, dtype: torch.dtype) -> Tensor:
    rows = [make_row(number, audio=False) for number in range(12)]
    batch = packed([row | {"input_ids": row["input_ids"].clip(3)} for row in rows], UNIT_COLUMNS["llm"])
    with torch.autocast("cpu", dtype, enabled=dtype == BF16):
        output = stage(stage.prepare(batch), None, {})
    assert output.loss is not None
    output.loss.loss_sum.backward()
    return torch.cat([parameter.grad.flatten() for parameter in stage.parameters() if parameter.grad is not None])


def test_gradients_are_off_by_little_more() -> None:
    exact = gradient_of(stage_of(fp32_residual=True), torch.float32)
    errors = {
        fp32_residual: float((gradient_of(stage_of(fp32_residual=fp32_residual), BF16) - exact).norm() / exact.norm())
        for fp32_residual in (True, False)
    }
    assert errors[True] < errors[False] < min(MOST_ERROR, MOST_RATIO * errors[True])


def test_without_half_precision_nothing_changes() -> None:
    one, other = (gradient_of(stage_of(fp32_residual=value), torch.float32) for value in (True, False))
    assert torch.equal(one, other)


@pytest.mark.parametrize("fp32_residual", [True, False])
def test_what_passes_between_layers_has_the_dtype_of_the_stream(fp32_residual: bool) -> None:
    stage, seen = stage_of(fp32_residual=fp32_residual), set()
    for layer in stage.layers:
        layer.register_forward_hook(lambda _, inputs, output: seen.update((inputs[0].dtype, output.dtype)))
    gradient_of(stage, BF16)
    assert seen == {torch.float32 if fp32_residual else BF16}


@pytest.mark.parametrize("make", [rms_norm, layer_norm])
def test_a_norm_of_half_precision_is_that_of_float32_rounded(make) -> None:
    norm, x = make(64), torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", BF16):
        half = norm(x.to(BF16))
    assert half.dtype == BF16
    torch.testing.assert_close(half.float(), norm(x.to(BF16).float()), rtol=1e-2, atol=1e-2)


def test_a_unit_that_is_whole_encoders_is_refused() -> None:
    topology = parse(PipelineTopology, {"units": {"encoder": {"fp32_residual_connection": False}, "llm": {}}}, "topology")
    with pytest.raises(UserError, match="fp32_residual_connection, name 'vision' and 'audio' in its place"):
        topology.check(2, SHAPE)


def test_trainers_run_what_the_job_says_of_the_stream_and_of_what_runs_again() -> None:
    units = {"llm": {"fp32_residual_connection": False, "checkpointing": "auto"}, "vision": {}}
    planned = parse(ExecutionSpec, {"trainer": "pipeline", "units": units}, "execution")
    same = parse(PipelineTopology, {"units": units}, "topology")
    same.check_execution(planned, same.stages)
    for option in units["llm"]:
        lacking = {name: value for name, value in units["llm"].items() if name != option}
        other = parse(PipelineTopology, {"units": {**units, "llm": lacking}}, "topology")
        with pytest.raises(UserError, match=f"plans for {option} units llm"):
            other.check_execution(planned, other.stages)


def test_only_true_false_and_auto_say_what_runs_again() -> None:
    with pytest.raises(SpecError, match=r"units\.llm\.checkpointing"):
        parse(PipelineTopology, {"units": {"llm": {"checkpointing": "some"}}}, "topology")
