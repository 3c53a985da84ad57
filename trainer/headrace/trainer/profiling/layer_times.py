"""Seconds of a kind of layer, forward and backward, measured on this process's device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.sample import Probe
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.random_batch import random_batch
from headrace.trainer.profiling.device_clock import DeviceClock
from headrace.trainer.profiling.layer_kinds import Kind, kinds_of, randomise
from headrace.trainer.profiling.profiled_batch import BatchShape, batch_shape
from headrace.trainer.profiling.profiled_model import ProfiledModel
from headrace.trainer.profiling.robust_estimate import Estimate

_TINY_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTimes:
    """The measured seconds of one kind of layer for one segment (sample, image or recording), by number of positions.

    All sequences have an entry for each number of positions.
    """

    part: str
    name: str
    layers: tuple[int, ...]
    tp: int
    positions: tuple[float, ...]
    forward_s: tuple[float, ...]
    input_gradients_s: tuple[float, ...]
    weight_gradients_s: tuple[float, ...]
    rerun_s: tuple[float, ...]
    """What activation checkpointing adds to forward and backward; 0 for an end, which is not checkpointed."""
    half_width_s: tuple[float, ...] = ()
    """Half of the confidence interval of forward and backward together (`robust_estimate`); empty: it is not known."""

    @property
    def uncertainty(self) -> tuple[float, ...]:
        """Half of the confidence interval as a share of forward and backward together."""
        both = zip(self.forward_s, self.input_gradients_s, self.weight_gradients_s, self.half_width_s, strict=False)
        return tuple(half / max(forward + inputs + weights, _TINY_S) for forward, inputs, weights, half in both)


def unit_uncertainty(kinds: Sequence[KindTimes]) -> float:
    """Return half of the widest confidence interval of a unit's layers and ends, as a share of what they take together.

    kinds: of one part and width. Layers of a kind are as wrong together as one of them is; kinds are by chance.
    """
    shares = []
    for column in range(len(kinds[0].positions)):
        halves, seconds = 0.0, 0.0
        for kind in kinds:
            layers = max(1, len(kind.layers))
            halves += (layers * kind.half_width_s[column]) ** 2
            seconds += layers * (kind.forward_s[column] + kind.input_gradients_s[column] + kind.weight_gradients_s[column])
        shares.append(math.sqrt(halves) / max(seconds, _TINY_S))
    return max(shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seconds:
    """Seconds of one kind on one microbatch, measured once."""

    forward: float
    backward: float
    input_gradients: float
    """Seconds of the backward with frozen weights: those of the inputs' gradients."""
    checkpointed: float
    """Seconds of forward and backward with activation checkpointing; of an end, which is never checkpointed, without it."""


class LayerTimer:
    """Times the kinds of one model, which is on the meta device; only the layers that are timed get weights."""

    def __init__(
        self,
        profiled: ProfiledModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`dtype`: of matrix products, one of `train_step.PRECISIONS`, applied by torch.autocast."""
        self._profiled = profiled
        self._device = device
        self._autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        self._now = DeviceClock(device, now_s)

    def whole(self, probes: Sequence[Probe], repeats: int) -> float:
        """Return the median seconds of forward and backward of the whole model on `mixed_probes`, after one run to warm up."""
        model = self._profiled.model
        batch = random_batch(
            probes,
            image=self._profiled.image,
            audio=self._profiled.audio,
            placeholders=(model.image_token_id, model.audio_token_id),
        ).to(self._device)
        randomise(model, self._device)
        model.requires_grad_(True)
        times = [sum(self._seconds(lambda: model(batch).loss_sum)) for _ in range(repeats + 1)]
        model.to("meta")
        return median(times[1:])

    def rounds(
        self, part: str, positions: Sequence[int], widths: Sequence[int], repeats: int
    ) -> Generator[list[KindTimes], None, None]:
        """Time the kinds of a part, round after round over all kinds and numbers of positions, so that drifts spread evenly.

        The first of the `repeats` + 1 rounds only warms up. Yields the medians of the rounds so far after each round.
        """
        kinds = kinds_of(self._profiled.model, part, widths)
        shapes = [batch_shape(part, number, self._profiled.image) for number in positions]
        batches = [self._profiled.batch(shape).to(self._device) for shape in shapes]
        for kind in kinds:
            kind.materialise(self._device)
        try:
            seconds: list[list[list[_Seconds]]] = [[[] for _ in shapes] for _ in kinds]
            for number in range(repeats + 1):
                for row, kind in zip(seconds, kinds, strict=True):
                    for cell, batch in zip(row, batches, strict=True):
                        measured = self._measure(kind, batch)
                        if number:
                            cell.append(measured)
                yield [_medians(kind, shapes, row) for kind, row in zip(kinds, seconds, strict=True)] if number else []
        finally:
            for kind in kinds:
                kind.release()

    def _measure(self, kind: Kind, batch: PackedMicrobatch) -> _Seconds:
        parameters = [parameter for module in kind.modules for parameter in module.parameters()]
        for parameter in parameters:
            parameter.requires_grad_(True)
        work = kind.work(batch)
        forward, backward = self._seconds(work.run)
        checkpointed = forward + backward
        if (layer := work.layer) is not None:
            again = kind.work(batch)
            assert again.x is not None
            x = again.x
            checkpointed = sum(self._seconds(lambda: checkpoint(layer, x, use_reentrant=False)))
        for parameter in parameters:
            parameter.requires_grad_(False)
        input_gradients = self._seconds(kind.work(batch).run)[1]
        return _Seconds(forward=forward, backward=backward, input_gradients=input_gradients, checkpointed=checkpointed)

    def _seconds(self, run: Callable[[], Tensor]) -> tuple[float, float]:
        """Return the seconds of forward and backward, 0 for a backward of which nothing needs a gradient."""
        began_s = self._now()
        with self._autocast:
            y = run()
        forward_s = self._now() - began_s
        if not y.requires_grad:
            return forward_s, 0.0
        gradient = torch.ones_like(y) if y.ndim == 0 else torch.randn_like(y)
        began_s = self._now()
        torch.autograd.backward(y, gradient)
        return forward_s, self._now() - began_s


def _medians(kind: Kind, shapes: Sequence[BatchShape], rows: Sequence[Sequence[_Seconds]]) -> KindTimes:
    """Return the median seconds of each cell for one of its segments.

    The parts of a backward are differences of medians, at least 0: weight gradients are the backward less that of frozen weights.
    """

    def of(pick: Callable[[_Seconds], float]) -> list[float]:
        return [median(map(pick, cell)) / len(shape.grids) for cell, shape in zip(rows, shapes, strict=True)]

    halves = [Estimate.of([s.forward + s.backward for s in cell]).half_width for cell in rows]
    backward, inputs = of(lambda s: s.backward), of(lambda s: s.input_gradients)
    plain, checkpointed = of(lambda s: s.forward + s.backward), of(lambda s: s.checkpointed)
    return KindTimes(
        part=kind.part,
        name=kind.name,
        layers=kind.layers,
        tp=kind.tp,
        positions=tuple(shape.mean_positions for shape in shapes),
        forward_s=tuple(of(lambda s: s.forward)),
        input_gradients_s=tuple(inputs),
        weight_gradients_s=tuple(max(0.0, b - i) for b, i in zip(backward, inputs, strict=True)),
        rerun_s=tuple(max(0.0, c - p) for c, p in zip(checkpointed, plain, strict=True)),
        half_width_s=tuple(half / len(shape.grids) for half, shape in zip(halves, shapes, strict=True)),
    )
