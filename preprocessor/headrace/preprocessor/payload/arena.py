"""The arena: one file of shared memory for decoded payload, bounded in bytes, whose pages stay warm.

The first touch of a page costs several times as much as writing it. So slots are cut from the lowest address where they fit,
and what was released is used again before new pages are touched. `headrace.transport.shared_memory` has the layout of the
file and the locks by which readers in other processes hold a slot.

The file is named after its owner and goes with it. An owner that was killed leaves it behind; whoever opens the next arena
removes it. The owner's lock on the file (flock) tells whether it lives, process ids do not: containers that share /dev/shm
have alike ones.
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
    """A part's place in the arena. Its owner frees it, once."""

    offset: int
    """Of the slot's head, from the start of the file."""
    num_bytes: int
    """Of the whole slot, head and padding included."""
    generation: int
    """Tells this use of the place from all others."""
    buffer: pa.Buffer
    """The payload, mutable, of the size that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStatistics:
    """All in bytes. Where `cold_bytes` goes on growing, nothing is reused; at a steady load it stands still."""

    capacity_bytes: int
    used_bytes: int
    """In slots, those included that only a reader still holds."""
    high_water_bytes: int
    """Most that was ever used at a time."""
    cold_bytes: int
    """Touched for the first time, since the start."""


class Arena:
    """Slots of one shared file. Thread-safe."""

    def __init__(self, capacity_bytes: int, folder: Path = FOLDER) -> None:
        """Raises OSError where the file cannot be made."""
        self._size = ALIGNMENT + _aligned(capacity_bytes)
        self._fd, self._path = _create(folder)
        weakref.finalize(self, os.close, self._fd)  # not in `close`: threads may still be writing
        self._warm_end = 0
        self._growing = threading.Lock()  # of _warm_end
        self._lock = threading.Lock()  # of all below
        self._holes = [(ALIGNMENT, self._size - ALIGNMENT)]  # (offset, size), by offset, no two of them adjacent
        self._lingering: list[Slot] = []  # freed by the owner, still held by a reader
        self._used_bytes = self._high_water_bytes = 0
        self._generations = itertools.count(secrets.randbits(62))
        self.token = secrets.token_bytes(TOKEN_BYTES)
        try:
            os.ftruncate(self._fd, self._size)  # a hole: it takes no memory until it is touched
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
        """The file; a reader opens it by its name."""
        return self._path

    def allocate(self, num_bytes: int) -> Slot | None:
        """A slot for a payload of that size; None where no hole is large enough, or the machine has no memory left.

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
        """The owner has no use for the slot any more. It is used again when no reader holds it."""
        with self._lock:
            self._lingering.append(slot)
            self._reap()

    def is_held(self, slot: Slot) -> bool:
        """Whether a reader holds the slot."""
        return is_locked(self._fd, slot.offset)

    def lingering_bytes(self) -> int:
        """Bytes of slots that are free but for a reader."""
        with self._lock:
            self._reap()
            return sum(slot.num_bytes for slot in self._lingering)

    def statistics(self) -> ArenaStatistics:
        """How full it is, and how warm."""
        with self._lock:
            return ArenaStatistics(
                capacity_bytes=self._size - ALIGNMENT,
                used_bytes=self._used_bytes,
                high_water_bytes=self._high_water_bytes,
                cold_bytes=self._warm_end,
            )

    def close(self) -> None:
        """Remove the files. What is mapped stays readable, here and at the readers, as long as anybody uses it."""
        _remove(self._path)

    def _cut(self, size: int) -> int | None:
        """First fit. The caller holds the lock, here and below."""
        for k, (offset, hole) in enumerate(self._holes):
            if hole >= size:
                self._holes[k : k + 1] = [(offset + size, hole - size)] if hole > size else []
                self._used_bytes += size
                self._high_water_bytes = max(self._high_water_bytes, self._used_bytes)
                return offset
        return None

    def _merge(self, offset: int, size: int) -> None:
        """The reverse: a hole again, one with its neighbours."""
        self._used_bytes -= size
        k = bisect_left(self._holes, (offset, 0))
        if k < len(self._holes) and self._holes[k][0] == offset + size:
            size += self._holes.pop(k)[1]
        if k and sum(self._holes[k - 1]) == offset:
            offset, former = self._holes.pop(k - 1)
            size, k = size + former, k - 1
        self._holes.insert(k, (offset, size))

    def _reap(self) -> None:
        """Take back the slots that were freed and that nobody reads now."""
        held = []
        for slot in self._lingering:
            if not lock_slot(self._fd, slot.offset, exclusive=True):
                held.append(slot)
                continue
            GENERATION.pack_into(self._memory, slot.offset, 0)  # who comes for it now finds that it is too late
            unlock_slot(self._fd, slot.offset)
            self._merge(slot.offset, slot.num_bytes)
        self._lingering = held

    def _warm_up(self, end: int) -> None:
        """Have memory behind the file up to `end`. Raises OSError where there is none.

        A write to a page that cannot be had would be a SIGBUS, the end of the process.
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
    """An arena, after removing what dead owners left. None, and one line in the log, where shared memory is too small for it."""
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
    """Remove the arenas whose owners are dead, and tell their names. Those of other users are left alone."""
    removed = []
    for path in sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name)):
        with _opened(path) as fd:
            if fd is not None and _claim(fd):
                _remove(path)
                removed.append(path.name)
                log.info("removed what a dead preprocessor left %s", pairs(arena=path.name))
    return removed


def _create(folder: Path) -> tuple[int, Path]:
    """(descriptor, path) of a new file that is locked as ours."""
    while True:
        path = folder / f"headrace-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if _claim(fd) and os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)  # somebody took it for a dead owner's before it was locked


def _remove(arena: Path) -> None:
    """With its socket, which goes first: an arena alone is found again."""
    socket_path(arena).unlink(missing_ok=True)
    arena.unlink(missing_ok=True)


def _claim(fd: int) -> bool:
    """Whether the file is locked as ours from now on."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A descriptor; None where the file is gone or another user's."""
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
