"""Parquet files with the columns of Hugging Face data sets: media as `{bytes, path}` structs or lists of them.

Parquet gives no single row: a page is decoded as a whole, and a row group may be one page. Samples are read in an order that
leaps over all row groups of many shards. So row groups are unpacked once, in a stream, into files in the cache on the local disk
that give single rows (parquet_rows.py), small neighbours together into one. Very small files, and what the cache has no room for,
are decoded in memory, group by group (parquet_memory.py). Rows have no key of their own: the key is the row number.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.observability.logs import pairs
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources import parquet_rows
from headrace.preprocessor.sources.base import MAX_MEDIUM_BYTES, NumberedShard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, Span, open_blob, unreadable_error
from headrace.preprocessor.sources.parquet_bounds import dictionary_columns, expanded_bytes, most_unpacked_bytes, rows_at_once
from headrace.preprocessor.sources.parquet_memory import CACHE, SERIALS
from headrace.quarantine import BadSampleError, Reason, Rejected

log = logging.getLogger(__name__)

UNIT_BYTES = 64 * 2**20
"""Unpacked bytes up to which neighbouring row groups share a file of the cache, which would hold a crowd of files otherwise."""
FOOTER_BYTES = 64 * 2**10
"""Read of a remote file's end at once: its footer, mostly."""
RANGED_GROUP_BYTES = 8 * 2**20
"""Bytes of a row group up to which it is read alone from a remote file, and decoded in memory. For a larger one all of the file
is fetched, as a single row takes a large part of it."""
IN_MEMORY_BYTES = 2**20
"""Unpacked bytes of a whole Parquet file that is not worth a file of the cache."""
RETRY_S = 60.0
"""Time after which row groups that there was no room for are tried again."""
_MAGIC = b"PAR1"
_BUFFER_BYTES, _MOST_BUFFERS_BYTES = 2**18, 2**25  # of one column that is being read; of all that are
# One thread unpacks what some ten decode, and while it does it holds a few pages, which may be as large as their row group. The
# threads are always the same ones, as each keeps some of the memory that it has freed.
_THREADS = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 8), thread_name_prefix="unpack")


_warned = threading.Event()


