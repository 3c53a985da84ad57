"""Point-to-point transfer of tensors: sends that nothing waits for, and receives that are posted before they are needed.

Both sides know every shape beforehand (a message of another size than expected ends a gloo process), so nothing but data goes
over the wire. They also know the order of the messages on every channel, which is that of the sender's program
(`headrace.trainer.pipeline.message_order`): no message says which one it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import methodcaller

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.schedule import Kind
from headrace.trainer.pipeline.channels import Channel, Channels


class Wire:
    """The messages of one process during a step. A kind, the other process and a number together tell a message of a step.

    The gradient with a number answers the activations with the same number: its sender has received these.
    """

    def __init__(
        self,
        rank: int,
        channels: Channels,
        device: torch.device,
        dtype: torch.dtype,
        wait: Callable[[dist.Work], object] = methodcaller("wait"),
    ) -> None:
        """`rank`: of this process. `dtype`: dtype of all messages. `wait`: function that waits for a message to arrive."""
        self.channels = channels
        self._wait = wait
        self._rank = rank
        self._device = device
        self._dtype = dtype
        self._sent: dict[tuple[Kind, int, int], dist.Work] = {}  # by kind, receiver and number; each keeps its tensor
        self._expected: dict[tuple[Kind, int, int], tuple[dist.Work, Tensor]] = {}  # by kind, source and number
        self._own: dict[tuple[Kind, int], Tensor] = {}  # from this process to itself, by kind and number
        self.waited_s = 0.0
        """Total seconds waited for messages that had not arrived yet."""

    def send(self, tensor: Tensor, kind: Kind, to: int, number: int) -> None:
        """Begin to send a tensor, without waiting.

        The tensor, with the autograd graph that it came from, is kept until an answer or `flush`, and must not be written to
        until then: gloo never reports a send as done.
        """
        if tensor.dtype is not self._dtype or not tensor.is_contiguous():  # saves two calls into torch
            tensor = tensor.to(self._dtype).contiguous()
        if to == self._rank:
            self._own[kind, number] = tensor.detach().requires_grad_(tensor.requires_grad)
        else:
            end = self.channels[Channel(kind, self._rank, to)]
            self._sent[kind, to, number] = end.backend.send([tensor], end.peer, end.tag)

    def expect(self, shape: tuple[int, int], kind: Kind, source: int, number: int, *, requires_grad: bool = False) -> None:
        """Post the receive of a message, before or after it is sent. requires_grad: whether the received tensor does.

        The messages of a channel must be expected in the order in which they are sent.
        """
        if source != self._rank:
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device, requires_grad=requires_grad)
            end = self.channels[Channel(kind, source, self._rank)]
            self._expected[kind, source, number] = end.backend.recv([tensor], end.peer, end.tag), tensor

    def receive(self, kind: Kind, source: int, number: int) -> Tensor:
        """Wait for an expected message and return it. An answer frees the tensor that it answers."""
        if source == self._rank:
            return self._own.pop((kind, number))
        work, tensor = self._expected.pop((kind, source, number))
        began_s = time.monotonic()
        self._wait(work)
        self.waited_s += time.monotonic() - began_s
        if kind == Kind.BACKWARD and (answered := self._sent.pop((Kind.FORWARD, source, number), None)) is not None:
            answered.wait()  # for nothing, as it has arrived, but NCCL's keeps the tensor until somebody does
        return tensor

    def flush(self) -> None:
        """Wait until everything that was sent has left, which means that the receivers have taken it or are taking it."""
        for work in self._sent.values():
            work.wait()
        self._sent.clear()
