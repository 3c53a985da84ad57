"""Memory of a stage: bytes that the planner counts for a token in flight, and that a step is forecast to take, beside those that
the device's allocator gives out.

Without a GPU, the bytes of all tensors that are held stand for those that the allocator gives out. A layer keeps more there than
is planned, as kernels of the CPU do (`tests/unit/trainer/pipeline/test_kept_bytes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from benchmarks.gpu.stage_alone import StageAlone, process_group, stage_alone
from benchmarks.gpu.target import Target
from benchmarks.report import Rival, Row, at_most
from headrace.model_shape import TransformerShape
from headrace.reorder_service.planning.cost_model.kept_bytes import Keeping, kept_bytes
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.pipeline.kept_activations import measure_kept
from headrace.trainer.pipeline.live_bytes import LiveBytes

VOCAB = 64
"""So small that logits take next to nothing beside the layers."""
MOST_LAYERS = 4
ERROR_GOAL_PERCENT = 10.0
STATE_BYTES = 12
"""Bytes a parameter between steps: a float32 weight and two float32 moments of AdamW."""
MICROBATCHES = 2
"""Of a step: its gradients are there while the second one's activations are."""


def measure(target: Target) -> Iterator[Row]:
    """Yield what a layer keeps of a token, with and without checkpointing, a whole step, and the state of a parameter."""
    several = replace(target.llm_shape, layers=max(2, min(MOST_LAYERS, target.llm_shape.layers)))
    one = replace(several, layers=1)
    length = 4096 if target.is_gpu else 64
    with process_group(target.device):
        for checkpointing, fp32_residual in ((False, True), (False, False), (True, True)):
            settings = {"checkpointing": checkpointing, "fp32_residual_connection": fp32_residual}
            a_layer = _of_layer(target, several, length, settings)
            planned = kept_bytes(one, Keeping(checkpointing=checkpointing, fp32_residual=fp32_residual))
            stream = "" if fp32_residual else ", residual stream in bf16"
            yield Row(
                name=f"a token in flight, a layer with {'recomputed' if checkpointing else 'kept'} activations{stream}",
                value=a_layer,
                unit="bytes",
                rival=Rival(value=planned, source="planned"),
                goal=target.goal(at_most((1 + ERROR_GOAL_PERCENT / 100) * planned)),
                detail=f"{a_layer / one.width:.1f} a channel",
            )
        for checkpointing in (False, True):
            yield _step_row(target, several, length, checkpointing)
        if target.is_gpu:
            yield _state_row(target, several, length)


def _of_layer(target: Target, several: TransformerShape, length: int, settings: dict[str, Any]) -> float:
    """Return the bytes that a layer keeps of a token."""
    if target.is_gpu:
        grown, grown_one = (_growth(target, shape, length, settings) for shape in (several, replace(several, layers=1)))
        return (grown - grown_one) / length / (several.layers - 1)
    alone = _alone(target, several, [[length]], settings).place
    (stage,) = alone.stages
    kept = measure_kept(stage, alone.topology, alone.place, 0, dtype=torch.bfloat16, image=ImageSpec(), audio=AudioSpec())
    return mean(kept.inputs if settings["checkpointing"] else kept.layers)


def _growth(target: Target, shape: TransformerShape, length: int, settings: dict[str, Any]) -> float:
    """Return how many more bytes are in use at most where a microbatch is twice as long: weights and their casts are as many, and
    so are working buffers of one layer with another number of layers."""
    batches = ([[length * factor]] * MICROBATCHES for factor in (1, 2))
    short, long = (_peak(target, _alone(target, shape, batch, settings)) for batch in batches)
    return long - short


def _peak(target: Target, alone: StageAlone) -> float:
    """Return the most bytes in use beside weights, of a step of microbatches of one sample: in the last one, as all gradients are
    there only behind the first."""
    alone.accumulate()
    return _taken(target, alone.accumulate)


def _taken(target: Target, run: Callable[[], object]) -> float:
    """Return the most bytes that are in use while something runs, beside those in use before."""
    if not target.is_gpu:
        with LiveBytes() as meter:
            run()
        return float(meter.most)
    target.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    taken: int = torch.cuda.max_memory_allocated() - before
    return taken


def _step_row(target: Target, shape: TransformerShape, length: int, checkpointing: bool) -> Row:
    alone = _alone(target, shape, [[length]] * MICROBATCHES, {"checkpointing": checkpointing})
    memory = alone.place.forecast_memory(ImageSpec(), AudioSpec())
    alone.run()
    taken = _taken(target, alone.run)
    assert memory.forecast is not None, "a step has run"
    state = memory.forecast.state
    forecast = memory.forecast.total - state.weights - state.optimizer
    return Row(
        name=f"a step with {'recomputed' if checkpointing else 'kept'} activations, over its forecast",
        value=100 * (taken / forecast - 1),
        unit="%",
        goal=target.goal(at_most(ERROR_GOAL_PERCENT)),
        detail=f"{taken / 2**20:.1f} MiB beside weights and optimizer, forecast {forecast / 2**20:.1f} MiB",
    )


def _state_row(target: Target, shape: TransformerShape, length: int) -> Row:
    target.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    alone = _alone(target, shape, [[length]], {})
    alone.run()
    num_parameters = sum(p.numel() for p in alone.model.parameters())
    value = (torch.cuda.memory_allocated() - before) / num_parameters
    return Row(
        name="a parameter between steps: weight and optimizer state",
        value=value,
        unit="bytes",
        rival=Rival(value=STATE_BYTES, source="float32 and AdamW"),
        goal=at_most((1 + ERROR_GOAL_PERCENT / 100) * STATE_BYTES),
    )


def _alone(target: Target, shape: TransformerShape, lengths: list[list[int]], settings: dict[str, Any]) -> StageAlone:
    device, dtype = target.device, torch.bfloat16
    return stage_alone(shape, lengths, vocab_size=VOCAB, device=device, dtype=dtype, **settings)
