"""A remote file that is in the shard cache: opened there, and brought back when it is read after its eviction."""

from __future__ import annotations

import time
from typing import Protocol

import pyarrow as pa

from headrace.preprocessor.sources.blob import Blob, LocalBlob
from headrace.preprocessor.sources.download import RemoteFile

STAMP_S = 5.0
"""Resolution of the time of last use, since writing it costs as much as a small read."""


class Holder(Protocol):
    """The cache that such a file is in."""

    def fetch(self, file: RemoteFile) -> Blob:
        """Open a file, downloading it first if need be, or on its server where there is no room for it."""

    def reopen(self, file: RemoteFile) -> Blob:
        """Fetch a file again in the same version."""

    def stamp(self, file: RemoteFile) -> None:
        """Set a file's time of last use to now."""


class CachedBlob(Blob):
    """A cached remote file that is fetched again when it is read after its eviction."""

    def __init__(self, cache: Holder, file: RemoteFile) -> None:
        self._cache = cache
        self._file = file
        self._held: Blob | None = cache.fetch(file)
        self._closed = False
        self._stamped_s = time.monotonic()
        self.size = self._held.size

    @property
    def version(self) -> str:
        """URL and version of the file."""
        return f"{self._file.url} {self._file.version}"

    @property
    def is_local(self) -> bool:
        """Whether the cache has room for the file."""
        held = self._held
        return held is None or held.is_local

    def pread(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` of the cached file, which is fetched again first if it has been evicted.

        Raises ValueError after `close`.
        """
        return self._present().pread(offset, size)

    def view(self, offset: int, size: int) -> memoryview:
        """Return the same as `pread`, mapped into memory; see `Blob.view`. Evicted, it keeps its space while it is referenced."""
        return self._present().view(offset, size)

    def _present(self) -> Blob:
        self.let_go_if_evicted()
        held = self._held  # the caller's reference keeps the file open, even if another thread lets go of it
        if held is None:
            if self._closed:
                raise ValueError(f"{self._file.url} is closed")
            held = self._held = self._cache.reopen(self._file)
        elif time.monotonic() - self._stamped_s > STAMP_S:
            self._stamped_s = time.monotonic()
            self._cache.stamp(self._file)
        return held

    def arrow_file(self) -> pa.NativeFile:
        """Return a file over the cached file, which keeps its space while it is open, or over the file on its server."""
        return self._present().arrow_file()

    def let_go_if_evicted(self) -> None:
        """Close the file if it has been evicted, so that the disk gets its space back."""
        held = self._held
        if isinstance(held, LocalBlob) and held.unlinked:
            self._held = None

    def close(self) -> None:
        """Close the file, which stays in the cache."""
        self._closed = True
        self._held = None
