"""A cache of shards on a local disk: one directory of bounded size for all preprocessors of a host.

    DIR/KEY.shard     a whole remote file, or rows of a Parquet file; its modification time is its last use, and the least
                      recently used is evicted first
                      (also packs of media that rows name: media_packs.py)
    DIR/KEY.part      a file being downloaded or made, allocated in full where its size is known, locked by its writer
    DIR/lock          held while space is counted, freed and reserved

Of a file whose format tells where its samples are, single ones are read by ranges first (partial_blob.py), and the whole of it
is fetched once much of it has been read; others are fetched whole, as all of their bytes are read. What the cache cannot hold
(a shard larger than all of it, a full disk, a directory that went away) is read by ranges from its server, and Parquet is
decoded in memory, with one warning.

All locks are the kernel's (flock): a process that dies releases them, and what it left half-written is removed by the
next process that needs space. A process that has an evicted file open closes it at its next read or fetch, which frees the
disk space, and fetches the file again when it next reads it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace.errors import UserError
from headrace.observability import metrics
from headrace.observability.logs import pairs
from headrace.preprocessor.sources.blob import Blob, Fill, LocalBlob, RemoteBlob, unreadable_error
from headrace.preprocessor.sources.cached_blob import STAMP_S, CachedBlob
from headrace.preprocessor.sources.download import DiskError, RemoteFile, Retry, describe, disk_errors, download
from headrace.preprocessor.sources.media_packs import MediaPacks
from headrace.preprocessor.sources.partial_blob import PartialBlob
from headrace.preprocessor.sources.ranges import changed_error, sends_ranges

log = logging.getLogger(__name__)

DEFAULT_BYTES = 20 * 2**30
WHOLE_BYTES = 128 * 2**10
"""Size up to which a file is fetched whole at once: a few ranges of it would take longer."""


@dataclass(slots=True, kw_only=True)
class CacheStats:
    """Counts of this process's requests to the cache and of their outcomes."""

    hits: int = 0
    misses: int = 0
    downloaded_bytes: int = 0
    evicted: int = 0
    uncached: int = 0
    """Fetches answered by reading from the server, for lack of room or of a working disk: above 0, the cache is too small."""


