"""Checkpoints of a pipeline, the last resort: all processes save beside training, and any topology of the model can load them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.observability.logs import pairs
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
_STATE = (_STEP, "exp_avg", "exp_avg_sq")


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
    for weight, parameter in step.whole(_held(step), writes=True):
        with torch.no_grad():
            parameter.copy_(checkpoint.read(weight, parameter.shape))
        if not (parameter.requires_grad and step.optimizer.owns(parameter)):
            continue
        keys = [_key_of_state(weight, kind) for kind in _STATE]
        if all(key in checkpoint for key in keys):
            shapes = [() if key.kind == _STEP else parameter.shape for key in keys]
            state = {key.kind: checkpoint.read(key, shape) for key, shape in zip(keys, shapes, strict=True)}
            step.optimizer.load_state(parameter, {kind: tensor.to(parameter.device) for kind, tensor in state.items()})


def _held(step: PlaceStep) -> Iterator[tuple[TensorKey, nn.Parameter]]:
    """Yield the parameters of a place, each with the key of its weight (or tensor-parallel slice) in a checkpoint."""
    place = step.place
    slices = step.topology.units[place.unit].tp
    held = {name: parameter for stage in step.stages for name, parameter in stage.model.named_parameters()}
    for name, parameter in held.items():
        dim = cut_dimension(name) if slices > 1 else None
        if dim is None:
            yield TensorKey(name=name, kind=WEIGHT), parameter
        else:
            yield TensorKey(name=name, kind=WEIGHT, dim=dim, index=place.slice, count=slices), parameter


def _written(step: PlaceStep) -> Iterator[tuple[TensorKey, Tensor]]:
    """Yield the tensors that a place has to write, with their keys: weights, then optimizer state. Collective.

    What is yielded is to be copied before the next one: moments are gathered from the replicas a few at a time.
    """
    step.optimizer.wait()
    own: dict[nn.Parameter, TensorKey] = {}
    for weight, parameter in step.whole(_held(step)):
        writes = step.optimizer.writes(parameter) if parameter.requires_grad else step.place.replica == 0
        if writes and not step.is_copy(parameter):
            own[parameter] = weight
            yield weight, parameter.detach()
    for parameter, state in step.optimizer.state():
        if parameter in own:
            yield from ((_key_of_state(own[parameter], kind), tensor) for kind, tensor in state.items())


def _key_of_state(weight: TensorKey, kind: str) -> TensorKey:
    if kind == _STEP:
        return TensorKey(name=weight.name, kind=kind)
    return TensorKey(name=weight.name, kind=kind, dim=weight.dim, index=weight.index, count=weight.count)
