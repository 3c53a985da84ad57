"""The memory that a step of one process takes of its device, known before the step begins, and kept within a limit.

State is counted exactly: weights, gradients, optimizer. Activations are the rows that the schedule holds at once, which are
known once the step's data have come, times the bytes that each stage was measured to keep of a row (`kept_activations`). Where a
unit's `checkpointing` is "auto", as many layers run again in the backward as the limit asks for, those that save most first.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.held_activations import activation_memory, freed_by
from headrace.observability.logs import pairs
from headrace.schedule import ZERO_BUBBLE, Action, Kind
from headrace.trainer.loading.buffers import PinnedMemory
from headrace.trainer.models.loss import targets_at_a_time
from headrace.trainer.pipeline.gradient_flow import GradientFlow
from headrace.trainer.pipeline.kept_activations import KeptActivations
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import LlmStage
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.pipeline.zero1 import ShardedAdamW

log = logging.getLogger(__name__)

GPU_SHARE = 0.92
"""Share of a GPU's memory that "auto" keeps to without a limit: the allocator's gaps, and kernels' workspaces, need the rest."""
_GIB = 2.0**30
_BACKWARD_SHARE = 0.36
"""What the backward of a layer holds beside its activations, over these: 0.29 to 0.36 in this repository's layers."""
_LOGIT_BYTES = 12
"""Of a logit while its loss and gradient are computed: in half precision, in float32, and the logarithm of its probability."""
_TOLERANCE = 0.1  # of a forecast beside the allocator


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that a process holds however large its microbatches are."""

    weights: int
    gradients: int
    optimizer: int
    """The two moments of the parameters that this replica updates."""
    casts: int
    """Copies of trained matrices in the dtype of matrix products, which autocast keeps during a step."""
    largest: int
    """The gradient of the largest parameter, before it is added, and what it was computed in. That of a head counts as an
    activation where it is held from the loss on."""
    bucket: int
    """The largest bucket, into which gradients are copied to be summed: when few activations are left."""

    @classmethod
    def of(cls, stages: Sequence[Stage], optimizer: ShardedAdamW, dtype: torch.dtype) -> StateBytes:
        """Count the state of the stages of one process. dtype: that of matrix products."""
        tensors = [tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        sharded = [stage.sharded for stage in stages if stage.sharded is not None]
        trained = {p for stage in stages for p in stage.parameters() if p.requires_grad}
        width = 0 if dtype == torch.float32 else dtype.itemsize
        matrices: set[Tensor] = {
            p for stage in stages for m in stage.modules() if isinstance(m, nn.Linear) for p in m.parameters()
        }
        heads = [stage for stage in stages if isinstance(stage, LlmStage) and stage.is_last]
        matrices |= {stage.model.decoder.output_weight for stage in heads}
        held = {stage.model.decoder.output_weight for stage in heads if stage.holds_weight_gradient}
        return cls(
            weights=sum(storages.values())
            + sum(bucket.kept_bytes for bucket in {bucket for one in sharded for bucket in one.buckets})
            + max((one.gathered_bytes for one in sharded), default=0),
            gradients=optimizer.gradient_bytes,
            optimizer=optimizer.moment_bytes,
            casts=width * sum(p.numel() for p in matrices & trained),
            largest=(4 + width) * max((p.numel() for p in trained - held), default=0),
            bucket=optimizer.bucket_bytes,
        )

    @property
    def during_backward(self) -> int:
        """All that is there while activations are."""
        sizes: tuple[int, ...] = astuple(self)
        return sum(sizes) - self.bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a step is going to take at most, in bytes."""

    state: StateBytes
    activations: float
    """The most that the schedule keeps at once."""
    working: float
    """What the layer that runs takes beside what is kept."""
    num_checkpointed: int
    """Layers that run again in the backward."""
    num_layers: int

    @property
    def total(self) -> float:
        """All of it, in bytes."""
        return self.state.during_backward + max(self.activations + self.working, self.state.bucket)

    def fields(self) -> dict[str, object]:
        """Return the forecast as fields of a log event."""
        sizes = asdict(self.state) | {"activations": self.activations, "working": self.working, "total": self.total}
        in_gib = {f"{name}_gib": round(size / _GIB, 3) for name, size in sizes.items()}
        return {**in_gib, "checkpointed_layers": f"{self.num_checkpointed} of {self.num_layers}"}


