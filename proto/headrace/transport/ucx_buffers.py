"""A pool of reused buffers for received payloads, whose pages stay mapped and registered with the network adapter."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

_GRAIN_BYTES = 1 << 20  # block sizes are multiples of this, so that payloads of similar sizes can share blocks
MAX_IDLE_BYTES = 1 << 30  # room for some dozen parts of usual size

Allocate = Callable[[int], memoryview]
"""A function that returns writable memory of the given number of bytes, which lives as long as the view; on a trainer with a GPU
it is page-locked."""


def allocate_pageable(num_bytes: int) -> memoryview:
    """Return pageable (not page-locked) memory of `num_bytes` bytes; numpy asks for huge pages by itself."""
    return np.empty(num_bytes, np.uint8).data


class ReceiveBuffers:
    """A pool of memory blocks for received payloads. Thread-safe.

    At most `max_idle_bytes` lie idle, and the block that has been idle longest is dropped first; memory in use is bounded only by
    those who hold it. A lease that is dropped without being called only removes its block from the pool.
    """

    def __init__(self, allocate: Allocate = allocate_pageable, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._allocate = allocate
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()  # guards _idle
        self._idle: list[memoryview] = []  # longest idle first

    def take(self, num_bytes: int) -> Lease:
        """Lease memory for a payload of `num_bytes`, with undefined contents: the smallest idle block that fits, or a new one."""
        with self._lock:
            fitting = [k for k, block in enumerate(self._idle) if len(block) >= num_bytes]
            block = self._idle.pop(min(fitting, key=lambda k: len(self._idle[k]))) if fitting else None
        if block is None:
            block = self._allocate(-(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES)
        return Lease(self, block, num_bytes)

    @property
    def idle_bytes(self) -> int:
        """Total bytes of the idle blocks, which wait for their next use."""
        with self._lock:
            return sum(map(len, self._idle))

    def give_back(self, block: memoryview) -> None:
        """Return a block to the pool, and drop the longest idle ones beyond the limit. To be called by a Lease only."""
        with self._lock:
            self._idle.append(block)
            excess = sum(map(len, self._idle)) - self._max_idle_bytes
            while excess > 0:
                excess -= len(self._idle.pop(0))


class Lease:
    """A block in use. Calling it, from any thread, gives the block back; nobody may read or write it afterwards.

    Further calls do nothing.
    """

    def __init__(self, buffers: ReceiveBuffers, block: memoryview, num_bytes: int) -> None:
        self._buffers = buffers
        self._block: memoryview | None = block
        self._num_bytes = num_bytes
        self._lock = threading.Lock()

    @property
    def view(self) -> memoryview:
        """The writable first `num_bytes` bytes of the block, as asked for. Not to be used after the block was given back."""
        assert self._block is not None
        return self._block[: self._num_bytes]

    def __call__(self) -> None:
        with self._lock:
            block, self._block = self._block, None
        if block is not None:
            self._buffers.give_back(block)
