"""A pool of reused memory for packed microbatches: the first touch of a page costs several times as much as writing it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and what vector instructions and Arrow want
_GRAIN_BYTES = 2 << 20  # one huge page; blocks are multiples of it, so that requests of similar sizes share them


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class PinnedMemory:
    """torch's pool of this process's page-locked memory, which also waits for pending copies to the device. It needs a GPU.

    It rounds sizes up to powers of two, uses a block for no other size, and gives none back by itself.
    """

    def take(self, num_bytes: int) -> Tensor:
        """Return a (num_bytes,) uint8 tensor with undefined contents."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks, in use or not."""
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are in use."""
        return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))

    def release_idle(self) -> None:
        """Give back all blocks that are not in use. This may wait for the device."""
        torch.accelerator.empty_host_cache()


class BufferPool:
    """A pool of buffers, each reused as soon as no tensor reads it any more. Thread-safe.

    A buffer returns to the pool by itself when the last tensor in it is gone, including views and tensors saved by autograd, so
    a buffer is never written while it is read. Memory in use is bounded by what the users keep, idle memory by `max_idle_bytes`.

    With pinned memory, all idle blocks are given back when they are more than `max_idle_bytes` beside the most that was in use at
    a time: between steps nothing is in use, and to lock pages anew for each would take longer than the copies.
    """

    def __init__(
        self,
        max_idle_bytes: int,
        *,
        pinned: PinnedMemory | None = None,
        allocate: Callable[[int], NDArray[np.uint8] | None] | None = None,
    ) -> None:
        """`pinned`: where page-locked memory is taken from, for asynchronous copies to a GPU; None: memory that is not locked.
        `allocate`: where blocks of other memory are taken from, as long as it has any; None: this process's own."""
        self.pinned = pinned
        self._allocate = allocate
        self._most_pinned = 0  # bytes in use at a time
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()  # guards _idle
        self._idle: list[NDArray[np.uint8]] = []  # longest idle first
        self._returned: deque[NDArray[np.uint8]] = deque()  # to be moved to _idle; finalizers append here at any time

    def take(self, num_bytes: int) -> Tensor:
        """Return a (num_bytes,) uint8 tensor with undefined contents, aligned to ALIGNMENT bytes."""
        if self.pinned is not None:
            return self._take_pinned(self.pinned, num_bytes)
        size = num_bytes + ALIGNMENT
        with self._lock:
            block = self._find(size)
        if block is None:
            block = self._new_block(-(-size // _GRAIN_BYTES) * _GRAIN_BYTES)
        start = -block.ctypes.data % ALIGNMENT
        buffer = block[start : start + num_bytes]  # a new object per use: torch keeps it alive as long as any tensor uses it
        weakref.finalize(buffer, self._returned.append, block).atexit = False
        return torch.from_numpy(buffer)

    @property
    def copies_everything(self) -> bool:
        """Whether whatever is read from the pool's tensors has to be in them, since only its memory can be read like that."""
        return self.pinned is not None or self._allocate is not None

    def _new_block(self, size: int) -> NDArray[np.uint8]:
        block = self._allocate(size) if self._allocate is not None else None
        return np.empty(size, np.uint8) if block is None else block  # numpy asks for huge pages by itself

    @property
    def idle_bytes(self) -> int:
        """Bytes in buffers that wait for their next use."""
        with self._lock:
            self._collect()
            return sum(map(len, self._idle))

    def _take_pinned(self, pinned: PinnedMemory, num_bytes: int) -> Tensor:
        with self._lock:
            if pinned.allocated_bytes - pinned.used_bytes > self._max_idle_bytes + self._most_pinned:
                pinned.release_idle()
            buffer = pinned.take(num_bytes)
            self._most_pinned = max(self._most_pinned, pinned.used_bytes)
            return buffer

    def _find(self, size: int) -> NDArray[np.uint8] | None:
        """Take the smallest idle block that fits, or return None. If all are too small, the largest is discarded, so that no more
        blocks are kept than are in use at a time. The caller holds the lock.
        """
        self._collect()
        fitting = [k for k, block in enumerate(self._idle) if len(block) >= size]
        if not fitting and self._idle:
            del self._idle[max(range(len(self._idle)), key=lambda k: len(self._idle[k]))]
        block = self._idle.pop(min(fitting, key=lambda k: len(self._idle[k]))) if fitting else None
        self._trim()
        return block

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())

    def _trim(self) -> None:
        excess = sum(map(len, self._idle)) - self._max_idle_bytes
        while excess > 0:
            excess -= len(self._idle.pop(0))
