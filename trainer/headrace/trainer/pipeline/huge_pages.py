"""Memory for what is large and filled once: its first touch costs a fifth of what it costs in pages of 4 KiB."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HOST = torch.device("cpu")
_PAGE_BYTES = 4096
_LEAST_BYTES = 4 << 20  # of a tensor: two huge pages, so that it has one wherever it begins


def map_memory(num_bytes: int) -> mmap.mmap:
    """Return new memory of at least so many bytes, in huge pages where the system has them for whoever asks."""
    memory = mmap.mmap(-1, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # where there are no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def empty_in_huge_pages(length: int, device: torch.device = _HOST) -> Tensor:
    """Return a flat float32 tensor with undefined contents, on another device than the host in that device's memory.

    A large one on the host is given back to the system once it is dropped.
    """
    if device.type != "cpu" or 4 * length < _LEAST_BYTES:
        return torch.empty(length, device=device)
    return torch.frombuffer(map_memory(4 * length), dtype=torch.float32, count=length)
