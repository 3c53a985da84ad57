"""Point-to-point transfer of tensors: sends that nothing waits for, and receives that are posted before they are needed.

Both sides know every shape beforehand (a message of another size than expected ends a gloo process), so nothing but data goes
over the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """The messages of one process during a step. A pair of processes tells its messages of a step apart by their tags.

    A message with tag 2k + 1 answers the one with tag 2k: its sender has received that message.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        wait: Callable[[dist.Work], object] = dist.Work.wait,
    ) -> None:
        """`dtype`: dtype of all messages. `group`: the group whose ranks are used, None for all processes. `wait`: function that
        waits for a message to arrive.
        """
        group = group or dist.group.WORLD
        assert group is not None, "torch.distributed is initialised"
        self._wait = wait
        # The backend is called directly: the overhead of torch.distributed and of a group's dispatch takes as long as a message.
        backend = group._get_backend(device) if isinstance(group, dist.ProcessGroup) else group
        self._backend = cast(dist.ProcessGroup, backend)  # it has the same methods
        self._device = device
        self._dtype = dtype
        self._rank = group.rank()
        self._sent: dict[tuple[int, int], dist.Work] = {}  # by receiver and tag
        self._expected: dict[tuple[int, int], tuple[dist.Work, Tensor]] = {}  # by source and tag
        self._own: dict[int, Tensor] = {}  # by tag, from this process to itself
        self.waited_s = 0.0
        """Total seconds waited for messages that had not arrived yet."""

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Begin to send a tensor, without waiting.

        The tensor, with the autograd graph that it came from, is kept until an answer or `flush`, and must not be written to
        until then: gloo never reports a send as done.
        """
        if tensor.dtype is not self._dtype or not tensor.is_contiguous():  # saves two calls into torch
            tensor = tensor.to(self._dtype).contiguous()
        if to == self._rank:
            self._own[tag] = tensor.detach().requires_grad_(tensor.requires_grad)
        else:
            self._sent[to, tag] = self._backend.send([tensor], to, tag)

    def expect(self, shape: tuple[int, int], source: int, tag: int, *, requires_grad: bool = False) -> None:
        """Post the receive of a message, before or after it is sent. requires_grad: whether the received tensor does."""
        if source != self._rank:
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device, requires_grad=requires_grad)
            self._expected[source, tag] = self._backend.recv([tensor], source, tag), tensor

    def receive(self, source: int, tag: int) -> Tensor:
        """Wait for an expected message and return it. An answer frees the tensor that it answers."""
        if source == self._rank:
            return self._own.pop(tag)
        work, tensor = self._expected.pop((source, tag))
        began_s = time.monotonic()
        self._wait(work)
        self.waited_s += time.monotonic() - began_s
        if tag % 2:
            self._sent.pop((source, tag - 1), None)
        return tensor

    def flush(self) -> None:
        """Wait until everything that was sent has left, which means that the receivers have taken it or are taking it."""
        for work in self._sent.values():
            work.wait()
        self._sent.clear()
