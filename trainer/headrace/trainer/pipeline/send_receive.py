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
    """The messages of one process during a step. A channel and a number together tell a message of a step.

    The gradient with a number answers the activations with the same number: its sender has received these.
    """

    def __init__(
        self,
        channels: Channels,
        device: torch.device,
        dtype: torch.dtype,
        wait: Callable[[dist.Work], object] = methodcaller("wait"),
    ) -> None:
        """`dtype`: dtype of all messages. `wait`: function that waits for a message to arrive."""
        self.channels = channels
        self._wait = wait
        self._device = device
        self.dtype = dtype
        self._sent: dict[Channel, dict[int, dist.Work]] = {}  # by number, in the order of sending; each keeps its tensor
        self._expected: dict[tuple[Channel, int], tuple[dist.Work, Tensor]] = {}  # by channel and number
        self._own: dict[tuple[Channel, int], Tensor] = {}  # from this process to itself, by channel and number
        self._own_with_gradient: set[tuple[Channel, int]] = set()  # those of them that are expected to require one
        self.waited_s = 0.0
        """Total seconds waited for messages that had not arrived yet."""

    def send(self, tensor: Tensor, channel: Channel, number: int) -> None:
        """Begin to send a tensor, without waiting.

        The tensor, with the autograd graph that it came from, is kept until an answer, or until the next message of the channel
        finds it sent, or until `flush`, and must not be written to until then. gloo never reports a send as done: there what
        nothing answers stays until `flush`.
        """
        if tensor.dtype is not self.dtype or not tensor.is_contiguous():  # saves two calls into torch
            tensor = tensor.to(self.dtype).contiguous()
        if self.channels.are_within(channel):
            self._own[channel, number] = tensor.detach()
        else:
            end = self.channels[channel]
            sent = self._sent.setdefault(channel, {})
            _drop_done(sent)
            sent[number] = end.backend.send([tensor], end.peer, end.tag)

    def expect(self, shape: tuple[int, int], channel: Channel, number: int, *, requires_grad: bool = False) -> None:
        """Post the receive of a message, before or after it is sent. requires_grad: whether the received tensor does.

        The messages of a channel must be expected in the order in which they are sent.
        """
        if self.channels.are_within(channel):
            if requires_grad:
                self._own_with_gradient.add((channel, number))
        else:
            tensor = torch.empty(shape, dtype=self.dtype, device=self._device, requires_grad=requires_grad)
            end = self.channels[channel]
            self._expected[channel, number] = end.backend.recv([tensor], end.peer, end.tag), tensor

    def receive(self, channel: Channel, number: int) -> Tensor:
        """Wait for an expected message and return it. An answer frees the tensor that it answers."""
        if self.channels.are_within(channel):
            own = self._own.pop((channel, number))
            needs_gradient = (channel, number) in self._own_with_gradient
            self._own_with_gradient.discard((channel, number))
            return own.requires_grad_(needs_gradient)
        work, tensor = self._expected.pop((channel, number))
        began_s = time.monotonic()
        self._wait(work)
        self.waited_s += time.monotonic() - began_s
        if channel.kind == Kind.BACKWARD and (sent := self._sent.get(channel.back)) and number in sent:
            sent.pop(number).wait()  # for nothing, as it has arrived, but NCCL's keeps the tensor until somebody does
        return tensor

    def flush(self) -> None:
        """Wait until everything that was sent has left, which means that the receivers have taken it or are taking it."""
        for sent in self._sent.values():
            for work in sent.values():
                work.wait()
        self._sent.clear()


def _drop_done(sent: dict[int, dist.Work]) -> None:
    """Drop the first messages of a channel, those that have left: a channel's messages leave in order."""
    while sent and (first := next(iter(sent.values()))).is_completed():
        first.wait()
        del sent[next(iter(sent))]
