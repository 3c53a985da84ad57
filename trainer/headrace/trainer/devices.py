"""The device that a process trains on, and checks for what cannot be trained on a GPU yet."""

from __future__ import annotations

import os

import torch

from headrace.errors import UserError


def local_device(name: str = "auto") -> torch.device:
    """Return this rank's device. `name`: "cpu", "cuda" (the GPU with number LOCAL_RANK), or "auto" (that GPU if there is one).

    Raises UserError where a GPU is asked for and torch finds none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"--device {name}, but torch finds no GPU here: take --device cpu, or a build of torch with CUDA")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_pipeline(device_type: str, world_size: int) -> None:
    """Raise UserError for a pipeline of several processes on GPUs.

    They would deadlock: a stage posts the next action's receives before its own sends, and NCCL runs the messages between two
    processes strictly in the order in which each process posts them, whatever their tags.
    """
    if device_type != "cpu" and world_size > 1:
        raise UserError(
            f"a pipeline of {world_size} processes on {device_type} devices would wait for itself in NCCL, for which its "
            "messages are not ordered yet: train it with --device cpu, or a job for ranks that have all units, each on its GPU"
        )


def check_nodes(device_type: str) -> None:
    """Raise UserError for nodes of a recoverable job on GPUs: they use gloo, which would take GPU addresses for host memory."""
    if device_type != "cpu":
        raise UserError(
            f"nodes that may be lost exchange tensors in host memory, which those of a {device_type} device are not in: "
            "train them with --device cpu, or without --nodes"
        )
