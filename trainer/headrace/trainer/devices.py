"""The device that a process trains on, and what cannot be trained on a GPU yet, or has not been."""

from __future__ import annotations

import logging
import os

import torch

from headrace.errors import UserError
from headrace.observability.logs import pairs

log = logging.getLogger(__name__)


def local_device(name: str = "auto") -> torch.device:
    """Return this rank's device. `name`: "cpu", "cuda" (the GPU with number LOCAL_RANK), or "auto" (that GPU if there is one).

    Raises UserError where a GPU is asked for and torch finds none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"--device {name}, but torch finds no GPU here: take --device cpu, or a build of torch with CUDA")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


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


def check_nodes(device_type: str) -> None:
    """Raise UserError for nodes of a recoverable job on GPUs: they use gloo, which would take GPU addresses for host memory."""
    if device_type != "cpu":
        raise UserError(
            f"nodes that may be lost exchange tensors in host memory, which those of a {device_type} device are not in: "
            "train them with --device cpu, or without --nodes"
        )
