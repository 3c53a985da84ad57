"""Parquet files with the columns of Hugging Face data sets: media as `{bytes, path}` structs or lists of them.

Row groups are decoded whole and kept in one bounded cache of the process, so that reads in any order within a few row
groups decode each group once. Rows have no key of their own: the key is the row number.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate, count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.base import MAX_MEDIUM_BYTES, Shard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, BlobReader, local_path, open_blob, unreadable_error
from headrace.preprocessor.sources.parquet_bounds import dictionary_columns, expanded_bytes
from headrace.quarantine import BadSampleError, Reason, Rejected

CACHE_BYTES = 512 * 2**20
_MAGIC = b"PAR1"


class RowGroupCache:
    """A cache of decoded row groups within `max_bytes`, except that the newest stays even if it alone exceeds them.

    The least recently used row groups are dropped first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()

    def get(self, key: tuple[int, int], decode: Callable[[], pa.Table]) -> pa.Table:
        """Return the table of `key`, a (shard, row group), calling `decode` if it is not cached.

        No thread waits for another's decoding, so that two may decode the same row group.
        """
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        table = decode()
        with self._lock:
            self._tables[key] = table
            while len(self._tables) > 1 and sum(kept.nbytes for kept in self._tables.values()) > self._max_bytes:
                self._tables.popitem(last=False)
        return table

    def drop(self, shard: int) -> None:
        """Remove the row groups of a shard, for example once it is closed."""
        with self._lock:
            for key in [key for key in self._tables if key[0] == shard]:
                del self._tables[key]


_CACHE = RowGroupCache(CACHE_BYTES)
_SERIALS = count()


class ParquetShard(Shard):
    """A shard that is one Parquet file, decoded by row group."""

    def __init__(self, url: str, cache: BlobCache | None = None) -> None:
        self._url = url
        self._serial = next(_SERIALS)
        self._lock = threading.Lock()
        self._file: Any = None  # pq.ParquetFile; None where the file is damaged as a whole
        self.num_rows = 0
        self.rejected = ()
        self._blob = open_blob(url, cache)
        failure = _cut_short(self._blob)
        if failure is None:
            try:
                self._file = self._open()
            except pa.ArrowException as err:
                failure = Rejected(name="", reason=Reason.ARCHIVE_CORRUPT, detail=f"the footer is damaged: {err}")
            except OSError as err:
                failure = _damage_or_raise(url, err)
        if failure is not None:
            self.rejected = (failure,)
            return
        metadata = self._file.metadata
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self._starts = np.array(list(accumulate((group.num_rows for group in groups), initial=0)))
        self.num_rows = int(self._starts[-1])

    def key(self, row: int) -> str:
        """Return the row number as a string. Raises IndexError where there is no such row."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        return str(row)

    def read(self, row: int) -> Record:
        """Return the record at `row`, whose fields are its cells as Python values. Raises BadSampleError where it is damaged."""
        key = self.key(row)
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        table = _CACHE.get((self._serial, group), lambda: self._decode(group))
        cells = table.slice(row - int(self._starts[group]), 1)
        check_size("the row", sum(expanded_bytes(chunk) for column in cells.columns for chunk in column.chunks), MAX_MEDIUM_BYTES)
        try:
            fields = cells.to_pylist()[0]
        except UnicodeDecodeError as err:
            raise BadSampleError(Reason.ENCODING_ERROR, f"a string cell is not UTF-8: {err.reason}") from err
        return Record(key=key, fields=fields, load=_no_files)

    def close(self) -> None:
        """Close the file and free its decoded row groups."""
        _CACHE.drop(self._serial)
        if self._file is not None:
            self._file.close(force=True)
        self._blob.close()

    def _decode(self, group: int) -> pa.Table:
        as_dictionary = dictionary_columns(self._file, group, self._blob)
        try:
            if as_dictionary:
                with self._open(metadata=self._file.metadata, read_dictionary=as_dictionary) as file:
                    return file.read_row_group(group, use_threads=False)
            with self._lock:
                return self._file.read_row_group(group, use_threads=False)
        except (pa.ArrowException, OSError) as err:
            if isinstance(err, OSError) and err.errno is not None:
                raise unreadable_error(self._url, err) from err
            raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"row group {group} does not decode: {err}") from err

    def _open(self, **options: Any) -> Any:
        """Open the file as a pyarrow ParquetFile. Arrow reads local files by itself, without the GIL."""
        return pq.ParquetFile(local_path(self._url) or pa.PythonFile(BlobReader(self._blob), mode="r"), **options)


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
