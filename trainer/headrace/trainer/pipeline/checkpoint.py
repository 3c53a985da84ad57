"""Checkpoints of a pipeline, the last resort: all processes save beside training, and any topology of the model can load them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.observability.logs import pairs
from headrace.trainer.models.fused_linear import Part, parts_of
from headrace.trainer.pipeline.checkpoint_files import (
    TRAINING_RECORD,
    WEIGHT,
    Checkpoint,
    TensorKey,
    complete_steps,
    prune,
    remove_incomplete,
    write,
)
from headrace.trainer.pipeline.page_locked import PageLockedBlocks
from headrace.trainer.pipeline.pipeline_step import PipelineStep
from headrace.trainer.pipeline.place_step import PlaceStep
from headrace.trainer.pipeline.tensor_parallel import cut_dimension

log = logging.getLogger(__name__)

_STEP = "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = (_STEP, *_MOMENTS)

Stored = Sequence[tuple[TensorKey, Part]]
"""What a checkpoint has of a parameter: the weight's key, or those of all parts if it is fused (`FusedLinear`)."""


class CheckpointWriter:
    """Writes one process's share of each checkpoint. Training waits only for a copy to the host; a thread writes it to disk.

    All processes of the pipeline make one, and call `save` after the same steps. Every tensor is written once: trainable
    parameters and their optimizer state by the replica that has their first element, frozen ones by the first replica.
    """

    def __init__(
        self, folder: Path, step: PipelineStep, *, goes_on: bool = False, record: Mapping[str, Any] | None = None
    ) -> None:
        """Remove incomplete checkpoints from the folder. All processes of the pipeline wait for each other here.

        `goes_on`: whether this run continues the one whose checkpoints are in `folder`. `record`: the result of
        `agreement.training_record`, saved with each checkpoint.

        Raises UserError if the folder has complete checkpoints and this run does not continue from them.
        """
        if complete_steps(folder) and not goes_on:
            raise UserError(f"{folder} has checkpoints already: go on from them with --resume {folder}, or name another folder")
        dist.barrier(group=step.groups.everybody)  # all have looked before any folder is removed
        if dist.get_rank() == 0:
            remove_incomplete(folder)
        dist.barrier(group=step.groups.everybody)
        self._folder = folder
        self._step = step
        self._training_record = {} if record is None else {TRAINING_RECORD: dict(record)}
        self._rank, self._num_ranks = dist.get_rank(), step.topology.world_size
        self._buffers: dict[TensorKey, Tensor] = {}
        self._memory = PageLockedBlocks()  # of the buffers that tensors of a GPU are copied to
        self._writing: Future[None] | None = None
        self._saved = -1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, step: int, loader: Mapping[str, Any]) -> None:
        """Save the state after `step` steps unless it was saved last, once the write of the checkpoint before is done.

        `loader`: state of the StepLoader. A write that fails is logged, and its checkpoint stays incomplete.
        """
        if step == self._saved:
            return
        self._wait()
        self._saved = step
        copies = {key: self._copy(key, tensor) for place in self._step.places for key, tensor in _written(place)}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._writing = self._thread.submit(self._write, step, {**loader, **self._training_record}, copies)

    def close(self) -> None:
        """Wait until the last checkpoint is on disk, and end the thread."""
        self._wait()
        self._thread.shutdown()
        self._buffers.clear()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _copy(self, key: TensorKey, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None:
            allocate = self._memory.take if tensor.is_cuda else torch.empty
            buffer = self._buffers[key] = allocate(tensor.shape, dtype=torch.float32)
        return buffer.copy_(tensor, non_blocking=True)

    def _write(self, step: int, loader: Mapping[str, Any], tensors: Mapping[TensorKey, Tensor]) -> None:
        try:
            write(self._folder, step, self._rank, self._num_ranks, loader, tensors)
            if self._rank == 0:
                prune(self._folder)
        except OSError as err:
            log.error("checkpoint failed %s", pairs(step=step, folder=self._folder, error=err))
        else:
            log.info("checkpoint written %s", pairs(step=step, folder=self._folder))


def load(checkpoint: Checkpoint, step: PipelineStep) -> None:
    """Load this process's weights, and the optimizer state of the parameters that it owns, from a checkpoint.

    Raises UserError if the checkpoint is of another model.
    """
    for place in step.places:
        _load_place(checkpoint, place)


def _load_place(checkpoint: Checkpoint, step: PlaceStep) -> None:
    for stored, parameter in step.whole(_held(step), writes=True):
        with torch.no_grad():
            for weight, part in stored:
                of_part = part.of(parameter)
                of_part.copy_(checkpoint.read(weight, of_part.shape))
        if parameter.requires_grad and step.optimizer.owns(parameter):
            state = _read_state(checkpoint, stored, parameter)
            if state:
                step.optimizer.load_state(parameter, state)


def _read_state(checkpoint: Checkpoint, stored: Stored, parameter: Tensor) -> dict[str, Tensor]:
    """Read the optimizer state of a parameter, to its device; empty if it was never updated."""
    if not all(_key_of_state(weight, kind) in checkpoint for weight, _ in stored for kind in _STATE):
        return {}
    state = {kind: torch.empty_like(parameter, dtype=torch.float32) for kind in _MOMENTS}
    for weight, part in stored:
        for kind, whole in state.items():
            of_part = part.of(whole)
            of_part.copy_(checkpoint.read(_key_of_state(weight, kind), of_part.shape))
    return {_STEP: checkpoint.read(_key_of_state(stored[0][0], _STEP), ()).to(parameter.device), **state}


def _held(step: PlaceStep) -> Iterator[tuple[Stored, nn.Parameter]]:
    """Yield the parameters of a place, each with what a checkpoint has of it, or of its tensor-parallel slice."""
    size = step.topology.units[step.place.unit]
    index = size.tensor_slice(step.place)
    held = {parameter: fused for stage in step.stages for parameter, fused in parts_of(stage.model)}
    for parameter, fused in held.items():
        yield [(_key_of_weight(part.name, index, size.tp), part) for part in fused], parameter


def _written(step: PlaceStep) -> Iterator[tuple[TensorKey, Tensor]]:
    """Yield the tensors that a place has to write, with their keys: weights, then optimizer state. Collective.

    What is yielded is to be copied before the next one: moments are gathered from the replicas a few at a time.
    """
    step.optimizer.wait()
    own: dict[nn.Parameter, Stored] = {}
    for stored, parameter in step.whole(_held(step)):
        writes = step.optimizer.writes(parameter) if parameter.requires_grad else step.is_first_replica
        if writes and not step.is_copy(parameter):
            own[parameter] = stored
            yield from ((weight, part.of(parameter.detach())) for weight, part in stored)
    for parameter, state in step.optimizer.state():
        for weight, part in own.get(parameter, ()):
            for kind, tensor in state.items():
                yield _key_of_state(weight, kind), tensor if kind == _STEP else part.of(tensor)


def _key_of_weight(name: str, index: int, count: int) -> TensorKey:
    dim = cut_dimension(name) if count > 1 else None
    if dim is None:
        return TensorKey(name=name, kind=WEIGHT)
    return TensorKey(name=name, kind=WEIGHT, dim=dim, index=index, count=count)


def _key_of_state(weight: TensorKey, kind: str) -> TensorKey:
    if kind == _STEP:
        return TensorKey(name=weight.name, kind=kind)
    return TensorKey(name=weight.name, kind=kind, dim=weight.dim, index=weight.index, count=weight.count)
