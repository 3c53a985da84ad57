"""The arena: one file of shared memory for decoded payload, bounded in bytes, whose pages stay warm.

The first touch of a page costs several times as much as writing it. So slots are cut from the lowest address where they fit,
and freed memory is used again before new pages are touched. `headrace.transport.shared_memory` has the layout of the file and
the locks by which readers in other processes hold a slot.

The file is named after its owner, which removes it at its end. An owner that was killed leaves it behind, and the process that
opens the next arena removes it. The owner's lock on the file (flock) tells whether it lives; process ids cannot, since
containers that share /dev/shm have the same ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import secrets
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from headrace.observability.logs import pairs
from headrace.transport.shared_memory import (
    ALIGNMENT,
    FOLDER,
    GENERATION,
    MAGIC,
    NAME,
    TOKEN_BYTES,
    is_locked,
    lock_slot,
    socket_path,
    unlock_slot,
)

log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the standard library


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A part's place in the arena. Its owner must free it exactly once."""

    offset: int
    """Bytes from the start of the file to the slot's head."""
    num_bytes: int
    """Size of the whole slot in bytes, head and padding included."""
    generation: int
    """A number that tells this use of the place from all others."""
    buffer: pa.Buffer
    """Mutable memory for the payload, of the requested size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStatistics:
    """Memory use of an arena in bytes. If `cold_bytes` keeps growing, nothing is reused; at a steady load it stands still."""

    capacity_bytes: int
    used_bytes: int
    """Bytes in slots, including freed slots that a reader still holds."""
    high_water_bytes: int
    """Largest value that `used_bytes` ever had."""
    cold_bytes: int
    """Bytes touched for the first time since the start."""


class Arena:
    """Allocates slots in one file of shared memory. Thread-safe."""

    def __init__(self, capacity_bytes: int, folder: Path = FOLDER) -> None:
        """Create the file in `folder`, with room for `capacity_bytes`. Raises OSError if that fails."""
        self._size = ALIGNMENT + _aligned(capacity_bytes)
        self._fd, self._path = _create(folder)
        weakref.finalize(self, os.close, self._fd)  # not in `close`: threads may still be writing
        self._warm_end = 0
        self._growing = threading.Lock()  # guards _warm_end
        self._lock = threading.Lock()  # guards the attributes below
        self._holes = [(ALIGNMENT, self._size - ALIGNMENT)]  # (offset, size), sorted by offset, no two adjacent
        self._lingering: list[Slot] = []  # freed by the owner, still held by a reader
        self._used_bytes = self._high_water_bytes = 0
        self._generations = itertools.count(secrets.randbits(62))
        self.token = secrets.token_bytes(TOKEN_BYTES)
        try:
            os.ftruncate(self._fd, self._size)  # a sparse file: it takes no memory until it is touched
            self._map = mmap.mmap(self._fd, self._size)
            self._memory = memoryview(self._map)
            self._warm_up(ALIGNMENT)
        except OSError:
            self.close()
            raise
        self._memory[len(MAGIC) : len(MAGIC) + TOKEN_BYTES] = self.token
        self._memory[: len(MAGIC)] = MAGIC

    @property
    def path(self) -> Path:
        """Path of the file, which readers open by its name."""
        return self._path

    def allocate(self, num_bytes: int) -> Slot | None:
        """Allocate a slot for a payload of `num_bytes`; None if no hole is large enough or the machine has no memory left.

        The calling thread touches pages that are new, which takes a while.
        """
        size = ALIGNMENT + _aligned(num_bytes)
        with self._lock:
            self._reap()
            offset = self._cut(size)
        if offset is None:
            return None
        try:
            self._warm_up(offset + size)
        except OSError as err:  # /dev/shm is full, whoever filled it
            log.warning("no memory for payload %s", pairs(arena=self._path.name, bytes=size, error=err.strerror))
            with self._lock:
                self._merge(offset, size)
            return None
        generation = next(self._generations)
        GENERATION.pack_into(self._memory, offset, generation)
        start = offset + ALIGNMENT
        buffer = pa.py_buffer(self._memory[start : start + num_bytes])
        return Slot(offset=offset, num_bytes=size, generation=generation, buffer=buffer)

    def free(self, slot: Slot) -> None:
        """Free a slot. Its memory is used again once no reader holds it."""
        with self._lock:
            self._lingering.append(slot)
            self._reap()

    def is_held(self, slot: Slot) -> bool:
        """Whether a reader holds the slot."""
        return is_locked(self._fd, slot.offset)

    def lingering_bytes(self) -> int:
        """Return the bytes of slots that are freed but still held by a reader."""
        with self._lock:
            self._reap()
            return sum(slot.num_bytes for slot in self._lingering)

    def statistics(self) -> ArenaStatistics:
        """Return how many bytes are in use, and how many were ever touched."""
        with self._lock:
            return ArenaStatistics(
                capacity_bytes=self._size - ALIGNMENT,
                used_bytes=self._used_bytes,
                high_water_bytes=self._high_water_bytes,
                cold_bytes=self._warm_end,
            )

    def close(self) -> None:
        """Remove the file and its socket. Mapped memory stays readable, here and in readers, as long as anybody uses it."""
        _remove(self._path)

    def _cut(self, size: int) -> int | None:
        """Cut `size` bytes from the first hole that fits, and return their offset. The caller holds the lock."""
        for k, (offset, hole) in enumerate(self._holes):
            if hole >= size:
                self._holes[k : k + 1] = [(offset + size, hole - size)] if hole > size else []
                self._used_bytes += size
                self._high_water_bytes = max(self._high_water_bytes, self._used_bytes)
                return offset
        return None

    def _merge(self, offset: int, size: int) -> None:
        """Turn a range back into a hole, merged with adjacent ones. The caller holds the lock."""
        self._used_bytes -= size
        k = bisect_left(self._holes, (offset, 0))
        if k < len(self._holes) and self._holes[k][0] == offset + size:
            size += self._holes.pop(k)[1]
        if k and sum(self._holes[k - 1]) == offset:
            offset, former = self._holes.pop(k - 1)
            size, k = size + former, k - 1
        self._holes.insert(k, (offset, size))

    def _reap(self) -> None:
        """Take back the freed slots that no reader holds any more. The caller holds the lock."""
        held = []
        for slot in self._lingering:
            if not lock_slot(self._fd, slot.offset, exclusive=True):
                held.append(slot)
                continue
            GENERATION.pack_into(self._memory, slot.offset, 0)  # a reader that comes now sees that it is too late
            unlock_slot(self._fd, slot.offset)
            self._merge(slot.offset, slot.num_bytes)
        self._lingering = held

    def _warm_up(self, end: int) -> None:
        """Allocate the memory behind the file up to `end`. Raises OSError if there is none left.

        Without this, writing to a page that cannot be had would end the process with a SIGBUS.
        """
        with self._growing:
            start = self._warm_end
            if end <= start:
                return
            os.posix_fallocate(self._fd, start, end - start)
            page = start - start % mmap.PAGESIZE
            with contextlib.suppress(OSError):  # an older kernel: the pages are mapped one by one, as they are written
                self._map.madvise(_MADV_POPULATE_WRITE, page, end - page)
            self._warm_end = end


def open_arena(capacity_bytes: int, folder: Path = FOLDER) -> Arena | None:
    """Create an arena, after removing those of dead owners; None, with a line in the log, if shared memory is too small."""
    if not folder.is_dir():
        log.info("payload goes through gRPC only %s", pairs(reason=f"there is no {folder}"))
        return None
    remove_stale(folder)
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < capacity_bytes:
        log.warning(
            "payload goes through gRPC only: %s has %d MiB free and --budget-mib is %d; "
            "give it more (in a container --shm-size) or take a smaller budget",
            folder,
            free_bytes >> 20,
            capacity_bytes >> 20,
        )
        return None
    try:
        return Arena(capacity_bytes, folder)
    except OSError as err:
        log.warning("payload goes through gRPC only %s", pairs(reason=f"no arena in {folder}: {err.strerror}"))
        return None


def remove_stale(folder: Path = FOLDER) -> list[str]:
    """Remove the arenas whose owners are dead, and return their names. Arenas of other users are left alone."""
    removed = []
    for path in sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name)):
        with _opened(path) as fd:
            if fd is not None and _claim(fd):
                _remove(path)
                removed.append(path.name)
                log.info("removed what a dead preprocessor left %s", pairs(arena=path.name))
    return removed


def _create(folder: Path) -> tuple[int, Path]:
    """Create a new arena file, locked as ours; return its descriptor and path."""
    while True:
        path = folder / f"headrace-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if _claim(fd) and os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)  # before we locked it, somebody took it for a dead owner's and removed it


def _remove(arena: Path) -> None:
    """Remove an arena's socket and then the arena, so that `remove_stale` finds whatever an interruption leaves."""
    socket_path(arena).unlink(missing_ok=True)
    arena.unlink(missing_ok=True)


def _claim(fd: int) -> bool:
    """Lock the file as ours; return False if another process has it locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """Open the file during the block and yield its descriptor; None if it is gone or another user's."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
