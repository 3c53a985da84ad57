"""Checkpoints of FSDP ranks, in files of the form of a pipeline's (`pipeline.checkpoint_files`), which goes on from them, too.

Every rank writes its shards, and reads what any number of ranks has
written. Weights and AdamW's moments are cut along their first dimension, as FSDP2 cuts them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.errors import UserError
from headrace.observability.logs import pairs
from headrace.trainer.models.fused_linear import Part
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
    for parameter, fused in model.sharded.items():
        _read(checkpoint, WEIGHT, fused, parameter)
        kinds = (_STEP, *_MOMENTS)
        if parameter.requires_grad and all(
            TensorKey(name=part.name, kind=kind) in checkpoint for part in fused for kind in kinds
        ):
            state = optimizer.state[parameter]
            state[_STEP] = checkpoint.read(TensorKey(name=fused[0].name, kind=_STEP), ()).to(parameter.device)
            for kind in _MOMENTS:
                state[kind] = torch.zeros_like(parameter)
                _read(checkpoint, kind, fused, state[kind])


def _written(model: OrchestratedModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[TensorKey, Tensor]]:
    """Yield the tensors that this rank writes, with their keys: of several replicas of a shard, the first one writes."""
    if model.mesh.ndim == 2 and model.mesh.get_local_rank(0) > 0:
        return
    index, count = model.mesh.get_local_rank(-1), model.mesh.size(-1)
    for parameter, fused in model.sharded.items():
        state = optimizer.state.get(parameter, {})
        for part in fused:
            for kind, tensor in {WEIGHT: parameter, **{kind: state[kind] for kind in _MOMENTS if kind in state}}.items():
                own = part.of_rows(_shard(tensor), _first_row(tensor))
                yield TensorKey(name=part.name, kind=kind, dim=0, index=index, count=count), own
            if _STEP in state and index == 0:
                yield TensorKey(name=part.name, kind=_STEP), _shard(state[_STEP])


def _read(checkpoint: Checkpoint, kind: str, fused: Sequence[Part], into: Tensor) -> None:
    """Read this rank's shard of a tensor that has the shape of a parameter."""
    first, shard = _first_row(into), _shard(into)
    for part in fused:
        shape = into.shape if part.rows is None else (part.rows, *into.shape[1:])
        whole = checkpoint.read(TensorKey(name=part.name, kind=kind), shape)
        own = part.of_rows(shard, first)
        own.copy_(whole[max(0, first - part.begin) :][: len(own)] if isinstance(into, DTensor) else whole)


def _first_row(tensor: Tensor) -> int:
    """Return which row of a tensor is the first of this rank's shard: FSDP2 cuts as torch.chunk does."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    return -(-len(tensor) // mesh.size(-1)) * mesh.get_local_rank(-1)


def _shard(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
