"""Small remote files that rows name, kept in the shard cache by the hundred: packs of them, each one file of the cache.

A directory of as many files as a data set has media would be slow to keep within its bound. So this process gathers what it has
read in memory, writes a pack once it is large enough, and knows where each file is. It knows that for itself alone, and for as
long as it runs: another process, or this one after a restart, reads media from their server again, as they may have changed.
"""

from __future__ import annotations

import io
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.preprocessor.sources.blob import Blob, Fill
from headrace.preprocessor.sources.download import disk_errors, write_all

PACK_BYTES = 8 * 2**20
MOST_KNOWN = 1 << 18
"""Files whose places are known: some 100 MB of memory."""


class Maker(Protocol):
    """The cache that packs are in."""

    def find(self, key: str, url: str) -> Blob | None:
        """Open the file that was made under `key`; None if it is not there, or no more."""

    def make(self, key: str, url: str, fill: Fill) -> Blob | None:
        """Open the file under `key`, made by `fill`; None where there is no room."""


@dataclass(frozen=True, slots=True)
class _Place:
    pack: str
    offset: int
    size: int


class MediaPacks:
    """The media that this process has read of late. Thread-safe."""

    def __init__(self, cache: Maker) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._gathered: dict[str, bytes] = {}
        self._gathered_bytes = 0
        self._places: OrderedDict[str, _Place] = OrderedDict()

    def get(self, url: str, read: Callable[[], bytes]) -> bytes:
        """Return the content of the file at `url`, which `read` reads from its server. Raises what `read` raises."""
        data = self._known(url)
        if data is None:
            data = read()
            if len(data) <= PACK_BYTES:
                self._add(url, data)
        return data

    def _known(self, url: str) -> bytes | None:
        with self._lock:
            if url in self._gathered:
                return self._gathered[url]
            place = self._places.get(url)
        if place is None:
            return None
        pack = self._cache.find(place.pack, url)
        data = b"" if pack is None else pack.pread(place.offset, place.size)
        if pack is None or len(data) < place.size:
            with self._lock:
                self._places.pop(url, None)
            return None
        return data

    def _add(self, url: str, data: bytes) -> None:
        with self._lock:
            if url not in self._gathered:
                self._gathered[url] = data
                self._gathered_bytes += len(data)
            if self._gathered_bytes < PACK_BYTES:
                return
            full, self._gathered, self._gathered_bytes = self._gathered, {}, 0
        self._write(full)

    def _write(self, files: dict[str, bytes]) -> None:
        key = uuid.uuid4().hex

        def fill(sink: io.FileIO, reserve: Callable[[int], None]) -> None:
            reserve(sum(map(len, files.values())))
            with disk_errors():
                for data in files.values():
                    write_all(sink, data)

        pack = self._cache.make(key, next(iter(files)), fill)
        if pack is None:
            return
        pack.close()
        with self._lock:
            offset = 0
            for url, data in files.items():
                self._places[url] = _Place(key, offset, len(data))
                offset += len(data)
            while len(self._places) > MOST_KNOWN:
                self._places.popitem(last=False)
