"""Checkpoints of FSDP ranks, in files of the form of a pipeline's (`pipeline.checkpoint_files`), which goes on from them, too.

Every rank writes its shards, and reads what any number of ranks has
written. Weights and AdamW's moments are cut along their first dimension, as FSDP2 cuts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headrace.errors import UserError
from headrace.observability.logs import pairs
from headrace.trainer.orchestrated.orchestrated_model import OrchestratedModel
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

log = logging.getLogger(__name__)

_STEP = "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpCheckpoints:
    """A folder of checkpoints, to which all ranks of a mesh save after the same steps."""

    def __init__(self, folder: Path, model: OrchestratedModel, optimizer: torch.optim.Optimizer, *, goes_on: bool) -> None:
        """Remove incomplete checkpoints. A collective call.

        goes_on: whether this run continues the one whose checkpoints are in the folder. Raises UserError if it has some and this
        run does not.
        """
        if complete_steps(folder) and not goes_on:
            raise UserError(f"{folder} has checkpoints already: go on from them with --resume {folder}, or name another folder")
        dist.barrier(group=model.group)  # all have looked before any folder is removed
        if dist.get_rank() == 0:
            remove_incomplete(folder)
        dist.barrier(group=model.group)
        self._folder, self._model, self._optimizer = folder, model, optimizer
        self._saved = -1

    def save(self, step: int, loader: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Save the state after `step` steps, unless it was saved last. Training waits for it. A collective call.

        loader: the state of the loader. record: how the weights are trained (`agreement.training_record`). A write that fails is
        logged, and its checkpoint stays incomplete.
        """
        if step == self._saved:
            return
        self._saved = step
        rank, num_ranks = dist.get_rank(), self._model.num_ranks
        tensors = {key: tensor.float().cpu().contiguous() for key, tensor in _written(self._model, self._optimizer)}
        try:
            write(self._folder, step, rank, num_ranks, {**loader, TRAINING_RECORD: dict(record)}, tensors)
        except OSError as err:
            log.error("checkpoint failed %s", pairs(step=step, folder=self._folder, error=err))
        else:
            log.info("checkpoint written %s", pairs(step=step, folder=self._folder))
        dist.barrier(group=self._model.group)
        if rank == 0:
            prune(self._folder)


@torch.no_grad()
def load(checkpoint: Checkpoint, model: OrchestratedModel, optimizer: torch.optim.Optimizer) -> None:
    """Load this rank's shards of weights and optimizer state. Raises UserError if the checkpoint is of another model."""
    for name, parameter in model.sharded.items():
        _shard(parameter).copy_(_own(checkpoint, TensorKey(name=name, kind=WEIGHT), parameter))
        keys = [TensorKey(name=name, kind=kind) for kind in (_STEP, *_MOMENTS)]
        if parameter.requires_grad and all(key in checkpoint for key in keys):
            state = optimizer.state[parameter]
            state[_STEP] = checkpoint.read(keys[0], ()).to(parameter.device)
            for key in keys[1:]:
                state[key.kind] = torch.zeros_like(parameter)
                _shard(state[key.kind]).copy_(_own(checkpoint, key, parameter))


def _written(model: OrchestratedModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[TensorKey, Tensor]]:
    """Yield the tensors that this rank writes, with their keys: of several replicas of a shard, the first one writes."""
    if model.mesh.ndim == 2 and model.mesh.get_local_rank(0) > 0:
        return
    index, count = model.mesh.get_local_rank(-1), model.mesh.size(-1)
    for name, parameter in model.sharded.items():
        yield TensorKey(name=name, kind=WEIGHT, dim=0, index=index, count=count), _shard(parameter)
        state = optimizer.state.get(parameter, {})
        for kind in (kind for kind in _MOMENTS if kind in state):
            yield TensorKey(name=name, kind=kind, dim=0, index=index, count=count), _shard(state[kind])
        if _STEP in state and index == 0:
            yield TensorKey(name=name, kind=_STEP), _shard(state[_STEP])


def _own(checkpoint: Checkpoint, key: TensorKey, parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a tensor that has the shape of a parameter: FSDP2 cuts as torch.chunk does."""
    whole = checkpoint.read(key, parameter.shape)
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    most = -(-len(whole) // mesh.size(-1))
    return whole[most * mesh.get_local_rank(-1) :][:most]


def _shard(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
