"""Memory that the processes of a group share, where they are on one host: one writes microbatches, the others read them in place.

It is a file in /dev/shm without a name: the writer removes the name once all others have opened it, so that nothing is left of
it when they end, however they end. Pages are reserved before they are written, since a full /dev/shm would end the writer.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

FOLDER = Path("/dev/shm")
_MOST_BYTES = 1 << 36  # of the file, most of which never has pages
SHARE = 4  # of what is free in /dev/shm, one part: preprocessors keep payload there, too
_ARROW = {torch.int64: pa.int64(), torch.uint8: pa.uint8(), torch.float16: pa.float16(), torch.float32: pa.float32()}


class GroupMemory:
    """The writer's side: gives out blocks of the file. Thread-safe."""

    def __init__(self) -> None:
        """Raises OSError where there is no such folder, or no room in it."""
        self.path = FOLDER / f"headrace-group-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, fd)
        self._fd, self._pid = fd, os.getpid()
        try:
            os.truncate(fd, _MOST_BYTES)
            self._map = mmap.mmap(fd, _MOST_BYTES)
        except OSError:
            self.remove_name()
            raise
        self._base = np.frombuffer(self._map, np.uint8)
        disk = os.statvfs(FOLDER)
        self._returned: deque[int] = deque()  # bytes of blocks that are gone; finalizers append here at any time
        self._lock = threading.Lock()  # guards both below
        self._room = disk.f_bavail * disk.f_frsize // SHARE
        self._end = 0

    def remove_name(self) -> None:
        """Remove the file's name: who has it open goes on."""
        self.path.unlink(missing_ok=True)

    def allocate(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """Return a block with undefined contents, whose pages are given back when the last array of it is gone; None where there
        is no room. num_bytes: a multiple of the size of pages."""
        with self._lock:
            while self._returned:
                self._room += self._returned.popleft()
            start = self._end
            if num_bytes > min(self._room, _MOST_BYTES - start):
                return None
            try:
                os.posix_fallocate(self._fd, start, num_bytes)
            except OSError:
                return None
            self._room -= num_bytes
            self._end = start + num_bytes
        block = self._base[start : start + num_bytes]
        weakref.finalize(block, self._give_back, start, num_bytes).atexit = False
        return block

    def place(self, tensor: Tensor) -> int | None:
        """Return where in the file a tensor begins, None where it does not lie in it."""
        offset = tensor.data_ptr() - self._base.ctypes.data
        return offset if 0 <= offset < _MOST_BYTES else None

    def _give_back(self, start: int, num_bytes: int) -> None:
        if os.getpid() != self._pid:  # a forked process drops its copies of blocks that are in use here
            return
        self._map.madvise(mmap.MADV_REMOVE, start, num_bytes)
        self._returned.append(num_bytes)


class GroupMemoryView:
    """A reader's side: the whole file, mapped read-only."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError where it cannot be opened: on another host, or as another user."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._buffer = pa.py_buffer(mmap.mmap(fd, _MOST_BYTES, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)

    def tensor(self, offset: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor of that size that begins there, in place."""
        count = int(np.prod(size))
        part = self._buffer.slice(offset, count * dtype.itemsize)
        return from_dlpack(pa.Array.from_buffers(_ARROW[dtype], count, [None, part])).view(size)
