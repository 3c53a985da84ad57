"""Tensors from process to process: sends that nobody waits for, and receives that are posted before they are needed.

Both sides know every shape beforehand (a message of another size than expected ends a gloo process), so nothing but data goes
over the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Arrival = Callable[[], Tensor]
"""Waits for a tensor that is on its way here. To be called once."""


class Wire:
    """Messages of one process during a step. A pair of processes tells its messages of a step apart by their tags."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._rank = dist.get_rank()
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self.waited_s = 0.0
        """In all, for messages that were not there yet."""
        self._own: dict[int, Tensor] = {}  # by tag, from this process to itself

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Begin to send; the tensor is kept, and not to be written to, until `flush`: gloo says of no send that it is done."""
        tensor = tensor.detach().to(self._dtype).contiguous()
        if to == self._rank:
            self._own[tag] = tensor
        else:
            work = dist.isend(tensor, to, tag=tag)
            assert work is not None, "this process is of the group"
            self._sent.append((work, tensor))

    def expect(self, shape: Sequence[int], source: int, tag: int) -> Arrival:
        """Make room for a message, before or after it is sent."""
        if source == self._rank:
            return lambda: self._own.pop(tag)
        tensor = torch.empty(*shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(tensor, source, tag=tag)
        assert work is not None, "this process is of the group"

        def arrival() -> Tensor:
            began_s = time.monotonic()
            work.wait()
            self.waited_s += time.monotonic() - began_s
            return tensor

        return arrival

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