class ShardCache:
    """A cache of shards in one directory. Thread-safe, and safe for several processes of one host."""

    def __init__(self, directory: Path, max_bytes: int = DEFAULT_BYTES, retry: Retry = Retry()) -> None:  # noqa: B008 - frozen
        """Create `directory` if it is missing. Raises UserError where that fails."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._retry = retry
        self._mutex = threading.Lock()
        self._warned = False
        self._blobs: weakref.WeakSet[CachedBlob] = weakref.WeakSet()
        self._packs = MediaPacks(self)
        self.stats = CacheStats()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as err:
            raise UserError(f"cannot use {directory} as the shard cache: {err}; give a directory to write to") from err

    def open(self, url: str) -> Blob:
        """Open the shard at `url`, downloading it first if it is not cached. Raises DatasetError where that fails."""
        return self._open_whole(self._describe(url))

    def open_in_parts(self, url: str, *, grouped: bool = False) -> Blob:
        """Open the shard at `url` without downloading it, unless it is small. `grouped`: see PartialBlob.

        Raises DatasetError where that fails.
        """
        file = self._describe(url)
        if file.size is None or file.size <= WHOLE_BYTES or not sends_ranges(url) or self._path(file.key).exists():
            return self._open_whole(file)
        return PartialBlob(file, self._retry, functools.partial(self._open_whole, file), grouped=grouped)

    def _open_whole(self, file: RemoteFile) -> Blob:
        blob = CachedBlob(self, file)
        with self._mutex:
            self._blobs.add(blob)
        return blob

    def reopen(self, file: RemoteFile) -> Blob:
        """Fetch a file again in the same version. Raises DatasetError where its server has another version by now."""
        if self._describe(file.url).version != file.version:
            raise changed_error(file.url)
        return self.fetch(file)

    def fetch(self, file: RemoteFile) -> Blob:
        """Open a file in the cache, downloading it first if need be, or on its server where the cache cannot hold it."""
        path = self._path(file.key)
        bypass = "no_room"
        try:
            if blob := _opened(path, file.url):
                self._count(hits=1)
                return blob
            self._count(misses=1)
            with self._locked_part(file.key) as sink:
                # Another process may have downloaded it while this one waited for the lock.
                blob = _opened(path, file.url)
                if blob is None and self._download(file, sink):
                    blob = _opened(path, file.url)
        except DiskError as err:
            self._warn(file.url, str(err.__cause__))
            blob, bypass = None, "disk"
        self._let_go_of_evicted()
        if blob is None:
            self._count(uncached=1)
            metrics.CACHE_BYPASSES.labels(bypass).inc()
            return RemoteBlob(file.url)
        return blob

    def stamp(self, file: RemoteFile) -> None:
        """Set a cached file's time of last use to now, which keeps it from being evicted next."""
        with contextlib.suppress(OSError):
            os.utime(self._path(file.key))

    def medium(self, url: str, read: Callable[[], bytes]) -> bytes:
        """Return a medium that a row names, by `read` unless this process has read it of late. Raises what `read` raises."""
        return self._packs.get(url, read)

    def find(self, key: str, url: str) -> Blob | None:
        """Open the file that was made under `key`; None if it is not there, or no more. `url` stands in messages."""
        path = self._path(key)
        try:
            blob = LocalBlob(open(path, "rb", buffering=0), url)  # noqa: SIM115 - the blob closes it
        except OSError:
            return None
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STAMP_S:
                os.utime(path)
        return blob

    def make(self, key: str, url: str, fill: Fill) -> Blob | None:
        """Open the file under `key`, made of the file at `url` by `fill` if it is not there; None where there is no room for it.

        What `fill` raises leaves nothing in the cache. Of several processes and threads one makes it and the others wait.
        """
        bypass = "disk"
        try:
            with self._locked_part(key) as sink:
                blob = self.find(key, url)
                if blob is None:
                    fill(sink, lambda size: self._reserve_or_raise(key, url, sink, size))
                    with disk_errors():
                        os.rename(self._part(key), self._path(key))
                    blob = self.find(key, url)
        except DiskError as err:
            self._warn(url, str(err.__cause__))
            blob, bypass = None, "no_room" if isinstance(err, _NoRoomError) else "disk"
        if blob is None:
            metrics.CACHE_BYPASSES.labels(bypass).inc()
        return blob

    def _describe(self, url: str) -> RemoteFile:
        try:
            return describe(url, self._retry)
        except Exception as err:  # drivers raise their libraries' errors as well
            raise unreadable_error(url, err) from err

    def _download(self, file: RemoteFile, sink: io.FileIO) -> bool:
        """Download a file into `sink` and rename it into the cache. Returns False where there is no room for it."""
        if file.size is not None and not self._reserve(file.key, file.url, sink, file.size):
            return False
        try:
            size = download(file, sink, self._max_bytes, self._retry)
        except DiskError:
            raise
        except Exception as err:  # drivers raise their libraries' errors as well
            raise unreadable_error(file.url, err) from err
        self._count(downloaded_bytes=size)
        if file.size is None and not self._reserve(file.key, file.url, sink, size):
            return False
        with disk_errors():
            os.fdatasync(sink.fileno())  # after a power cut a file must be either whole or absent
            os.rename(self._part(file.key), self._path(file.key))
        return True

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.shard"

    def _part(self, key: str) -> Path:
        return self._directory / f"{key}.part"

    @contextlib.contextmanager
    def _locked_part(self, key: str) -> Iterator[io.FileIO]:
        """Yield the key's .part file, empty and locked, and remove it at the end unless it has been renamed."""
        part = self._part(key)
        with disk_errors():
            sink = _locked(part)
        try:
            yield sink
        finally:
            if _is_named(sink, part):
                part.unlink()
            sink.close()

    def _reserve(self, key: str, url: str, sink: io.FileIO, size: int) -> bool:
        """Evict shards until `size` bytes fit into the cache and onto its disk, and allocate them in `sink`, where every process
        counts them.

        Returns False where evicting all shards would not make enough room.
        """
        with disk_errors(), open(self._directory / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._drop_abandoned()
            parts = [path for path in self._directory.glob("*.part") if path != self._part(key)]
            shards = sorted(self._directory.glob("*.shard"), key=_last_use)
            disk = os.statvfs(self._directory)
            available = disk.f_bavail * disk.f_frsize + os.fstat(sink.fileno()).st_size
            free = min(self._max_bytes - sum(_size(path) for path in [*parts, *shards]), available)
            if size > free + sum(_size(path) for path in shards):
                most = min(self._max_bytes, disk.f_blocks * disk.f_frsize)
                self._warn(url, f"no room for {size} bytes among {most}, {len(parts)} other files in the making included")
                return False
            for path in shards:
                if size <= free:
                    break
                free += _size(path)
                path.unlink(missing_ok=True)
                self._count(evicted=1)
            self._let_go_of_evicted()
            if size:
                os.posix_fallocate(sink.fileno(), 0, size)  # detects a full disk here, not after the download
        return True

    def _reserve_or_raise(self, key: str, url: str, sink: io.FileIO, size: int) -> None:
        if not self._reserve(key, url, sink, size):
            raise _NoRoomError from OSError(errno.ENOSPC, f"no room for {size} bytes")

    def _drop_abandoned(self) -> None:
        """Remove the .part files that processes left when they died."""
        for part in self._directory.glob("*.part"):
            with contextlib.suppress(OSError), open(part, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody is writing it
                if _is_named(file, part):
                    part.unlink()

    def _let_go_of_evicted(self) -> None:
        with self._mutex:
            blobs = list(self._blobs)
        for blob in blobs:
            blob.let_go_if_evicted()

    def _count(self, *, hits: int = 0, misses: int = 0, downloaded_bytes: int = 0, evicted: int = 0, uncached: int = 0) -> None:
        with self._mutex:
            self.stats.hits += hits
            self.stats.misses += misses
            self.stats.downloaded_bytes += downloaded_bytes
            self.stats.evicted += evicted
            self.stats.uncached += uncached
        metrics.CACHE_REQUESTS.labels("hit").inc(hits)
        metrics.CACHE_REQUESTS.labels("miss").inc(misses)
        metrics.CACHE_DOWNLOADED_BYTES.inc(downloaded_bytes)
        metrics.CACHE_EVICTIONS.inc(evicted)

    def _warn(self, url: str, error: str) -> None:
        with self._mutex:
            first, self._warned = not self._warned, True
        if first:
            remedy = "raise --cache-gib, or name a --cache on a disk with more room"
            log.warning("reading without the shard cache %s", pairs(cache=self._directory, shard=url, error=error, remedy=remedy))


class _NoRoomError(DiskError):
    """The cache is too small, whatever the disk."""


def _opened(path: Path, url: str) -> LocalBlob | None:
    """Open a cached file and set its time of last use; None if it is not there. Raises DiskError."""
    try:
        blob = LocalBlob(open(path, "rb"), url)  # noqa: SIM115 - the blob closes it
        os.utime(path)
    except FileNotFoundError:
        return None
    except OSError as err:
        raise DiskError from err
    return blob


def _locked(part: Path) -> io.FileIO:
    """Open a .part file, empty it and hold its lock. Raises OSError."""
    while True:
        file = io.FileIO(os.open(part, os.O_RDWR | os.O_CREAT, 0o600), "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_named(file, part):  # else whoever had the lock has renamed or removed it
                file.truncate(0)
                return file
        except OSError:
            file.close()
            raise
        file.close()


def _is_named(file: IO[bytes] | io.FileIO, path: Path) -> bool:
    """Whether the file at `path` is still this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@functools.cache
def default_cache(max_bytes: int = DEFAULT_BYTES) -> ShardCache:
    """Return the shard cache in this user's directory below the system's temporary one, shared by the user's processes.

    Raises UserError where the directory cannot be made, is a symbolic link, or belongs to another user.
    """
    directory = Path(tempfile.gettempdir()) / f"headrace-shards-{os.getuid()}"
    cache = ShardCache(directory, max_bytes)
    if directory.lstat().st_uid != os.getuid() or directory.is_symlink():
        raise UserError(f"{directory} was made by another user; give a shard cache of your own (--cache DIR)")
    return cache
