"""Losses and gradients of the device beside those of float32 on the CPU: every schedule, recomputation or not, both precisions.

One GPU holds one process of a pipeline, so what runs in each schedule is an LLM of one stage (two chunks where interleaved);
the encoders and the generator are in the whole model of a colocated rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.stage_alone import StageAlone, process_group, stage_alone
from benchmarks.gpu.target import Target
from benchmarks.report import Row, at_most
from headrace.model_shape import TransformerShape
from headrace.trainer.models.multimodal import initialise
from headrace.trainer.train_step import PRECISIONS
from tests.verify.batches import GENERATING, enlarge, make_row, packed, whole_model

SHAPE = TransformerShape(layers=4, width=128, heads=8, kv_heads=2, mlp=256, gated=True)
"""Heads of 16 channels: the flash kernel takes multiples of 8."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "eager": {"schedule": "eager", "in_flight": 2},
    "zero-bubble": {"schedule": "zero-bubble"},
}
VOCAB, LENGTHS = 256, ((5, 1, 40), (17, 17), (1, 90, 3))
ERROR_GOALS = {"fp32": 1e-4, "bf16": 0.12}
"""Most relative error of a gradient. In bf16, that of the CPU itself is 3e-2 in the stage and 8e-2 in the whole model."""
_NEGLIGIBLE = 1e-3
"""Of the largest gradient's norm: below, a gradient is little but rounding, as that of a bias of keys."""
_CPU = torch.device("cpu")

Gradients = Mapping[str, Tensor]


def measure(target: Target) -> Iterator[Row]:
    """Yield the worst relative error of loss and gradients of every case."""
    with process_group(target.device):
        loss, expected = _accumulated(_stage(SCHEDULES["1f1b"], False, _CPU, torch.float32))
        for schedule, checkpointing, precision in product(SCHEDULES, (False, True), PRECISIONS):
            alone = _stage(SCHEDULES[schedule], checkpointing, target.device, PRECISIONS[precision])
            of_device, gradients = _accumulated(alone)
            name = f"{schedule}, activations {'recomputed' if checkpointing else 'kept'}, {precision}"
            yield _row(name, precision, abs(of_device / loss - 1), gradients, expected)
    loss, expected = _whole(_CPU, torch.float32)
    for precision, dtype in PRECISIONS.items():
        of_device, gradients = _whole(target.device, dtype)
        yield _row(f"every unit in one process, {precision}", precision, abs(of_device / loss - 1), gradients, expected)


def _row(name: str, precision: str, of_loss: float, gradients: Gradients, expected: Gradients) -> Row:
    if gradients.keys() != expected.keys():
        raise ValueError(f"{name}: gradients of {sorted(gradients.keys() ^ expected.keys())} on one device only")
    least = _NEGLIGIBLE * max(float(gradient.norm()) for gradient in expected.values())
    errors = {n: float((gradients[n] - other).norm()) / max(float(other.norm()), least) for n, other in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    return Row(
        name=name,
        value=max(of_loss, errors[worst]),
        unit="relative error",
        goal=at_most(ERROR_GOALS[precision]),
        detail=f"loss {of_loss:.1e}, {worst} {errors[worst]:.1e}",
    )


def _stage(schedule: Mapping[str, Any], checkpointing: bool, device: torch.device, dtype: torch.dtype) -> StageAlone:
    """Equal weights everywhere: they are drawn on the CPU, as generators of other devices draw other numbers."""
    return stage_alone(
        SHAPE,
        LENGTHS,
        vocab_size=VOCAB,
        device=device,
        dtype=dtype,
        schedule=schedule,
        change=enlarge,
        checkpointing=checkpointing,
    )


def _accumulated(alone: StageAlone) -> tuple[float, Gradients]:
    loss = alone.accumulate().loss
    found = {piece.parameter: piece.weight.grad for piece in alone.place.optimizer.pieces}  # whole, as there is one replica
    named = [(name, found.get(p), p) for stage in alone.place.stages for name, p in stage.model.named_parameters()]
    return loss, {name: some.view_as(p).float().cpu() for name, some, p in named if some is not None}


def _whole(device: torch.device, dtype: torch.dtype) -> tuple[float, Gradients]:
    model = whole_model(GENERATING).to_empty(device="cpu")
    initialise(model, 0)
    enlarge(model)
    batch = packed([make_row(sample, audio=True) for sample in range(12)])
    model.to(device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss = model(batch)
    (loss.loss_sum / loss.target_weight).backward()
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.loss_sum.detach()) / loss.target_weight, gradients