class ParquetShard(NumberedShard):
    """A shard that is one Parquet file."""

    def __init__(self, url: str, cache: BlobCache | None = None) -> None:
        """Read the footer. Without a cache all row groups are decoded in memory."""
        self._url = url
        self._cache: BlobCache | None = None
        self._serial = next(SERIALS)
        self.num_rows = 0
        self.rejected = ()
        self._blob = open_blob(url, cache, in_parts=True, grouped=True)
        self._blob.prefetch([(max(0, self._blob.size - FOOTER_BYTES), self._blob.size)])
        failure = _cut_short(self._blob)
        if failure is None:
            try:
                with self._blob.arrow_file() as source, pq.ParquetFile(source) as file:
                    self._metadata, schema = file.metadata, file.schema_arrow
            except pa.ArrowException as err:
                failure = Rejected(name="", reason=Reason.ARCHIVE_CORRUPT, detail=f"the footer is damaged: {err}")
            except OSError as err:
                failure = _damage_or_raise(url, err)
        if failure is not None:
            self.rejected = (failure,)
            return
        self._schema = pa.schema([field.with_type(parquet_rows.plain_type(field.type)) for field in schema])
        groups = [self._metadata.row_group(group) for group in range(self._metadata.num_row_groups)]
        self._starts = list(accumulate((group.num_rows for group in groups), initial=0))
        self._sizes = [max(0, group.total_byte_size) for group in groups]
        self._units = _units(self._sizes)
        self.num_rows = self._starts[-1]
        self.rows_fetched_together = max(
            (one.num_rows for number, one in enumerate(groups) if self._is_ranged(number)), default=1
        )
        self._version = self._blob.version
        is_small = max(self._blob.size, sum(self._sizes)) <= IN_MEMORY_BYTES
        self._cache = None if is_small or not self._version else cache
        self._no_room_until_s: dict[range, float] = {}
        self._unpacked: set[range] = set()

    def read(self, row: int) -> Record:
        """Return the record at `row`, whose fields are its cells as Python values. Raises BadSampleError where it is damaged."""
        key = self.key(row)
        group = bisect_right(self._starts, row) - 1
        cells = self._unpacked_cells(row, group)
        if cells is None:
            cells = self._decoded_cells(row, group)
        try:
            fields = cells.to_pylist()[0]
        except UnicodeDecodeError as err:
            raise BadSampleError(Reason.ENCODING_ERROR, f"a string cell is not UTF-8: {err.reason}") from err
        except (ValueError, OverflowError, pa.ArrowException) as err:  # a date out of Python's range, or with nanoseconds
            raise BadSampleError(Reason.SCHEMA_ERROR, f"a cell has no value in Python, cast its column: {err}") from err
        return Record(key=key, fields=fields, load=_no_files)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Ask for the row groups that rows are in, where single ones are read; see `Shard.prefetch`."""
        groups = {bisect_right(self._starts, row) - 1 for row in rows}
        self._blob.prefetch([_span(self._metadata.row_group(group)) for group in sorted(groups) if self._is_ranged(group)])

    def annotations(self, paths: Collection[str] | None) -> Iterator[Mapping[str, Any] | None]:
        """Yield the fields of each row, decoding only the columns that are asked for; see `Shard.annotations`."""
        columns = None
        if paths is not None:
            columns = [name for name in self._schema.names if any(f"{path}.".startswith(f"{name}.") for path in paths)]
        for group, begin in enumerate(self._starts[:-1] if self.num_rows else ()):
            left = self._starts[group + 1] - begin
            with contextlib.suppress(BadSampleError):
                dictionary_columns(self._metadata, group, self._blob)  # refuses a group that takes too much memory
                rows = max(1, rows_at_once(self._metadata, group, self._blob))
                with self._opened(group) as file:
                    for batch in file.iter_batches(row_groups=[group], batch_size=rows, columns=columns, use_threads=False):
                        yield from _values(batch)
                        left -= batch.num_rows
            yield from repeat(None, left)

    def close(self) -> None:
        """Close the file and free its decoded row groups."""
        CACHE.drop(self._serial)
        self._blob.close()

    def _decoded_cells(self, row: int, group: int) -> pa.Table:
        """Return a row as a table, of a row group that is decoded in memory."""
        table = CACHE.get((self._serial, group), lambda: self._decode(group))
        cells = table.slice(row - self._starts[group], 1)
        check_size("the row", sum(expanded_bytes(chunk) for column in cells.columns for chunk in column.chunks), MAX_MEDIUM_BYTES)
        return cells

    def _decode(self, group: int) -> pa.Table:
        as_dictionary = dictionary_columns(self._metadata, group, self._blob)
        with self._opened(group, read_dictionary=as_dictionary) as file:
            return file.read_row_group(group, use_threads=False)

    def _unpacked_cells(self, row: int, group: int) -> pa.RecordBatch | None:
        """Return a row of an unpacked row group as a batch, unpacking it first if need be; None where it is not to be."""
        if self._is_ranged(group):
            return None
        if not self._blob.is_local:
            self._blob.fetch_whole()
        unit = self._units[bisect_right(self._units, group, key=lambda unit: unit.start) - 1]
        if self._cache is None or time.monotonic() < self._no_room_until_s.get(unit, 0.0):
            return None
        key = _key(self._version, unit)
        file = self._cache.find(key, self._url)
        if file is None:
            file = _THREADS.submit(self._cache.make, key, self._url, functools.partial(self._unpack, unit)).result()
        if file is None:
            self._no_room_until_s[unit] = time.monotonic() + RETRY_S
            return None
        first = self._starts[unit.start]
        return parquet_rows.read_row(file, self._schema, len(unit), group - unit.start, row - first)

    def _is_ranged(self, group: int) -> bool:
        """Whether a row group is read alone, by ranges, as long as the file is on its server."""
        begin, end = _span(self._metadata.row_group(group))
        return not self._blob.is_local and end - begin <= RANGED_GROUP_BYTES

    def _unpack(self, unit: range, file: io.FileIO, reserve: Callable[[int], None]) -> None:
        """Unpack neighbouring row groups into a new file of the cache."""
        if unit in self._unpacked:
            _warn_of_evictions(self._url)
        first, num_bytes = self._starts[unit.start], sum(self._sizes[group] for group in unit)
        writer = parquet_rows.RowsWriter(file, reserve, len(unit), self._starts[unit.stop] - first, num_bytes)
        for group in unit:
            try:
                dictionary_columns(self._metadata, group, self._blob)  # refuses a group that takes too much memory
                if rows := rows_at_once(self._metadata, group, self._blob):
                    begin, end = self._starts[group] - first, self._starts[group + 1] - first
                    writer.add(range(begin, end), self._batches(group, rows), most_unpacked_bytes(self._metadata, group))
            except BadSampleError as err:
                writer.refuse(group - unit.start, err)
        writer.finish()
        self._unpacked.add(unit)
        pa.default_memory_pool().release_unused()

    def _batches(self, group: int, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Decode a row group in a stream, a page and `num_rows` rows at a time."""
        with self._opened(group) as file:
            for batch in file.iter_batches(row_groups=[group], batch_size=num_rows, use_threads=False):
                yield batch if batch.schema.types == self._schema.types else batch.cast(self._schema)

    @contextlib.contextmanager
    def _opened(self, group: int, **options: Any) -> Iterator[Any]:
        """Yield the file as a pyarrow ParquetFile to decode a row group. Raises BadSampleError where that is damaged."""
        buffer_bytes = min(_BUFFER_BYTES, max(1, _MOST_BUFFERS_BYTES // max(1, self._metadata.num_columns)))
        options |= {"metadata": self._metadata, "buffer_size": buffer_bytes, "pre_buffer": False}
        try:
            with self._blob.arrow_file() as source, pq.ParquetFile(source, **options) as file:
                yield file
        except (pa.ArrowException, OSError) as err:
            if isinstance(err, OSError) and err.errno is not None:
                raise unreadable_error(self._url, err) from err
            raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"row group {group} does not decode: {err}") from err


def _values(batch: pa.RecordBatch) -> list[dict[str, Any]] | list[None]:
    """Return the rows of a batch as Python values; None for each if a cell has none."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return [None] * batch.num_rows
    return rows


def _span(group: Any) -> Span:
    """Return the place of a row group in its file."""
    columns = [group.column(number) for number in range(group.num_columns)]
    begins = [min(filter(None, (column.dictionary_page_offset, column.data_page_offset)), default=0) for column in columns]
    ends = [begin + column.total_compressed_size for begin, column in zip(begins, columns, strict=True)]
    return min(begins, default=0), max(ends, default=0)


def _units(sizes: list[int]) -> list[range]:
    """Return the row groups of given sizes as neighbours that are unpacked together."""
    units, taken = [], UNIT_BYTES
    for group, size in enumerate(sizes):
        taken += size
        if taken > UNIT_BYTES:
            units.append(range(group, group + 1))
            taken = size
        else:
            units[-1] = range(units[-1].start, group + 1)
    return units


def _key(version: str, unit: range) -> str:
    """Return the key, in the cache, of row groups of a version of a file, as this release unpacks them.

    It holds the system's start: what is written is not synchronised with the disk, and may be in pieces after a power cut.
    """
    words = (version, unit.start, unit.stop, parquet_rows.FORMAT, pa.__version__, _system_start())
    return hashlib.sha256("\n".join(map(str, words)).encode()).hexdigest()[:40]


def _warn_of_evictions(url: str) -> None:
    """Log, once in this process, that what a file was unpacked to has not stayed in the cache."""
    if _warned.is_set():
        return
    _warned.set()
    remedy = "raise --cache-gib, so that it holds the shards that are read side by side, or lower shuffle_shards"
    log.warning("unpacking Parquet again, which the cache had no room to keep %s", pairs(shard=url, remedy=remedy))


@functools.cache
def _system_start() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def _cut_short(blob: Blob) -> Rejected | None:
    size, end = blob.size, blob.pread(max(0, blob.size - len(_MAGIC)), len(_MAGIC))
    if end == _MAGIC and size >= 3 * len(_MAGIC):
        return None
    return Rejected(name="", reason=Reason.ARCHIVE_TRUNCATED, detail=f"the file of {size} bytes does not end with a footer")


def _damage_or_raise(url: str, error: OSError) -> Rejected:
    """Return the rejection for a damaged footer, or raise DatasetError for an error of the system.

    Arrow raises an OSError without errno for a footer that does not parse; errors of the system have one.
    """
    if error.errno is not None:
        raise unreadable_error(url, error) from error
    return Rejected(name="", reason=Reason.ARCHIVE_CORRUPT, detail=f"the footer is damaged: {error}")


def _no_files(name: Any) -> bytes:
    raise BadSampleError(Reason.SCHEMA_ERROR, f"expected a medium as {{bytes, path}} or bytes, got the string {name!r}")
