"""Memory of a stage: bytes that the planner counts for a token in flight, beside those that the device's allocator gives out.

Without a GPU, what autograd saves stands for what the allocator gives out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu.stage_alone import StageAlone, process_group, stage_alone
from benchmarks.gpu.target import Target
from benchmarks.report import Rival, Row, at_most
from headrace.model_shape import TransformerShape
from headrace.reorder_service.planning.cost_model.cost import kept_bytes

VOCAB = 64
"""So small that logits take next to nothing beside the layers."""
MOST_LAYERS = 4
ERROR_GOAL_PERCENT = 10.0
STATE_BYTES = 12
"""Bytes a parameter between steps: a float32 weight and two float32 moments of AdamW."""


def measure(target: Target) -> Iterator[Row]:
    """Yield what a layer keeps of a token, with and without checkpointing, and the state of a parameter."""
    several = replace(target.llm_shape, layers=max(2, min(MOST_LAYERS, target.llm_shape.layers)))
    one = replace(several, layers=1)
    length = 4096 if target.is_gpu else 64
    with process_group(target.device):
        for checkpointing in (False, True) if target.is_gpu else (False,):  # autograd does not see what a checkpoint saves
            grown, grown_one = (_growth(target, shape, length, checkpointing) for shape in (several, one))
            a_layer = (grown - grown_one) / length / (several.layers - 1)
            planned = kept_bytes(one, checkpointing)
            yield Row(
                name=f"a token in flight, a layer with {'recomputed' if checkpointing else 'kept'} activations",
                value=a_layer,
                unit="bytes",
                rival=Rival(value=planned, source="planned"),
                goal=target.goal(at_most((1 + ERROR_GOAL_PERCENT / 100) * planned)),
                detail=f"{a_layer / one.width:.1f} a channel",
            )
        if target.is_gpu:
            yield _state_row(target, several, length)


def _growth(target: Target, shape: TransformerShape, length: int, checkpointing: bool) -> float:
    """Return how many more bytes are in use at most where a microbatch is twice as long: weights and their casts are as many, and
    so are working buffers of one layer with another number of layers."""
    short, long = (_peak(target, shape, length * factor, checkpointing) for factor in (1, 2))
    return long - short


def _peak(target: Target, shape: TransformerShape, length: int, checkpointing: bool) -> float:
    """Return the most bytes in use beside weights and gradients, of a step of one microbatch of one sample."""
    alone = _alone(target, shape, length, checkpointing)
    alone.accumulate()
    if not target.is_gpu:
        return _saved_bytes(alone)
    target.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    alone.accumulate()
    return torch.cuda.max_memory_allocated() - before


def _saved_bytes(alone: StageAlone) -> float:
    """Return the bytes that autograd saves in forwards, weights and their casts apart, each storage once."""
    saved: dict[int, Tensor] = {}  # by address of the storage; the tensors keep it from being used again

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    weights = {p.numel() for p in alone.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        alone.accumulate()
    return sum(
        one.untyped_storage().nbytes() for one in saved.values() if one.untyped_storage().size() and one.numel() not in weights
    )


def _state_row(target: Target, shape: TransformerShape, length: int) -> Row:
    target.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    alone = _alone(target, shape, length, checkpointing=False)
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


def _alone(target: Target, shape: TransformerShape, length: int, checkpointing: bool) -> StageAlone:
    device, dtype = target.device, torch.bfloat16
    return stage_alone(shape, [[length]], vocab_size=VOCAB, device=device, dtype=dtype, checkpointing=checkpointing)
