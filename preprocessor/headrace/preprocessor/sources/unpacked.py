"""Packed shards, unpacked into unnamed temporary files: within a share of what was packed, and a total of all that are open."""

from __future__ import annotations

import tempfile
import threading
import weakref
from typing import BinaryIO, cast

from headrace.errors import DatasetError
from headrace.preprocessor.sources.base import check_size
from headrace.preprocessor.sources.blob import Blob, LocalBlob

COPY_BYTES = 2**20
MAX_SHARD_BYTES = 8 * 2**30  # offsets in MDS are 32 bits wide, so that half of it is the most that a sound one has
MAX_TOTAL_BYTES = 32 * 2**30
"""Of this process: a job has 32 shards open, and those who pack data pack them into shards of up to a gigabyte."""
MAX_RATIO = 200
"""Bytes of one packed byte. Captions of ten characters, each in blocks of a tar of its own, are packed to a fiftieth; zeros to
a thousandth."""
MIN_BYTES = 256 * 2**20
"""Any shard may unpack to so much."""


class Unpacking:
    """A temporary file that is being written. One of `finish` and `discard` ends it."""

    def __init__(self, packed: Blob, url: str) -> None:
        self._url = url
        self._limit = min(MAX_SHARD_BYTES, max(MIN_BYTES, MAX_RATIO * packed.size))
        self._size = 0
        self._file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - the blob closes it

    def write(self, data: bytes | memoryview) -> None:
        """Raises BadSampleError (too_large) for a shard that takes out of proportion, DatasetError where all of them do."""
        check_size("the shard, unpacked,", self._size + len(data), self._limit)
        _take(len(data), self._url)
        self._size += len(data)
        self._file.write(data)

    def finish(self) -> Blob:
        """What was written. Its space is given back when the blob goes."""
        self._file.flush()
        blob = LocalBlob(self._file, self._url)
        weakref.finalize(blob, _give_back, self._size)
        return blob

    def discard(self) -> None:
        """Give the space back at once."""
        self._file.close()
        _give_back(self._size)


_lock = threading.Lock()
_total = 0


def _take(size: int, url: str) -> None:
    global _total
    with _lock:  # whose holder makes no object: the collector could finalize a blob then, which takes the lock too
        before = _total
        if before + size <= MAX_TOTAL_BYTES:
            _total = before + size
            return
    raise DatasetError(
        f"cannot unpack {url}: the unpacked shards that are open have {before} bytes, and may have {MAX_TOTAL_BYTES}; "
        "write the data set unpacked, in smaller shards, or lower shuffle_shards"
    )


def _give_back(size: int) -> None:
    global _total
    with _lock:
        _total -= size
