"""Walking the headers of a remote tar by ranges, from several places at once, and keeping them in the cache for the next time.

A tar has no index: each header says where the next one is, so that walking a remote one takes as many requests, one after the
other, as it has members. So the archive is also walked from places in between, behind the next block that looks like a header.
That only brings headers into memory: what is in the archive is then told by `tar.scan` from its start, whatever was found in
between, so that an archive has the same samples in the same order however it is read.

What `tar.scan` has read is kept in the cache, and read again from there. An archive of many members is fetched whole instead,
as is one whose members are small.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from headrace.errors import DatasetError
from headrace.preprocessor.sources.blob import Blob, BlobCache
from headrace.preprocessor.sources.download import disk_errors, write_all
from headrace.preprocessor.sources.partial_blob import WINDOW_BYTES
from headrace.preprocessor.sources.tar import BLOCK, Damage, is_header, scan

MOST_REQUESTS = 256
"""Requests that walking an archive may take; one that takes more is fetched whole. A job that begins walks 16 archives."""
LEAST_STRIDE = 16 * 2**10
"""Bytes that a request must skip on average for walking to be worth it."""
_STEPS = 15  # members that are skipped from one place on, one after the other: 0.75 s where a request takes 50 ms
_MOST_PLACES = 64
_SEEN_JUMPS = 4  # over members that are walked before the number of all is estimated
_FORMAT = 1  # to be raised with every change of what is kept, so that no other release's is read
_DIGEST_BYTES = 32

_places = ThreadPoolExecutor(_MOST_PLACES, thread_name_prefix="walk")


@contextlib.contextmanager
def walking(blob: Blob, cache: BlobCache | None, url: str) -> Iterator[Blob]:
    """Yield the archive for `tar.scan`, with what was kept of its headers; keep what is read of them in the block.

    A local archive is yielded as it is. Raises DatasetError where a remote one cannot be read.
    """
    if cache is None or blob.is_local or not blob.version:
        yield blob
        return
    key = hashlib.sha256(f"{blob.version}\nheaders {_FORMAT}".encode()).hexdigest()[:40]
    kept = _load(cache.find(key, url))
    if kept is not None:
        yield _Kept(blob, kept)
        return
    if not _bring_headers(blob):
        blob.fetch_whole()
    if blob.is_local:
        yield blob
        return
    noted = _Noted(blob.reader())
    yield noted
    cache.make(key, url, lambda file, reserve: _write(noted.reads, file, reserve))


def _bring_headers(blob: Blob) -> bool:
    """Bring the headers of an archive into memory, as far as they are found; return False if it is to be fetched whole."""
    jumps = seen = 0
    for entry in scan(blob.reader()):
        if isinstance(entry, Damage):
            return False
        jumps, seen = jumps + (entry.size > WINDOW_BYTES), entry.offset + entry.size
        if jumps >= _SEEN_JUMPS or seen >= _SEEN_JUMPS * LEAST_STRIDE > jumps * LEAST_STRIDE:
            break
    else:
        return True
    stride = seen / max(1, jumps)
    requests = (blob.size - seen) / stride
    if stride < LEAST_STRIDE or not jumps or requests > MOST_REQUESTS:
        return False
    num_places = min(_MOST_PLACES, max(1, round(requests / _STEPS)))
    step = (blob.size - seen) // num_places
    begins = [(seen + number * step) // BLOCK * BLOCK for number in range(1, num_places)]
    of_first = _places.submit(_walk, blob.reader(), -(-seen // BLOCK) * BLOCK, seen + step)
    list(_places.map(lambda begin: _walk_from(blob, begin, begin + step, round(stride)), begins))
    of_first.result()
    return True


def _walk_from(blob: Blob, begin: int, end: int, stride: int) -> None:
    """Walk from the first header behind `begin` up to `end`, if there is one. `stride`: bytes from one header to the next."""
    reader = blob.reader()
    at_a_time = max(BLOCK, stride // 4 // BLOCK * BLOCK)  # so that little is read behind the header
    with contextlib.suppress(DatasetError):  # which the scan from the start will tell, if it is of importance
        for offset in range(begin, min(begin + 4 * stride, end), at_a_time):
            chunk = reader.pread(offset, at_a_time)
            found = next((at for at in range(0, len(chunk), BLOCK) if is_header(chunk[at : at + BLOCK])), None)
            if found is not None:
                _walk(reader, offset + found, end)
                return


def _walk(reader: Blob, begin: int, end: int) -> None:
    """Walk from the header at `begin` up to `end`, or to the first damage."""
    with contextlib.suppress(DatasetError):
        for entry in scan(_From(reader, begin)):
            if isinstance(entry, Damage) or begin + entry.offset + entry.size >= end:
                return


class _From(Blob):
    """A blob without its beginning."""

    def __init__(self, blob: Blob, begin: int) -> None:
        self._blob = blob
        self._begin = begin
        self.size = blob.size - begin

    def pread(self, offset: int, size: int) -> bytes:
        return self._blob.pread(self._begin + offset, size)

    def close(self) -> None:
        pass


class _Noted(Blob):
    """A blob that notes what is read of it."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self.size = blob.size
        self.reads: dict[int, bytes] = {}

    def pread(self, offset: int, size: int) -> bytes:
        data = self._blob.pread(offset, size)
        if len(data) >= len(self.reads.get(offset, b"")):
            self.reads[offset] = data
        return data

    def close(self) -> None:
        pass


class _Kept(Blob):
    """A blob of which some parts were read before."""

    def __init__(self, blob: Blob, reads: dict[int, bytes]) -> None:
        self._blob = blob
        self._reads = reads
        self.size = blob.size

    def pread(self, offset: int, size: int) -> bytes:
        known = self._reads.get(offset, b"")
        wanted = min(size, self.size - offset)
        return known[:size] if len(known) >= wanted else self._blob.pread(offset, size)

    def close(self) -> None:
        pass


def _write(reads: dict[int, bytes], file: io.FileIO, reserve: Callable[[int], None]) -> None:
    """Write reads into a new file of the cache: a digest, then an Arrow stream."""
    table = pa.table({"offset": pa.array(reads.keys(), pa.uint64()), "data": pa.array(reads.values(), pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    reserve(_DIGEST_BYTES + len(data))
    with disk_errors():
        write_all(file, hashlib.sha256(data).digest() + data)


def _load(blob: Blob | None) -> dict[int, bytes] | None:
    """Return the reads that a file of the cache holds; None where there is none, or it is damaged."""
    if blob is None:
        return None
    data = blob.pread(0, blob.size)
    blob.close()
    if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
        return None  # not all of it had been written when the power was cut
    with pa.ipc.open_stream(data[_DIGEST_BYTES:]) as reader:
        table = reader.read_all()
    return dict(zip(table["offset"].to_pylist(), table["data"].to_pylist(), strict=True))
