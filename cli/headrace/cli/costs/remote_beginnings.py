"""Reading of a few samples from remote shards without fetching the shards whole.

An archive or a JSONL file is read from its start, as far as it has been asked to be; other formats by the ranges that their
readers ask for. Other packed files, JSON and CSV, and those of a server that sends no ranges, are fetched whole, through the
shard cache.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import BinaryIO, cast

from headrace.preprocessor.sources.blob import Blob, Fill, LocalBlob, filesystem, is_remote, open_blob, unreadable_error
from headrace.preprocessor.sources.cache import default_cache
from headrace.preprocessor.sources.download import Retry

FIRST_BYTES = 256 * 2**10
READ_AHEAD_BYTES = 256 * 2**10
MOST_KEPT = 256  # beginnings, each a temporary file; others are fetched again
_IN_ORDER = (".tar", ".tar.gz", ".tgz", ".jsonl", ".ndjson", ".jsonl.gz")
"""Formats without an index, whose first samples are in their first bytes."""
_READ_WHOLE = (".gz", ".zst", ".zstd", ".bz2", ".br", ".snappy", ".json", ".csv", ".tsv")
"""Packed files and formats of text of which nothing can be read without all that is in front of it, or behind it."""


class Beginnings:
    """Opens remote files in the place of a shard cache, and fetches little of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lengths: dict[str, int] = {}
        self._kept: OrderedDict[str, _Beginning] = OrderedDict()
        self._opened: list[_Ranges] = []

    @property
    def bytes_read(self) -> int:
        """Bytes that the servers have been asked for."""
        return sum(file.bytes_read for file in self._opened)

    def open(self, url: str) -> Blob:
        """Open the file at `url`, or as much of its beginning as is wanted. Raises DatasetError where it cannot be read."""
        if not is_remote(url):
            return open_blob(url)
        if url.endswith(_IN_ORDER):
            return self._beginning(url).blob()
        file = self._ranges(url, READ_AHEAD_BYTES)
        if url.endswith(_READ_WHOLE):
            file.fetch_whole()
        return file

    def open_in_parts(self, url: str, *, grouped: bool = False) -> Blob:  # noqa: ARG002 - it reads beginnings only
        """Open the same: nothing is fetched before it is read."""
        return self.open(url)

    def medium(self, url: str, read: Callable[[], bytes]) -> bytes:  # noqa: ARG002 - of few samples each is read once
        """Return a medium that a row names."""
        return read()

    def find(self, key: str, url: str) -> Blob | None:
        """Open what was made of a file under `key`, as the shard cache does."""
        return default_cache().find(key, url)

    def make(self, key: str, url: str, fill: Fill) -> Blob | None:
        """Make what is to be kept of a file under `key` in the shard cache, and open it; None where there is no room."""
        return default_cache().make(key, url, fill)

    def is_cut(self, url: str) -> bool:
        """Whether `open` gives a beginning only, whose last sample may be incomplete."""
        return is_remote(url) and url.endswith(_IN_ORDER) and not self._beginning(url).whole

    def lengthen(self, url: str, rows: int, wanted: int) -> None:
        """Have `open` give more of a file that is cut, whose present beginning has `rows` samples: `wanted`, as far as one can
        tell."""
        beginning = self._beginning(url)
        factor = max(1.25, 1.1 * (wanted + 0.5) / (rows + 0.5)) if rows else 4.0  # half a sample more is there on average
        self._lengths[url] = round(beginning.length * factor)
        beginning.extend(self._lengths[url])

    def _beginning(self, url: str) -> _Beginning:
        with self._lock:
            if url not in self._kept:
                self._kept[url] = _Beginning(url, self._ranges(url, 0))
                self._kept[url].extend(self._lengths.setdefault(url, FIRST_BYTES))
            self._kept.move_to_end(url)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return self._kept[url]

    def _ranges(self, url: str, read_ahead: int) -> _Ranges:
        file = _Ranges(url, read_ahead)
        self._opened.append(file)
        return file


class _Beginning:
    """The first bytes of a remote file, in a temporary file."""

    def __init__(self, url: str, source: Blob) -> None:
        self._url = url
        self._source = source
        self._file = cast(BinaryIO, tempfile.TemporaryFile(buffering=0))  # noqa: SIM115 - the next line closes it
        weakref.finalize(self, self._file.close)
        self.length = 0

    @property
    def whole(self) -> bool:
        """Whether this is all of the file."""
        return self.length == self._source.size

    def extend(self, length: int) -> None:
        """Fetch what is missing of the first `length` bytes. Raises DatasetError where that fails."""
        missing = max(0, min(length, self._source.size) - self.length)
        data = memoryview(self._source.pread(self.length, missing))
        if len(data) < missing:
            raise unreadable_error(self._url, EOFError(f"{len(data)} of {missing} bytes came"))
        self.length += missing
        while data:
            data = data[self._file.write(data) :]

    def blob(self) -> Blob:
        """Return what is there now as a file of its own."""
        return LocalBlob(os.fdopen(os.dup(self._file.fileno()), "rb"), self._url)


class _Ranges(Blob):
    """A remote file, of which what is read is fetched, and `read_ahead` bytes behind it. Thread-safe, one read at a time."""

    def __init__(self, url: str, read_ahead: int) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._whole: Blob | None = None
        self.bytes_read = 0
        try:
            fs, path = filesystem(url)
            kind = {"cache_type": "readahead", "block_size": read_ahead} if read_ahead else {"cache_type": "none"}
            file = self._file = Retry().call(lambda: fs.open(path, "rb", **kind), url)
            self.size = file.seek(0, os.SEEK_END)
        except ValueError:  # a stream: the server tells no size, or sends no ranges
            self.fetch_whole()
        except Exception as err:  # drivers raise their libraries' errors as well
            raise unreadable_error(url, err) from err

    def pread(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, once other reads of this file are done."""
        with self._lock:
            if self._whole is None and self._file is not None:
                file = self._file
                try:
                    return Retry().call(lambda: self._read(file, offset, size), self._url)
                except ValueError:  # fsspec's error where the server does not support ranges
                    self.fetch_whole()
                except Exception as err:
                    raise unreadable_error(self._url, err) from err
        assert self._whole is not None
        return self._whole.pread(offset, size)

    def fetch_whole(self) -> None:
        """Fetch the file into the shard cache, and read it from there. Raises DatasetError where that fails."""
        self._whole = default_cache().open(self._url)
        self.size = self._whole.size
        self.bytes_read += self.size

    def close(self) -> None:
        """Close the file."""
        for file in (self._file, self._whole):
            if file is not None:
                file.close()

    def _read(self, file: BinaryIO, offset: int, size: int) -> bytes:
        file.seek(offset)
        data = file.read(size)
        ahead = getattr(file, "cache", None)
        self.bytes_read = getattr(ahead, "total_requested_bytes", 0) or self.bytes_read + len(data)
        return data