class StageMemory:
    """Forecasts the memory of one process's steps, and chooses the layers that run again in the backward."""

    def __init__(
        self,
        topology: PipelineTopology,
        place: Place,
        stages: Sequence[Stage],
        kept: Sequence[KeptActivations],
        state: StateBytes,
        *,
        device_bytes: float = math.inf,
        groups: Collection[dist.ProcessGroup] = (),
    ) -> None:
        """`kept`: of each stage. `device_bytes`: memory of the device, infinite for a CPU. `groups`: those of the
        stage's slices, which choose alike, since a layer that runs again exchanges rows again.

        Raises UserError where layers are to be chosen without a limit, or the state alone exceeds it.
        """
        unit = topology.units[place.unit]
        self._topology, self._place, self._stages, self._kept = topology, place, stages, kept
        self._chooses = unit.checkpointing == "auto"
        self._is_limited = unit.device_memory_gib is not None
        self.limit = unit.device_memory_gib * _GIB if unit.device_memory_gib is not None else GPU_SHARE * device_bytes
        """Most bytes that a step may take."""
        if self._chooses and math.isinf(self.limit):
            raise UserError(
                f"unit {place.unit!r} has checkpointing 'auto', but a CPU sets no limit: give the unit a device_memory_gib, or "
                "take checkpointing true or false"
            )
        self._state = state
        for group in groups:
            most = torch.tensor([*astuple(self._state), -self.limit], dtype=torch.float64, device=stages[0].device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            *sizes, limit = most.tolist()
            self._state, self.limit = StateBytes(*map(int, sizes)), -limit
        both = enumerate(kept)
        savings = [(saving, chunk, layer) for chunk, of_chunk in both for layer, saving in of_chunk.savings]
        self._savings = sorted(savings, key=lambda one: -one[0])
        self.forecast: Forecast | None = None
        """Of the last step that was looked at."""

    def fit(self, actions: Sequence[Action], num_rows: Callable[[Kind], Mapping[int, int]]) -> None:
        """Look at a step before it begins: log the forecast of the first one, and choose layers, or check the limit, of each.

        num_rows: as in `deadlock.check_rows`; called for the first step, and for all of them where there is a limit. Raises
        UserError where the step is forecast to take more than the unit's `device_memory_gib`, whatever runs again.
        """
        is_first = self.forecast is None
        if not (is_first or self._chooses or self._is_limited):
            return
        rows = {kind: num_rows(kind) for kind in (Kind.FORWARD, Kind.BACKWARD)}
        if self._chooses:
            self._choose(self._fewest(lambda count: self._forecast(actions, rows, count).total))
        self.forecast = self._forecast(actions, rows, None)
        if is_first:
            self._log(self.forecast)
        if self._is_limited and self.forecast.total > self.limit:
            raise UserError(self._too_much(self.forecast))

    def _fewest(self, total: Callable[[int], float]) -> int:
        """Return the fewest layers that must run again to keep to the limit, or else the number with which least is taken.

        The first one costs what a layer holds while it runs again; from there on each saves something.
        """
        most = len(self._savings)
        if not most or total(0) <= self.limit:
            return 0
        fewest = bisect_left(range(most + 1), True, lo=1, key=lambda count: total(count) <= self.limit)
        return fewest if fewest <= most else min((0, most), key=total)

    def _choose(self, count: int) -> None:
        for chunk, stage in enumerate(self._stages):
            stage.checkpointed = self._chosen(chunk, count)

    def _chosen(self, chunk: int, count: int) -> frozenset[int]:
        return frozenset(layer for _, of, layer in self._savings[:count] if of == chunk)

    def _forecast(self, actions: Sequence[Action], rows: Mapping[Kind, Mapping[int, int]], count: int | None) -> Forecast:
        """Forecast a step. count: number of layers, of those that save most, that run again; None: as the stages are."""
        again = [stage.checkpointed if count is None else self._chosen(chunk, count) for chunk, stage in enumerate(self._stages)]
        topology, place = self._topology, self._place
        pp, flow = topology.units[place.unit].pp, GradientFlow.of(topology, place.unit)
        # Under zero-bubble, what runs again in a backward is kept from there until the weight gradients.
        per_row = [
            one.of_row(() if topology.schedule == ZERO_BUBBLE else some) for one, some in zip(self._kept, again, strict=True)
        ]

        def amounts(kind: Kind) -> list[float]:
            held = []
            for action in actions:
                number, has_backward = rows[kind].get(action.microbatch, 0), flow.has_backward(action.chunk * pp + place.stage)
                held.append(has_backward * (per_row[action.chunk] * number + self._kept_of_head(action.chunk, number)))
            return held

        kinds = np.array([action.kind for action in actions], np.int64)
        takes, gives = np.array(amounts(Kind.FORWARD)), np.array(amounts(Kind.BACKWARD))
        until = freed_by(topology.schedule, has_weights=flow.has_weights(place.stage))
        most_rows = max(rows[Kind.FORWARD].values(), default=0)
        return Forecast(
            state=self._state,
            activations=float(activation_memory(kinds, takes, gives, until).max(initial=0.0)) if len(actions) else 0.0,
            working=most_rows * self._working_of_row(again) + self._working_of_head(most_rows),
            num_checkpointed=sum(map(len, again)),
            num_layers=sum(len(stage.layers) for stage in self._stages),
        )

    def _working_of_row(self, again: Sequence[Collection[int]]) -> float:
        """Return the bytes of a row that a backward takes: those of gradients, and of a layer that runs again."""
        largest = max((size for one in self._kept for size in one.layers), default=0.0)
        ends = max((one.ends for one in self._kept), default=0.0)
        return _BACKWARD_SHARE * max(largest, ends) + (largest if any(map(len, again)) else 0.0)

    def _head(self, chunk: int) -> LlmStage | None:
        """Return the stage of a chunk if it has a head, else None."""
        stage = self._stages[chunk]
        return stage if isinstance(stage, LlmStage) and stage.is_last else None

    def _kept_of_head(self, chunk: int, rows: int) -> float:
        """Return the bytes that a head keeps of a microbatch, of which every row is taken to have a target.

        They are the hidden states, or their gradients and that of the head's weight where they are computed with the loss.
        """
        if (stage := self._head(chunk)) is None:
            return 0.0
        of_rows = 4.0 * rows * stage.width
        weight = stage.model.decoder.output_weight
        return of_rows + (weight.nbytes if stage.holds_weight_gradient and rows else 0)

    def _working_of_head(self, rows: int) -> float:
        heads = [stage for chunk in range(len(self._stages)) if (stage := self._head(chunk)) is not None]
        sizes = [len(stage.model.decoder.output_weight) for stage in heads]
        return float(sum(_LOGIT_BYTES * size * min(rows, targets_at_a_time(size)) for size in sizes))

    def _log(self, forecast: Forecast) -> None:
        limit: dict[str, object] = {} if math.isinf(self.limit) else {"limit_gib": round(self.limit / _GIB, 3)}
        if self._stages[0].device.type == "cuda":  # all data of the step have come, and lie there
            limit["pinned_host_gib"] = round(PinnedMemory().allocated_bytes / _GIB, 3)
        log.info("memory forecast %s", pairs(place=str(self._place), **forecast.fields(), **limit))
        if forecast.total > self.limit and not self._is_limited:
            log.warning("this may not fit the GPU: take checkpointing auto %s", pairs(place=str(self._place), **limit))

    def _too_much(self, forecast: Forecast) -> str:
        every = forecast.num_checkpointed == forecast.num_layers or self._chooses
        remedy = "more stages (pp) or slices (tp)" if every else "checkpointing: auto"
        return (
            f"stage {self._place.stage} of {self._place.unit} replica {self._place.replica} is forecast to take "
            f"{forecast.total / _GIB:.3g} GiB ({forecast.state.during_backward / _GIB:.3g} of weights, gradients and optimizer, "
            f"{forecast.activations / _GIB:.3g} of activations, {forecast.working / _GIB:.3g} while a layer runs), with "
            f"{forecast.num_checkpointed} of {forecast.num_layers} layers checkpointed, more than its device_memory_gib "
            f"{self.limit / _GIB:.3g}: give the unit {remedy}, plan smaller microbatches (more of them), or raise the limit"
        )


def log_measured(place: str, forecast_bytes: float, measured_bytes: int) -> None:
    """Log what the allocator gave out at most in a step beside what was forecast for all places of the process together, as a
    warning if the forecast was too low.

    measured_bytes: as from `torch.cuda.max_memory_allocated`.
    """
    fields = {"place": place, "forecast_gib": round(forecast_bytes / _GIB, 3), "taken_gib": round(measured_bytes / _GIB, 3)}
    if measured_bytes > (1 + _TOLERANCE) * forecast_bytes:
        log.warning("the step took more memory than forecast %s", pairs(**fields))
    else:
        log.info("memory of the step %s", pairs(**fields))
