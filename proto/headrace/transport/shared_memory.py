"""Shared memory on one host: the layout of an arena, the locks on its slots, and its reader.

An arena is one file in /dev/shm that one preprocessor writes and ranks map read-only:

    0       8 bytes   MAGIC
    8       16 bytes  token: a client that sends it back has read this file, which proves that it shares the memory
    64, ... slots, each at a multiple of ALIGNMENT: 8 bytes generation, zeros up to ALIGNMENT, the payload

A reader holds a slot by a read lock on its first byte, a lock of the open file description (fcntl F_OFD_SETLK). The kernel keeps
these locks, so they hold between containers that share /dev/shm, they outlive a broken connection, and they end with the reader,
however that ends. Before the writer clears the generation and reuses the room, it takes the byte's write lock, which excludes
readers. A reader first takes the lock and then compares the generation with the one that it was told: if they agree, the payload
stays until it lets go.

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
    """An arena cannot be used by this process. The message says why."""


def arena_path(name: str, folder: Path = FOLDER) -> Path:
    """Return the path of the arena with that name. Raises ArenaError if it is not a valid arena name."""
    if not NAME.fullmatch(name):
        raise ArenaError(f"{name!r} is no name of an arena")
    return folder / name


def socket_path(arena: Path) -> Path:
    """Return the path of the socket on which a preprocessor answers the readers of its arena."""
    return arena.with_name(arena.name + ".sock")


def lock_slot(fd: int, offset: int, *, exclusive: bool) -> bool:
    """Take a read lock, or with `exclusive` a write lock, on the slot at `offset`, without waiting. Return False if another open
    file holds a lock that excludes it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, 0, offset, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, depending on the system
        return False
    return True


def unlock_slot(fd: int, offset: int) -> None:
    """Release this open file's lock on the slot at `offset`."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, offset, 1, 0))


def is_locked(fd: int, offset: int) -> bool:
    """Whether another open file holds a lock on the slot at `offset`."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class ArenaReader:
    """A preprocessor's arena, mapped read-only. Thread-safe.

    The mapping lasts as long as any buffer of it, and a slot's lock until all of its holders in this process have let go.
    """

    def __init__(self, name: str, folder: Path = FOLDER) -> None:
        """Raises ArenaError if the arena does not exist, may not be read, or is not an arena of this release."""
        try:
            self._fd = os.open(arena_path(name, folder), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as err:
            raise ArenaError(f"{folder / name} cannot be read here ({err.strerror})") from err
        weakref.finalize(self, os.close, self._fd)  # not before the last _Hold of a slot, which refers to the reader
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
        self._holders: Counter[int] = Counter()  # offset -> number of holders of the slot, which share one lock

    def view(self, offset: int, num_bytes: int, generation: int) -> tuple[pa.Buffer, Callable[[], None]]:
        """Return a view of the payload in the slot at `offset`, and a function that lets go of the slot. Holds it until then.

        The function may be called from any thread and more than once. Raises UnavailableError if there is no such slot, it is
        being freed, or it has another payload by now.
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
        """Release one hold on the slot at `offset`; with the last one its lock is released."""
        with self._lock:
            self._holders[offset] -= 1
            if not self._holders[offset]:
                del self._holders[offset]
                unlock_slot(self._fd, offset)


class _Hold:
    """A hold on a slot of an arena. Calling it lets go of the slot; further calls do nothing."""

    def __init__(self, reader: ArenaReader, offset: int) -> None:
        self._reader: ArenaReader | None = reader
        self._offset = offset
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.let_go(self._offset)
