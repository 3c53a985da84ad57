"""Seconds of whole stages as the pipeline runs them: forward and backward of a microbatch, and what follows the last one.

Layers that are timed one by one do not tell what a microbatch takes whatever is in it: the calls of many small kernels, the dense
gradient of an embedding, sums of gradients over microbatches. A whole stage on microbatches of several sizes does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headrace.plan import GENERATOR, LLM
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.device_copy import to_device
from headrace.trainer.pipeline.chunk import Inputs
from headrace.trainer.pipeline.stage import ENCODERS, TRUNKS, Stage
from headrace.trainer.pipeline.stage_building import STAGES
from headrace.trainer.pipeline.zero1 import ShardedAdamW
from headrace.trainer.profiling.device_clock import DeviceClock
from headrace.trainer.profiling.layer_kinds import randomise
from headrace.trainer.profiling.profiled_batch import BatchShape, stage_shapes
from headrace.trainer.profiling.profiled_model import ProfiledModel
from headrace.trainer.profiling.robust_estimate import Estimate
from headrace.trainer.train_step import DEFAULTS, embedding_parameters

MOST_LAYERS = 8
"""Layers of a stage that is timed, so that large models fit; what the others take a microbatch is in their own times."""
_BYTES_A_WEIGHT = 24.0  # weights, gradients in parameters and in a bucket, both moments, and as much again for the rest
_VISION = ENCODERS[0]
_RATE = 1e-6  # of learning: weights stay what they are


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The measured seconds of a stage with all of a part, or with MOST_LAYERS of its layers and both ends."""

    part: str
    layers: tuple[int, ...]
    """Indices of the layers that the stage has."""
    shapes: tuple[BatchShape, ...]
    """The microbatches."""
    forward_s: tuple[Estimate, ...]
    """Of each microbatch."""
    backward_s: tuple[Estimate, ...]
    gradients_s: Estimate
    """In which the gradients of all weights of the part are collected, once a step."""
    update_s: Estimate
    """In which they are averaged and clipped, and the weights updated."""

    @property
    def uncertainty(self) -> float:
        """Half of the widest confidence interval of a microbatch, as a share of its seconds."""
        both = zip(self.forward_s, self.backward_s, strict=True)
        return max(max(one.half_width, other.half_width) / (one.value + other.value) for one, other in both)


