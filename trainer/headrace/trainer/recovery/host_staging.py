"""Tensors of a GPU on their way to another node, through host memory: they are staged in pinned memory.

gloo would take the address of a tensor on a GPU for one in host memory. So nothing that is on a device is handed to it: what is
sent is copied to the host first, and what arrives is copied to the device once it has been waited for. On a CPU nothing is
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor's values in host memory, pinned where there is a GPU: the tensor itself if it is there already.

    Waits until the current stream has computed them, as gloo reads them at once.
    """
    host = host_memory_for(tensor)
    if host is not tensor:
        host.copy_(tensor.detach())
    return host


def host_memory_for(tensor: Tensor) -> Tensor:
    """Return memory of the host for a tensor's values, pinned where there is a GPU: the tensor itself if it is there already."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())


@torch.no_grad()
def from_host(host: Tensor, tensor: Tensor) -> Tensor:
    """Write values that are in host memory into a tensor, unless they are its own, and return the tensor.

    The host does not wait for the copy to a GPU: the current stream does.
    """
    if host is not tensor:
        tensor.copy_(host, non_blocking=True)
    return tensor


class StagedMessage:
    """A message that is received into host memory for a tensor on a device."""

    def __init__(self, work: dist.Work, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self.work = work
        self._hosts, self._tensors = hosts, tensors

    def arrive(self) -> None:
        """Copy what has come to the device. To be called once `work` has been waited for."""
        for host, tensor in zip(self._hosts, self._tensors, strict=True):
            from_host(host, tensor)


class StagedGroup:
    """Sends and receives tensors of a device over a gloo group, by way of host memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        """Begin to send tensors, whose values are copied at once. The work keeps the copies."""
        return self._group.send([to_host(tensor) for tensor in tensors], peer, tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> StagedMessage:
        """Post the receive of tensors, which have the values after `waiting`'s wait for the message."""
        hosts = [host_memory_for(tensor) for tensor in tensors]
        return StagedMessage(self._group.recv(hosts, peer, tag), hosts, tensors)


def staged(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return what sends and receives the tensors of a device over a gloo group: the group itself on a CPU."""
    return group if device.type == "cpu" else cast(dist.ProcessGroup, StagedGroup(group))  # it has the methods that are needed


def waiting(wait: Callable[[dist.Work], None]) -> Callable[[dist.Work], None]:
    """Return a function that waits for a message of a `staged` group by `wait`, and has it arrive on the device."""

    def wait_for(work: dist.Work) -> None:
        if isinstance(work, StagedMessage):
            wait(work.work)
            work.arrive()
        else:
            wait(work)

    return wait_for
