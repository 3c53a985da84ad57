"""Shared memory on one host: the layout of an arena, its locks, and how it is read.

An arena is one file in /dev/shm that one preprocessor writes and ranks map read-only:

    0       8 bytes   MAGIC
    8       16 bytes  token: whoever returns it has read this file, so it shares the memory
    64, ... slots, each at a multiple of ALIGNMENT: 8 bytes generation, zeros up to ALIGNMENT, the payload

A slot is held by a read lock on its first byte, a lock of the open file description (fcntl F_OFD_SETLK). The kernel keeps
these locks, so they hold between containers that share /dev/shm, they outlive a broken connection, and they end with the
reader, however that ends. The writer takes the byte's write lock, which nobody gets while there is a reader, before it clears
the generation and uses the room again. A reader locks first and then compares the generation with the one that it was told:
from there on the payload stays.

Beside the arena lies a socket, NAME.sock, where readers ask for slots (`headrace.transport.slots`).

Linux only: elsewhere there is no /dev/shm, and payload comes over the network.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from headrace.errors import UnavailableError
from headrace.transport.base import TransportError

FOLDER = Path("/dev/shm")
MAGIC = b"HRARENA1"
TOKEN_BYTES = 16
ALIGNMENT = 64  # bytes; a cache line, and what Arrow recommends
GENERATION = struct.Struct("=Q")
NAME = re.compile(r"headrace-[0-9]+-[0-9a-f]+")
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid; 64-bit Linux


class ArenaError(TransportError):
    """An arena cannot be used from here. The message says why."""


def arena_path(name: str, folder: Path = FOLDER) -> Path:
    """Where the arena of that name lies. Raises ArenaError where the name is not one of an arena."""
    if not NAME.fullmatch(name):
        raise ArenaError(f"{name!r} is no name of an arena")
    return folder / name


def socket_path(arena: Path) -> Path:
    """Where the preprocessor answers who reads its arena."""
    return arena.with_name(arena.name + ".sock")


def lock_slot(fd: int, offset: int, *, exclusive: bool) -> bool:
    """Take a read or a write lock on the slot at `offset`. False where another open file has one that excludes it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, 0, offset, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as the system likes
        return False
    return True


def unlock_slot(fd: int, offset: int) -> None:
    """Give up the lock on the slot at `offset`."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, offset, 1, 0))


def is_locked(fd: int, offset: int) -> bool:
    """Whether another open file has a lock on the slot at `offset`."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class ArenaReader:
    """A preprocessor's arena, mapped read-only. Thread-safe.

    The mapping lasts as long as any buffer of it, and a lock until all who hold the slot have let go of it.
    """

    def __init__(self, name: str, folder: Path = FOLDER) -> None:
        """Raises ArenaError where the arena is not there, may not be read, or is not one."""
        try:
            self._fd = os.open(arena_path(name, folder), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as err:
            raise ArenaError(f"{folder / name} cannot be read here ({err.strerror})") from err
        weakref.finalize(self, os.close, self._fd)  # who holds a slot keeps the reader alive
        try:
            self._memory = memoryview(mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as err:
            raise ArenaError(f"{folder / name} cannot be mapped ({err})") from err
        if self._memory[: len(MAGIC)] != MAGIC:
            raise ArenaError(f"{folder / name} is not an arena of this release")
        self.name = name
        self.path = folder / name
        self.token = bytes(self._memory[len(MAGIC) : len(MAGIC) + TOKEN_BYTES])
        self._lock = threading.Lock()
        self._holders: Counter[int] = Counter()  # offset -> how many hold the slot: they share one lock

    def view(self, offset: int, num_bytes: int, generation: int) -> tuple[pa.Buffer, Callable[[], None]]:
        """The payload of the slot at `offset`, and what lets go of it. Not copied.

        Raises UnavailableError where there is no such slot, or it has another payload by now.
        """
        start = offset + ALIGNMENT
        if offset <= 0 or offset % ALIGNMENT or num_bytes < 0 or start + num_bytes > len(self._memory):
            raise UnavailableError(f"a slot at {offset} of {num_bytes} bytes does not lie in the arena {self.name}")
        self._hold(offset)
        if GENERATION.unpack_from(self._memory, offset)[0] != generation:
            self.let_go(offset)
            raise UnavailableError(f"the slot at {offset} of the arena {self.name} has another payload by now")
        return pa.py_buffer(self._memory[start : start + num_bytes]), _Hold(self, offset)

    def _hold(self, offset: int) -> None:
        with self._lock:
            if offset not in self._holders and not lock_slot(self._fd, offset, exclusive=False):
                raise UnavailableError(f"the slot at {offset} of the arena {self.name} is just being freed")
            self._holders[offset] += 1

    def let_go(self, offset: int) -> None:
        """One holder less of the slot at `offset`."""
        with self._lock:
            self._holders[offset] -= 1
            if not self._holders[offset]:
                del self._holders[offset]
                unlock_slot(self._fd, offset)


class _Hold:
    """A share in a slot's lock. Called, it gives that up, once."""

    def __init__(self, reader: ArenaReader, offset: int) -> None:
        self._reader: ArenaReader | None = reader
        self._offset = offset
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.let_go(self._offset)
