"""EMULATED stages: whose computing is a sleep of known length, on the executor, the schedule and the messages of real ones.

A whole pipeline then fits on a few cores, and its time shows what plan, schedule and messages make of the compute times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.plan import StepPlan
from trainer.collate import PackedMicrobatch, collate
from trainer.models.loss import StepLoss
from trainer.pipeline.events import Recording
from trainer.pipeline.executor import Executor
from trainer.pipeline.routes import Routes
from trainer.pipeline.topology import PipelineTopology

EMULATED = "EMULATED"
"""Stands wherever a time of such a pipeline does."""
WIDTH = 8
"""Of all messages; every sample has one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedStep:
    """What all processes get to do."""

    topology: PipelineTopology
    plan: StepPlan
    forward_s: Mapping[str, Mapping[int, float]]
    """By unit and sample: seconds that the forward of the whole unit takes."""
    backward: Mapping[str, float]
    """By unit: time of a backward over its forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """What one process did of a step."""

    recording: Recording
    asked_s: float
    """All sleeps as they should have been."""
    slept_s: float
    """As they were."""


class EmulatedChunk:
    """Chunk of a stage: takes the place of a `trainer.pipeline.stages.Stage` in an executor."""

    width = token_width = WIDTH
    device = torch.device("cpu")

    def __init__(self, forward_s: Mapping[int, float], backward: float, *, is_last: bool) -> None:
        """`forward_s`: of this part, by sample. `backward`: over the forward. `is_last`: of the whole pipeline."""
        self.asked_s = self.slept_s = 0.0
        self._forward_s, self._backward, self._is_last = forward_s, backward, is_last
        self._learns = torch.zeros((), requires_grad=True)

    def num_rows(self, data: PackedMicrobatch) -> int:
        return len(data.sample_ids)

    def tokens(self, data: PackedMicrobatch) -> Tensor:
        return torch.ones_like(data.sample_ids)

    def tokens_of(self, _: str, data: PackedMicrobatch) -> Tensor:
        return torch.ones_like(data.sample_ids)

    def __call__(self, data: PackedMicrobatch, hidden: Tensor | None, arrived: Mapping[str, Tensor]) -> Tensor | StepLoss:
        seconds = sum(self._forward_s[sample] for sample in data.sample_ids.tolist())
        inputs = [self._learns, *([hidden] if hidden is not None else arrived.values())]
        rows: Tensor = _Sleep.apply(self, seconds, self._backward * seconds, self.num_rows(data), *inputs)  # type: ignore[no-untyped-call]
        return StepLoss(loss_sum=rows.sum(), num_targets=len(rows)) if self._is_last else rows

    def sleep(self, seconds: float) -> None:
        began_s = time.monotonic()
        time.sleep(seconds)
        self.asked_s += seconds
        self.slept_s += time.monotonic() - began_s


class _Sleep(torch.autograd.Function):
    """(rows, WIDTH) zeros from any inputs, whose gradients are zeros too; both ways take their time."""

    @staticmethod
    def forward(ctx: Any, part: EmulatedChunk, forward_s: float, backward_s: float, rows: int, *inputs: Tensor) -> Tensor:
        part.sleep(forward_s)
        ctx.part, ctx.backward_s, ctx.shapes = part, backward_s, [tensor.shape for tensor in inputs]
        return torch.zeros(rows, WIDTH)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        ctx.part.sleep(ctx.backward_s)
        return (None, None, None, None, *(torch.zeros(shape) for shape in ctx.shapes))


def emulate(step: EmulatedStep) -> Emulated:
    """This process's share of a step. Every process of the default group calls it; the topology has a place for each."""
    topology = step.topology
    place = topology.place(dist.get_rank())
    num_parts = topology.num_parts(place.unit)
    forward_s = {sample: seconds / num_parts for sample, seconds in step.forward_s[place.unit].items()}
    ends = place.unit == list(topology.units)[-1] and place.stage == topology.stages[place.unit] - 1
    parts = [
        EmulatedChunk(forward_s, step.backward[place.unit], is_last=ends and chunk == topology.chunks - 1)
        for chunk in range(topology.chunks)
    ]
    executor = Executor(topology, place, parts, torch.float32)
    routes = Routes(step.plan, topology.replicas)
    empty = collate(())
    data = {
        portion: replace(empty, sample_ids=torch.tensor(portion.samples))
        for portion in routes.portions(place.unit, place.replica)
    }
    dist.barrier()
    executor.run(routes, data.__getitem__)
    return Emulated(
        recording=executor.recording,
        asked_s=sum(part.asked_s for part in parts),
        slept_s=sum(part.slept_s for part in parts),
    )
