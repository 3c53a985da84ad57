"""Tensors from process to process: sends that nobody waits for, and receives that are posted before they are needed.

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
    """Messages of one process during a step. A pair of processes tells its messages of a step apart by their tags.

    An odd tag is that of the answer to the message with the even one before it: who sends it has received that.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        wait: Callable[[dist.Work], object] = dist.Work.wait,
    ) -> None:
        """`group`: that ranks count in. None: all processes. `wait`: for a message to come."""
        group = group or dist.group.WORLD
        assert group is not None, "torch.distributed is initialised"
        self._wait = wait
        # Its own methods: what torch.distributed and a group's dispatch do besides takes as long as a message.
        backend = group._get_backend(device) if isinstance(group, dist.ProcessGroup) else group
        self._backend = cast(dist.ProcessGroup, backend)  # it has the same methods
        self._device = device
        self._dtype = dtype
        self._rank = group.rank()
        self._sent: dict[tuple[int, int], dist.Work] = {}  # by receiver and tag
        self._expected: dict[tuple[int, int], tuple[dist.Work, Tensor]] = {}  # by source and tag
        self._own: dict[int, Tensor] = {}  # by tag, from this process to itself
        self.waited_s = 0.0
        """In all, for messages that were not there yet."""

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Begin to send. The tensor is kept, and not to be written to, until an answer or `flush`: gloo says of no send that it
        is done. Whatever it was made of is kept with it.
        """
        if tensor.dtype is not self._dtype or not tensor.is_contiguous():  # else two more calls into torch, for nothing
            tensor = tensor.to(self._dtype).contiguous()
        if to == self._rank:
            self._own[tag] = tensor.detach().requires_grad_(tensor.requires_grad)
        else:
            self._sent[to, tag] = self._backend.send([tensor], to, tag)

    def expect(self, shape: tuple[int, int], source: int, tag: int, *, learns: bool = False) -> None:
        """Make room for a message, before or after it is sent. learns: whether it is to get a gradient."""
        if source != self._rank:
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device, requires_grad=learns)
            self._expected[source, tag] = self._backend.recv([tensor], source, tag), tensor

    def receive(self, source: int, tag: int) -> Tensor:
        """Wait for a message that is expected."""
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
        """Wait until everything that was sent has left: the receivers take it, or have."""
        for work in self._sent.values():
            work.wait()
        self._sent.clear()
