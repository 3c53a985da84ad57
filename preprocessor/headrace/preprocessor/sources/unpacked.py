"""Unpacking of compressed shards into unnamed temporary files, bounded for each shard and in total for all that are open."""

from __future__ import annotations

import bz2
import gzip
import io
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO, cast

import pyarrow as pa

from headrace.errors import DatasetError
from headrace.preprocessor.sources.base import check_size
from headrace.preprocessor.sources.blob import Blob, BlobReader, LocalBlob
from headrace.quarantine import BadSampleError, Reason

COPY_BYTES = 2**20
_ARROW_BYTES = 2**16
_BZ2_BYTES = 2**13  # small, since what lies behind a stream is copied for the next one, and a stream may have 40 bytes
MAX_SHARD_BYTES = 8 * 2**30  # sound MDS shards have at most half of it, as their offsets are 32 bits wide
MAX_TOTAL_BYTES = 32 * 2**30
"""Limit on all unpacked shards open in this process: a job has 32 shards open, and packed data come in shards of up to 1 GB."""
MAX_RATIO = 200
"""Unpacked bytes allowed per packed byte. Captions of ten characters, each in tar blocks of its own, are compressed to a
fiftieth; zeros to a thousandth."""
CODECS = {".gz": "gzip", ".tgz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".br": "brotli"}
"""The codec that the end of a file's name tells."""
MIN_BYTES = 256 * 2**20
"""Size that any shard may unpack to, however small it is packed."""


class Unpacking:
    """A temporary file that a shard is being unpacked into, ended by either `finish` or `discard`."""

    def __init__(self, packed: Blob, url: str) -> None:
        self._url = url
        self._limit = min(MAX_SHARD_BYTES, max(MIN_BYTES, MAX_RATIO * packed.size))
        self._size = 0
        self._file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - the blob closes it

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`.

        Raises BadSampleError (too_large) where this shard exceeds its limit, DatasetError where all open ones exceed theirs.
        """
        check_size("the shard, unpacked,", self._size + len(data), self._limit)
        _take(len(data), self._url)
        self._size += len(data)
        self._file.write(data)

    def finish(self) -> Blob:
        """Return what was written as a blob, whose last reference gives the space back."""
        self._file.flush()
        blob = LocalBlob(self._file, self._url)
        weakref.finalize(blob, _returned.append, self._size)
        return blob

    def discard(self) -> None:
        """Close the file and give its space back at once."""
        self._file.close()
        _returned.append(self._size)


def plain_name(name: str) -> str:
    """Return the name of a file, or its URL, without the end that tells how it is packed."""
    return next((name.removesuffix(end) for end in CODECS if name.endswith(end)), name)


def unpack(packed: Blob, url: str, codec: str) -> tuple[Blob, BadSampleError | None]:
    """Unpack a shard as far as it is sound; also return what ended it early, if anything. Closes `packed`.

    `codec` is one of CODECS' values. Raises DatasetError where all unpacked shards together would exceed their limit.
    """
    unpacking = Unpacking(packed, url)
    failure = None
    try:
        for data in _pieces(packed, codec):
            unpacking.write(data)
    except BadSampleError as err:
        failure = BadSampleError(err.reason, err.detail)  # without a traceback, which would keep all that refers to the blob
    except (EOFError, zlib.error, gzip.BadGzipFile, pa.ArrowException, OSError) as err:
        if isinstance(err, OSError) and err.errno is not None:
            unpacking.discard()
            raise
        ends_early = isinstance(err, EOFError) or "Truncated compressed stream" in str(err)
        reason = Reason.ARCHIVE_TRUNCATED if ends_early else Reason.ARCHIVE_CORRUPT
        ending = "ends early" if ends_early else f"is damaged: {err}"
        failure = BadSampleError(reason, f"the {codec} data {ending}")
    except BaseException:
        unpacking.discard()
        raise
    finally:
        packed.close()
    return unpacking.finish(), failure


def _pieces(packed: Blob, codec: str) -> Iterator[bytes | memoryview]:
    """Yield what a shard unpacks to, in pieces that are small where a failure loses the piece that is being read."""
    if codec == "bz2":
        yield from _bz2_pieces(io.BufferedReader(BlobReader(packed), COPY_BYTES))
    elif codec == "gzip":
        with gzip.GzipFile(fileobj=io.BufferedReader(BlobReader(packed), COPY_BYTES)) as stream:
            yield from iter(lambda: stream.read1(COPY_BYTES), b"")  # what is unpacked next, and never more than is sound
    else:
        chunk = memoryview(bytearray(_ARROW_BYTES))  # our own, since pyarrow leaks the buffer that `read` makes if it raises
        with pa.CompressedInputStream(pa.PythonFile(BlobReader(packed), mode="r"), codec) as stream:
            while size := stream.readinto(chunk):
                yield chunk[:size]


def _bz2_pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield what the streams of a bz2 file unpack to, one after the other.

    bz2.BZ2File takes everything behind the first stream that does not begin another one for padding, and says nothing. Raises
    OSError without an errno for what does not unpack, EOFError where the last stream is cut.
    """
    decompressor, behind = bz2.BZ2Decompressor(), b""
    while True:
        if decompressor.eof:
            behind = decompressor.unused_data or file.read(_BZ2_BYTES)
            if not behind:
                return
            decompressor = bz2.BZ2Decompressor()
        elif decompressor.needs_input and not (behind := file.read(_BZ2_BYTES)):
            raise EOFError
        yield decompressor.decompress(behind, COPY_BYTES)
        behind = b""


_lock = threading.Lock()
_total = 0
_returned: deque[int] = deque()
"""Sizes that `_total` still counts of what is closed. Closing takes no lock, as the garbage collector may close a blob on the
very thread that holds it."""


def _open_bytes() -> int:
    """Return how many bytes the unpacked shards that are open have. Call it with the lock held."""
    global _total
    while _returned:
        _total -= _returned.popleft()
    return _total


def _take(size: int, url: str) -> None:
    global _total
    with _lock:
        before = _open_bytes()
        if before + size <= MAX_TOTAL_BYTES:
            _total = before + size
            return
    raise DatasetError(
        f"cannot unpack {url}: the unpacked shards that are open have {before} bytes, and may have {MAX_TOTAL_BYTES}; "
        "write the data set unpacked, in smaller shards, or lower shuffle_shards"
    )
