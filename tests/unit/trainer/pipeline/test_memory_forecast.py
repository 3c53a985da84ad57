"""The memory of a step, forecast before it: beside the bytes that it then holds, and within a limit by running layers again."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import SpecError, UserError
from headrace.model_shape import TransformerShape
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.sample import UNIT_COLUMNS
from headrace.spec import parse
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.pipeline.layer_partition import bounds, with_cuts
from headrace.trainer.pipeline.live_bytes import LiveBytes
from headrace.trainer.pipeline.memory_forecast import Forecast, StageMemory, StateBytes, log_measured
from headrace.trainer.pipeline.pipeline_step import PipelineStep
from headrace.trainer.pipeline.process_groups import ProcessGroups
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.trainer.train_step import StepResult
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, packed, whole_model

OVER = 1.25
"""A forecast is not below what a step takes, and at most so much above."""
OVER_ZERO_BUBBLE = 1.5
"""Where layers run again under zero-bubble: what they keep until the weight gradients is counted as if it were kept all along."""
LAYERS, MICROBATCHES, TOKENS = 6, 4, 100
WIDE = replace(SHAPE, llm=TransformerShape(layers=LAYERS, width=64, heads=4, kv_heads=4, mlp=256, gated=True))
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zero-bubble": {"schedule": "zero-bubble"},
}
GIB = 2.0**30


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_step(schedule: str = "1f1b", dtype: torch.dtype = torch.float32, **of_unit: Any) -> PipelineStep:
    """An LLM alone, in this process."""
    topology = parse(PipelineTopology, {**SCHEDULES[schedule], "units": {"llm": of_unit}}, "topology")
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "image": IMAGE, "audio": AUDIO}
    topology = with_cuts(topology, WIDE, **sizes)
    cuts, cpu = bounds(topology, WIDE, **sizes)["llm"], torch.device("cpu")
    groups = ProcessGroups.make(topology, cpu, tied=True)
    make = partial(whole_model, WIDE)
    stages = build_stages(make, topology, topology.place(0), cuts, seed=1, device=cpu, slices=None, dtype=dtype)
    return PipelineStep(topology, {topology.place(0): stages}, groups, dtype=dtype)


def run(step: PipelineStep) -> StepResult:
    microbatches = [Microbatch(units={"llm": (2 * number, 2 * number + 1)}) for number in range(MICROBATCHES)]
    planned = Topology(replicas=1, microbatches=MICROBATCHES, stages={"llm": 1})
    routes = Routes(StepPlan(strategy="by hand", seed=0, topology=planned, replicas=[microbatches]), {"llm": 1})
    return step.run(routes, [step.places[0].prepare.feed(routes, text_of)], 1e-3)


def text_of(portion: Portion) -> PackedMicrobatch:
    rows = []
    for sample in portion.samples:
        ids = np.random.default_rng(sample).integers(3, VOCAB, TOKENS, dtype=np.int32)
        nothing: dict[str, Any] = {"patches": [], "image_grids": [], "mel": [], "mel_frames": []}
        rows.append({"sample_id": sample, "input_ids": ids, "labels": ids, "flags": 0, **nothing})
    return packed(rows, UNIT_COLUMNS["llm"])


def forecast_of(memory: StageMemory) -> Forecast:
    assert memory.forecast is not None
    return memory.forecast


def test_the_meter_counts_what_is_held_and_no_views() -> None:
    before = torch.ones(100)
    with LiveBytes() as meter:
        first = before * 2
        second = first.view(10, 10) + 1
        assert meter.now == 800
        alias = before.view(10, 10)
        del first
        assert (meter.now, meter.most) == (400, 800)
        del second
    assert meter.now == 0
    assert alias.shape == (10, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES if name != "1f1b")]
)
def test_a_step_takes_what_is_forecast(schedule: str, checkpointing: bool, dtype: torch.dtype) -> None:
    step = make_step(schedule, dtype, checkpointing=checkpointing)
    memory = step.places[0].forecast_memory(IMAGE, AUDIO)
    run(step)  # the optimizer's moments are there from here on
    with LiveBytes() as meter:
        run(step)
    forecast = forecast_of(memory)
    before = forecast.state.weights + forecast.state.optimizer
    most = OVER_ZERO_BUBBLE if checkpointing and schedule == "zero-bubble" else OVER
    assert meter.most <= forecast.total - before <= most * meter.most


def test_state_is_counted_as_it_is_held() -> None:
    step = make_step(frozen_layers=2, dtype=torch.bfloat16)
    memory = step.places[0].forecast_memory(IMAGE, AUDIO)
    run(step)
    state, place = forecast_of(memory).state, step.places[0]
    parameters = [p for stage in place.stages for p in stage.parameters()]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    assert state.weights == sum(p.nbytes for p in parameters)
    assert state.gradients == 4 * trained
    assert state.optimizer == 8 * trained == sum(t.nbytes for _, one in place.optimizer.state() for t in one.values() if t.ndim)


def kept_and_recomputed() -> tuple[float, float]:
    """The forecast totals of a step whose layers all keep their activations, and all run again."""
    totals = []
    for checkpointing in (False, True):
        step = make_step("gpipe", checkpointing=checkpointing)
        memory = step.places[0].forecast_memory(IMAGE, AUDIO)
        run(step)
        totals.append(forecast_of(memory).total)
    return totals[0], totals[1]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_as_few_layers_run_again_as_the_limit_asks_for_and_nothing_else_changes(share: float) -> None:
    kept, recomputed = kept_and_recomputed()
    limit = recomputed + share * (kept - recomputed)
    plain, chosen = make_step("gpipe"), make_step("gpipe", checkpointing="auto", device_memory_gib=(limit + 1) / GIB)
    memory = chosen.places[0].forecast_memory(IMAGE, AUDIO)
    expected, found = run(plain), run(chosen)
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert all(torch.equal(*both) for both in zip(weights(chosen), weights(plain), strict=True)), "after an update"
    count = forecast_of(memory).num_checkpointed
    assert {0.0: count == LAYERS, 0.5: 0 < count < LAYERS, 1.0: count == 0}[share]
    assert len(chosen.places[0].stages[0].checkpointed) == count
    with LiveBytes() as meter:
        run(chosen)
    assert meter.most + forecast_of(memory).state.weights + forecast_of(memory).state.optimizer <= limit


def weights(step: PipelineStep) -> list[Tensor]:
    return [parameter.detach() for stage in step.places[0].stages for parameter in stage.parameters()]


@pytest.mark.parametrize(
    ("checkpointing", "remedy"), [(False, "checkpointing: auto, plan smaller"), ("auto", r"more stages \(pp\) or slices \(tp\)")]
)
def test_a_limit_that_cannot_be_kept_is_an_error_before_anything_is_computed(checkpointing: Any, remedy: str) -> None:
    _, recomputed = kept_and_recomputed()
    step = make_step("gpipe", checkpointing=checkpointing, device_memory_gib=0.9 * recomputed / GIB)
    step.places[0].forecast_memory(IMAGE, AUDIO)
    before = [weight.clone() for weight in weights(step)]
    with pytest.raises(UserError, match=f"stage 0 of llm replica 0 is forecast to take .* than its device_memory_gib .*{remedy}"):
        run(step)
    assert all(torch.equal(*both) for both in zip(weights(step), before, strict=True))
    assert all(parameter.grad is None for parameter in step.places[0].parameters)


def test_layers_are_not_chosen_without_a_limit() -> None:
    with pytest.raises(UserError, match="'auto', but a CPU sets no limit: give the unit a device_memory_gib"):
        make_step(checkpointing="auto").places[0].forecast_memory(IMAGE, AUDIO)


def test_layers_are_not_chosen_where_what_runs_again_is_kept() -> None:
    with pytest.raises(SpecError, match=re.escape("'auto', but under 'zero-bubble' what a backward computes again is kept")):
        make_step("zero-bubble", checkpointing="auto", device_memory_gib=1)


def test_the_forecast_is_logged_once_and_not_exceeding_it_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.trainer.pipeline.memory_forecast")
    step = make_step()
    memory = step.places[0].forecast_memory(IMAGE, AUDIO)
    run(step)
    run(step)
    (line,) = [record.getMessage() for record in caplog.records if "memory forecast" in record.getMessage()]
    for field in ("weights_gib", "gradients_gib", "optimizer_gib", "activations_gib", "total_gib", "checkpointed_layers"):
        assert field in line
    caplog.clear()
    log_measured("llm replica 0", step.forecast_bytes, int(1.05 * forecast_of(memory).total))
    log_measured("llm replica 0", step.forecast_bytes, int(1.2 * forecast_of(memory).total))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_bucket_counts_only_where_it_is_more_than_the_activations() -> None:
    state = StateBytes(weights=10, gradients=20, optimizer=30, casts=5, largest=2, bucket=100)
    forecast = Forecast(state=state, activations=50.0, working=30.0, num_checkpointed=0, num_layers=1)
    assert forecast.total == 67 + 100
    assert replace(forecast, activations=90.0).total == 67 + 120