class StageTimer:
    """Times the stage of one part of a model, which is on the meta device and stays as it is."""

    def __init__(
        self,
        profiled: ProfiledModel,
        part: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        """`dtype`: as of `LayerTimer`."""
        self._profiled, self._part, self._device = profiled, part, device
        self._autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        self._now = DeviceClock(device) if now_s is None else DeviceClock(device, now_s)
        model = copy.deepcopy(profiled.model)
        trunk = model.get_submodule(TRUNKS[part])
        layers = trunk.get_submodule("layers")
        assert isinstance(layers, nn.ModuleList)
        last = len(layers) - 1  # in some models it is of a kind of its own, as the first ones are
        self._layers = tuple(range(last + 1)) if last < MOST_LAYERS else (*range(MOST_LAYERS - 1), last)
        left_out = sum(
            parameter.numel() for index in range(last) if index not in self._layers for parameter in layers[index].parameters()
        )
        trunk.layers = nn.ModuleList(layers[index] for index in self._layers)
        self._stage: Stage = STAGES[part](model, part, 0, len(self._layers))
        self._parameters = sum(parameter.numel() for parameter in self._stage.parameters())
        self._all_parameters = self._parameters + left_out

    @property
    def needed_bytes(self) -> float:
        """Bytes of the device that the stage takes, about."""
        return _BYTES_A_WEIGHT * self._parameters

    def rounds(self, positions: Sequence[int], repeats: int) -> Generator[StageTimes | None, None, None]:
        """Time microbatches of samples of these numbers of positions, as `LayerTimer.rounds` does, and an update a round.

        Yields what the rounds so far say after each round; None after the first, which only warms up.
        """
        shapes = stage_shapes(self._part, positions, self._profiled.image)
        batches = [self._with_images(self._profiled.batch(shape)) for shape in shapes]
        randomise(self._stage, self._device)
        self._stage.requires_grad_(True)
        parameters = list(self._stage.parameters())
        optimizer = ShardedAdamW([parameters], None, embeddings=embedding_parameters(self._stage))
        inputs = [to_device(self._stage.prepare(batch), self._device) for batch in batches]
        arriving = [self._arriving(batch, of_batch.num_rows) for batch, of_batch in zip(batches, inputs, strict=True)]
        actions: list[list[tuple[float, float]]] = [[] for _ in shapes]
        updates: list[tuple[float, float]] = []
        try:
            for number in range(repeats + 1):
                with self._autocast:  # around all microbatches, as in a step: weights are cast once
                    measured = [self._microbatch(*of_batch) for of_batch in zip(inputs, arriving, strict=True)]
                update = self._update(optimizer)
                if number:
                    for cell, seconds in zip(actions, measured, strict=True):
                        cell.append(seconds)
                    updates.append(update)
                yield self._times(shapes, actions, updates) if number else None
        finally:
            self._stage.to("meta")

    def _with_images(self, data: PackedMicrobatch) -> PackedMicrobatch:
        """Return the microbatch with tokens of images, every other one of an LLM's, which arrive and take gradients back.

        Where a generator is behind the LLM, it would take them as its own.
        """
        model = self._profiled.model
        if self._part != LLM or model.generator is not None or model.image_token_id < 0:
            return data
        return replace(data, input_ids=data.input_ids.masked_fill(data.position_ids % 2 == 1, model.image_token_id))

    def _arriving(self, data: PackedMicrobatch, num_rows: int) -> dict[str, int]:
        """Return how many tokens of other units a microbatch takes, by unit."""
        if self._part == GENERATOR:
            return {LLM: num_rows}
        return (
            {_VISION: count} if self._part == LLM and (count := int(self._stage.input_token_counts(_VISION, data).sum())) else {}
        )

    def _microbatch(self, inputs: Inputs, arriving: Mapping[str, int]) -> tuple[float, float]:
        """Return the seconds of forward and backward, between which the gradients of tokens for the next unit arrive."""
        arrived = {
            unit: torch.randn(count, self._stage.width, device=self._device, requires_grad=True)
            for unit, count in arriving.items()
        }
        began_s = self._now()
        output = self._stage(inputs, None, arrived)
        forward_s = self._now() - began_s
        ends: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if output.loss is not None:
            ends.append(output.loss.loss_sum)
            gradients.append(None)
        if output.rows is not None and output.rows.numel():
            ends.append(output.rows)
            gradients.append(torch.randn_like(output.rows))
        with torch.autocast(self._device.type, enabled=False):
            began_s = self._now()
            torch.autograd.backward(ends, gradients)
            return forward_s, self._now() - began_s

    def _update(self, optimizer: ShardedAdamW) -> tuple[float, float]:
        """Return the seconds in which gradients are collected, and in which weights are updated, as `PipelineStep` does both."""
        began_s = self._now()
        optimizer.ran_backward(0)
        optimizer.reduce()
        collected_s = self._now()
        weights = [piece.weight for piece in optimizer.pieces]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        for gradient in gradients:
            gradient.div_(2.0)
        norm = torch.nn.utils.get_total_norm(gradients).double().square().sqrt()
        torch.nn.utils.clip_grads_with_norm_(weights, DEFAULTS.max_grad_norm, norm)
        optimizer.step(_RATE)
        optimizer.discard()
        return collected_s - began_s, self._now() - collected_s

    def _times(
        self,
        shapes: Sequence[BatchShape],
        actions: Sequence[Sequence[tuple[float, float]]],
        updates: Sequence[tuple[float, float]],
    ) -> StageTimes:
        more = self._all_parameters / self._parameters
        gradients_s, update_s = (Estimate.of([more * one[which] for one in updates]) for which in (0, 1))
        forward_s, backward_s = (tuple(Estimate.of([one[which] for one in cell]) for cell in actions) for which in (0, 1))
        return StageTimes(
            part=self._part,
            layers=self._layers,
            shapes=tuple(shapes),
            forward_s=forward_s,
            backward_s=backward_s,
            gradients_s=gradients_s,
            update_s=update_s,
        )
