"""On which device a process trains, and what cannot be trained on it yet."""

from __future__ import annotations

import os

import torch

from headrace.errors import UserError


def local_device(name: str = "auto") -> torch.device:
    """Of this rank: "cpu", "cuda", or "auto", the GPU where there is one. Raises UserError for one that torch does not find."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"--device {name}, but torch finds no GPU here: take --device cpu, or a build of torch with CUDA")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_pipeline(device_type: str, world_size: int) -> None:
    """Raise UserError for a pipeline of several processes on GPUs.

    A stage posts the next action's receives before its own sends. NCCL runs what two processes exchange strictly in the order
    in which each of them posts it, whatever the tags say, so that both sides would wait for ever.
    """
    if device_type != "cpu" and world_size > 1:
        raise UserError(
            f"a pipeline of {world_size} processes on {device_type} devices would wait for itself in NCCL, for which its "
            "messages are not ordered yet: train it with --device cpu, or without --topology, where each GPU has the whole model"
        )


def check_nodes(device_type: str) -> None:
    """Raise UserError for nodes on GPUs: they talk through gloo, which would read a GPU's addresses as the host's."""
    if device_type != "cpu":
        raise UserError(
            f"nodes that may be lost exchange tensors in host memory, which those of a {device_type} device are not in: "
            "train them with --device cpu, or without --nodes"
        )
