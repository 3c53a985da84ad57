"""Page-locked memory of the host in large blocks, for copies from a GPU that are as large as a process's whole state.

torch's own pool rounds each tensor up to a power of two, and has the driver make the pages one by one: 1.2 GB/s on a machine with
an H100, where blocks of huge pages that several threads touch first are locked at 12 GB/s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.observability.logs import pairs
from headrace.trainer.pipeline.huge_pages import map_memory

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 28
_ALIGNMENT = 512
_PAGE_BYTES = 4096
_MOST_THREADS = 8

Lock = Callable[[int, int], int]
"""Takes an address and a number of bytes, and returns 0 or the number of an error."""


class PageLockedBlocks:
    """Blocks from which tensors are cut one behind the other; all are given back at once, by `close`.

    Memory that cannot be locked, for instance as a container limits it, is used as it is: copies are then slower. It is logged.
    """

    def __init__(self, lock: Lock | None = None, unlock: Callable[[int], object] | None = None) -> None:
        """`lock` and `unlock`: those of the CUDA runtime unless given."""
        self._lock, self._unlock = lock or _cuda_lock, unlock or _cuda_unlock
        self._blocks: list[NDArray[np.uint8]] = []
        self._locked: list[int] = []
        self._used = 0  # bytes of the last block

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor with undefined contents. It must not be used after `close`."""
        num_bytes = shape.numel() * dtype.itemsize
        if not self._blocks or self._used + num_bytes > len(self._blocks[-1]):
            self._add_block(max(BLOCK_BYTES, num_bytes))
        memory = self._blocks[-1][self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return torch.from_numpy(memory).view(dtype).view(shape)

    def close(self) -> None:
        """Unlock all blocks, and give them back once no tensor is left."""
        for address in self._locked:
            self._unlock(address)
        self._locked.clear()
        self._blocks.clear()

    def _add_block(self, num_bytes: int) -> None:
        block = np.frombuffer(map_memory(num_bytes), np.uint8)
        _touch(block)
        address = block.ctypes.data
        if error := self._lock(address, len(block)):
            log.warning("memory for checkpoints is not page-locked %s", pairs(num_bytes=len(block), cuda_error=error))
        else:
            self._locked.append(address)
        self._blocks.append(block)
        self._used = 0


def _touch(block: NDArray[np.uint8]) -> None:
    """Write to each page, by several threads, so that all of them are there."""
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    share = -(-len(block) // (threads * _PAGE_BYTES)) * _PAGE_BYTES

    def touch(begin: int) -> None:
        block[begin : begin + share : _PAGE_BYTES] = 0

    with ThreadPoolExecutor(threads, thread_name_prefix="page-lock") as pool:
        list(pool.map(touch, range(0, len(block), share)))


def _cuda_lock(address: int, num_bytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]


def _cuda_unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
