"""EMULATED stages: they sleep for known times in place of computing, with the executor, schedule and messages of real stages.

A whole pipeline then fits on a few cores, and its step time shows the effect of plan, schedule and messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.plan import StepPlan
from headrace.schedule import Kind
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.models.loss import StepLoss
from headrace.trainer.pipeline.cargo import Cargo
from headrace.trainer.pipeline.channels import Channels
from headrace.trainer.pipeline.chunk import Inputs, Output
from headrace.trainer.pipeline.events import Recording
from headrace.trainer.pipeline.executor import Executor, run_step
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.topology import PipelineTopology, Place

EMULATED = "EMULATED"
"""The label beside every time that is reported of an emulated pipeline."""
WIDTH = 8
"""Row width of all messages, which have one row per sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedStep:
    """One step for an emulated pipeline, the same for all of its processes."""

    topology: PipelineTopology
    plan: StepPlan
    forward_s: Mapping[str, Mapping[int, float]]
    """Seconds of the forward through the whole unit, by unit and sample."""
    factors: Mapping[str, Sequence[float]]
    """Time of an action as a multiple of its forward, by unit and `headrace.schedule.Kind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """What one process did in an emulated step: the events of its places, and how long it slept."""

    recordings: Sequence[Recording]
    """Of each of its places, in pipeline order."""
    asked_s: float
    """Seconds that all sleeps together should have taken."""
    slept_s: float
    """Seconds that all sleeps together took."""


class EmulatedChunk:
    """A chunk of an emulated stage: takes the place of a `headrace.trainer.pipeline.stage.Stage` in an executor."""

    width = token_width = WIDTH
    device = torch.device("cpu")

    def __init__(self, forward_s: Mapping[int, float], factors: Sequence[float], *, is_last: bool, num_slices: int = 1) -> None:
        """`forward_s`: seconds of this part's forward, by sample. `factors`: this unit's entry of `EmulatedStep.factors`.
        `is_last`: whether this is the last part of the whole pipeline, which has the loss. `num_slices`: of the stage.
        """
        self.asked_s = self.slept_s = 0.0
        self._forward_s, self._factors, self._is_last, self._num_slices = forward_s, factors, is_last, num_slices
        self._weights_s = 0.0
        """Seconds of the weight action that the last backward put off."""
        self._trainable = torch.zeros((), requires_grad=True)

    def prepare(self, data: PackedMicrobatch) -> Inputs:
        seconds = sum(self._forward_s[sample] for sample in data.sample_ids.tolist())
        return Inputs(num_rows=data.sample_ids.numel(), layers=seconds)

    def rows_between_stages(self, num_rows: int) -> int:
        return num_rows

    def gather_slices(self, share: Tensor) -> Tensor:
        return share.repeat(self._num_slices, 1)

    def token_counts(self, data: PackedMicrobatch) -> Tensor:
        return data.images_per_sample

    def input_token_counts(self, _: str, data: PackedMicrobatch) -> Tensor:
        return data.images_per_sample

    def __call__(self, inputs: Inputs, hidden: Tensor | None, arrived: Mapping[str, Tensor]) -> Output:
        tensors = [self._trainable, *([hidden] if hidden is not None else arrived.values())]
        rows: Tensor = _Sleep.apply(self, inputs.layers, inputs.num_rows, *tensors)  # type: ignore[no-untyped-call]
        return (
            Output(loss=StepLoss(loss_sum=rows.sum(), target_weight=float(rows.shape[0]))) if self._is_last else Output(rows=rows)
        )

    def take_weight_gradients(self) -> Callable[[], None]:
        return partial(self.sleep, self._weights_s)

    def backward(self, forward_s: float) -> None:
        """Sleep for the backward of a forward that took `forward_s`."""
        self.sleep(self._factors[Kind.BACKWARD] * forward_s)
        self._weights_s = self._factors[Kind.WEIGHT] * forward_s

    def sleep(self, seconds: float) -> None:
        began_s = time.monotonic()
        time.sleep(seconds)
        self.asked_s += seconds
        self.slept_s += time.monotonic() - began_s


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and backward; the output is (rows, WIDTH) zeros, and the gradients of the inputs are zeros."""

    @staticmethod
    def forward(ctx: Any, part: EmulatedChunk, forward_s: float, rows: int, *inputs: Tensor) -> Tensor:
        part.sleep(forward_s)
        ctx.part, ctx.forward_s, ctx.shapes = part, forward_s, [tensor.shape for tensor in inputs]
        return torch.zeros(rows, WIDTH)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        ctx.part.backward(ctx.forward_s)
        return (None, None, None, *(torch.zeros(shape) for shape in ctx.shapes))


def emulate(step: EmulatedStep, channels: Channels) -> Emulated:
    """Run this process's share of an emulated step.

    Every process of the default group calls it, and the topology has a place for each of them. `channels`: of this process.
    """
    topology, routes = step.topology, Routes(replace(step.plan, forward_s=step.forward_s), step.topology.replicas)
    wire = Wire(channels, torch.device("cpu"), torch.float32)
    executors = [Executor(topology, place, _chunks(step, place), wire) for place in topology.places(dist.get_rank())]
    cargoes = [_cargo_of(executor, routes) for executor in executors]  # made before the step, as in training beside it
    channels.open_between(routes.pairs)  # here, as a run opens them in its first steps only
    dist.barrier()
    run_step(executors, routes, [cargo.__getitem__ for cargo in cargoes])
    wire.flush()
    parts = [chunk for executor in executors for chunk in executor.chunks if isinstance(chunk, EmulatedChunk)]
    return Emulated(
        recordings=[executor.clock.recording() for executor in executors],
        asked_s=sum(part.asked_s for part in parts),
        slept_s=sum(part.slept_s for part in parts),
    )


def _chunks(step: EmulatedStep, place: Place) -> list[EmulatedChunk]:
    topology, unit = step.topology, place.unit
    forward_s = {sample: seconds / topology.num_parts(unit) for sample, seconds in step.forward_s[unit].items()}
    ends = unit == list(topology.units)[-1] and place.stage == topology.stages[unit] - 1
    return [
        EmulatedChunk(
            forward_s,
            step.factors[unit],
            is_last=ends and chunk == topology.chunks_of(unit) - 1,
            num_slices=topology.units[unit].num_slices,
        )
        for chunk in range(topology.chunks_of(unit))
    ]


def _cargo_of(executor: Executor, routes: Routes) -> dict[Portion, Cargo]:
    empty = collate(())
    cargo: dict[Portion, Cargo] = {}
    for portion in routes.portions(executor.place.unit, executor.place.replica):
        count = len(portion.samples)
        data = replace(empty, sample_ids=torch.tensor(portion.samples), images_per_sample=torch.ones(count, dtype=torch.int32))
        cargo[portion] = executor.prepare(routes, portion, data)
    return cargo
