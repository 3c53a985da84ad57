"""Memory for received payloads that is used again: its pages stay warm, and registered with the network adapter."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

_GRAIN_BYTES = 1 << 20  # sizes that differ by less share their blocks
MAX_IDLE_BYTES = 1 << 30  # some dozen parts of usual size

Allocate = Callable[[int], memoryview]
"""Writable memory of so many bytes, which lives as long as the view: on a trainer with a GPU, page-locked."""


def allocate_pageable(num_bytes: int) -> memoryview:
    """Ordinary memory; numpy asks for huge pages by itself."""
    return np.empty(num_bytes, np.uint8).data


class ReceiveBuffers:
    """Blocks for payloads. Thread-safe.

    What is in use is bounded by those who hold it, what lies idle by `max_idle_bytes`; the longest idle block goes first. A
    lease that is dropped without a release takes its block with it, no more.
    """

    def __init__(self, allocate: Allocate = allocate_pageable, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._allocate = allocate
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()  # of _idle
        self._idle: list[memoryview] = []  # longest idle first

    def take(self, num_bytes: int) -> Lease:
        """Room for a payload of that size, contents undefined: the smallest idle block that fits, or a new one."""
        with self._lock:
            fitting = [k for k, block in enumerate(self._idle) if len(block) >= num_bytes]
            block = self._idle.pop(min(fitting, key=lambda k: len(self._idle[k]))) if fitting else None
        if block is None:
            block = self._allocate(-(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES)
        return Lease(self, block, num_bytes)

    @property
    def idle_bytes(self) -> int:
        """Of blocks that wait for their next use."""
        with self._lock:
            return sum(map(len, self._idle))

    def give_back(self, block: memoryview) -> None:
        """For leases only."""
        with self._lock:
            self._idle.append(block)
            excess = sum(map(len, self._idle)) - self._max_idle_bytes
            while excess > 0:
                excess -= len(self._idle.pop(0))


class Lease:
    """A block in use. Called, it gives the block back, once: nobody reads or writes it from then on. From any thread."""

    def __init__(self, buffers: ReceiveBuffers, block: memoryview, num_bytes: int) -> None:
        self._buffers = buffers
        self._block: memoryview | None = block
        self._num_bytes = num_bytes
        self._lock = threading.Lock()

    @property
    def view(self) -> memoryview:
        """(num_bytes,) of the block, writable. Not after it was given back."""
        assert self._block is not None
        return self._block[: self._num_bytes]

    def __call__(self) -> None:
        with self._lock:
            block, self._block = self._block, None
        if block is not None:
            self._buffers.give_back(block)
