"""The device that a process trains on, and what cannot be trained on a GPU yet, or has not been."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import UserError
from headrace.launcher_variables import local_num_ranks, local_rank
from headrace.model_shape import ModelShape
from headrace.observability.logs import pairs
from headrace.trainer.collectives import all_gather, reduce_scatter

log = logging.getLogger(__name__)


def local_device(name: str = "auto") -> torch.device:
    """Return this rank's device. `name`: "cpu", "cuda" (the GPU with number LOCAL_RANK), or "auto" (that GPU if there is one).

    Raises UserError where a GPU is asked for and torch finds none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"--device {name}, but torch finds no GPU here: take --device cpu, or a build of torch with CUDA")
    number = local_rank()
    check_gpus(number, local_num_ranks(), torch.cuda.device_count())
    return torch.device("cuda", number)


def check_device(device: torch.device) -> None:
    """Raise UserError for a GPU that torch does not find here."""
    if device.type == "cpu":
        return
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= num_gpus:
        raise UserError(
            f"the device {device}, but torch finds {num_gpus} GPU(s) here: take another device, or a build of torch with CUDA"
        )


def check_gpus(local_rank: int, local_ranks: int, num_gpus: int) -> None:
    """Raise UserError if a host has fewer GPUs that this rank sees than ranks. `local_rank`: this rank's number on its host."""
    num_ranks = max(local_rank + 1, local_ranks)
    if num_ranks > num_gpus:
        raise UserError(
            f"{num_ranks} ranks on this host, but local rank {local_rank} sees {num_gpus} GPU(s), and each "
            "rank takes the one with its number: start as many as there are GPUs (torchrun's --nproc-per-node, or gpus_per_node "
            "of --nodes), let every rank see all GPUs (CUDA_VISIBLE_DEVICES), or take --device cpu"
        )


def check_shared_gpus(gpus: Mapping[int, str]) -> None:
    """Raise UserError if two ranks have the same GPU, which NCCL does not allow. `gpus`: the id of each rank's GPU, unique among
    all hosts."""
    ranks: dict[str, int] = {}
    for rank, gpu in gpus.items():
        if (other := ranks.setdefault(gpu, rank)) != rank:
            raise UserError(
                f"ranks {other} and {rank} have the same GPU ({gpu}), which NCCL does not allow: give each rank a GPU of its own "
                "(LOCAL_RANK, CUDA_VISIBLE_DEVICES), or start fewer ranks"
            )


def check_backend(device_type: str, *, has_nccl: bool) -> None:
    """Raise UserError if torch lacks the backend for several ranks on this type of device."""
    if device_type == "cuda" and not has_nccl:
        raise UserError(
            "several ranks on GPUs exchange tensors by NCCL, which this build of torch lacks: take a build with it, or "
            "--device cpu"
        )


def check_operations(group: dist.ProcessGroup, device: torch.device, *, exchange_rows: bool = False) -> None:
    """Run each collective operation of a training step once, on a few numbers. A collective call.

    It also connects the group's processes, which some backends do with the first operation only. `exchange_rows`: whether the
    group's ranks send rows to each other, as FSDP ranks do. Raises UserError if the group's backend lacks an operation.
    """
    for name, run in (_OPERATIONS | _EXCHANGE if exchange_rows else _OPERATIONS).items():
        with told_if_lacking(f"{name} of {group.size()} ranks", dist.get_backend(group), device):
            run(group, torch.zeros(group.size(), device=device))


@contextmanager
def told_if_lacking(operation: str, backend: str, device: torch.device) -> Iterator[None]:
    """Turn what torch raises for an operation that a backend lacks into a UserError; other errors pass."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as err:
        if not any(word in str(err).lower() for word in _LACKS):
            raise
        raise UserError(
            f"training needs {operation} on {device.type}, which the backend {backend} lacks ({str(err).splitlines()[0]}): take "
            "the release of torch that Headrace asks for, with gloo for CPUs and NCCL for GPUs"
        ) from err


_LACKS = ("support", "not implemented", "no backend type associated")
"""What torch says of a backend that lacks an operation, unlike one that has failed at it."""


def _scatter(group: dist.ProcessGroup, numbers: Tensor) -> None:
    reduce_scatter(numbers.new_empty(1), numbers, group)


def _gather(group: dist.ProcessGroup, numbers: Tensor) -> None:
    all_gather(numbers, numbers[:1].clone(), group)


_Operations = dict[str, Callable[[dist.ProcessGroup, Tensor], object]]

_OPERATIONS: _Operations = {
    "all-reduce of float64": lambda group, numbers: dist.all_reduce(numbers.double(), group=group),
    "all-reduce of the largest bytes": lambda group, numbers: dist.all_reduce(numbers.byte(), dist.ReduceOp.MAX, group=group),
    "reduce-scatter": _scatter,
    "all-gather": _gather,
}

_EXCHANGE: _Operations = {
    "all-to-all": lambda group, numbers: dist.all_to_all_single(torch.empty_like(numbers), numbers, group=group),
}


def warn_quadratic_attention(device_type: str, precision: str, shape: ModelShape) -> None:
    """Log a warning for the units whose attention would take memory with the square of a segment's length.

    torch's fused kernels for float32 on GPUs do not take grouped queries, so that its plain implementation runs. `precision`: a
    key of PRECISIONS.
    """
    if device_type == "cpu" or precision != "fp32":
        return
    for unit, layers in shape.units.items():
        if layers.heads != layers.kv_heads:
            log.warning(
                "attention takes memory with the square of a segment's length: take --precision bf16 %s",
                pairs(unit=unit, heads=layers.heads, kv_heads=layers.kv_heads, precision=precision),
            )


def warn_unproven(device_type: str, world_size: int) -> None:
    """Log a warning for a pipeline of several processes on GPUs.

    Its messages cannot wait for each other on a transport that keeps their order, as NCCL does. That is shown on CPUs with such a
    transport, and has not been run on several GPUs.
    """
    if device_type != "cpu" and world_size > 1:
        log.warning(
            "a pipeline of several processes on GPUs has run with emulated NCCL only; if it stops, --device cpu goes on %s",
            pairs(processes=world_size, device=device_type),
        )


def warn_staged_nodes(device_type: str) -> None:
    """Log a warning for nodes of a recoverable job on GPUs: their tensors go through host memory.

    Four nodes that share one GPU have run so; nodes with a GPU each have not.
    """
    if device_type != "cpu":
        log.warning(
            "nodes that may be lost exchange tensors by gloo, through host memory, which is slower than NCCL and has run on one "
            "GPU only, shared by all nodes; if it fails, --device cpu goes on %s",
            pairs(device=device_type),
        )
