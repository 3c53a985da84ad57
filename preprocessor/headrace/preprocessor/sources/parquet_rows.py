"""Row groups of a Parquet file unpacked into a file that gives a single row back by two short reads.

    an entry for each row group      where what was wrong with it stands: offset, bytes, 0
    an entry for each row            offset and bytes of its message, its place in there
    messages                         Arrow IPC record batches of about 128 KiB, or of one row; JSON for what was wrong

An entry takes 16 bytes, all numbers are little-endian. A row whose entry is empty is not in the file: its group is damaged, as
the group's entry says, or is to be decoded in memory. A row that is larger than a row may be has its size and no message.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from headrace.preprocessor.sources.base import MAX_MEDIUM_BYTES, check_size
from headrace.preprocessor.sources.blob import Blob
from headrace.preprocessor.sources.download import disk_errors
from headrace.quarantine import BadSampleError, Reason

FORMAT = 1
"""To be raised with every change of what is in the file, so that no other release's files are read."""
MESSAGE_BYTES = 128 << 10
_ENTRY = struct.Struct("<QII")
_MOST_BYTES = 2**32 - 1


class RowsWriter:
    """Writes such a file, group by group."""

    def __init__(self, file: io.FileIO, reserve: Callable[[int], None], num_groups: int, num_rows: int, num_bytes: int) -> None:
        """Reserve room for `num_rows` rows of `num_groups` groups, that are estimated to take `num_bytes`."""
        self._file = file
        self._reserve = reserve
        self._num_groups = num_groups
        self._end = _ENTRY.size * (num_groups + num_rows)
        self._reserved = self._end + num_bytes
        reserve(self._reserved)

    def add(self, rows: range, batches: Iterable[pa.RecordBatch], most_bytes: int) -> None:
        """Add a group, whose rows are `rows` of the file, or nothing of it where its messages take more than `most_bytes`.

        Raises what `batches` raises, and BadSampleError where they have more or fewer rows; then nothing is added either.
        """
        begin, row, complete = self._end, rows.start, False
        try:
            for batch in batches:
                if row + batch.num_rows > rows.stop:
                    raise _wrong_rows(rows)
                self._write(b"".join(map(self._add_message, _messages(batch))), _ENTRY.size * (self._num_groups + row))
                row += batch.num_rows
                if self._end - begin > most_bytes:
                    return
            if row != rows.stop:
                raise _wrong_rows(rows)
            complete = True
        finally:
            if not complete:
                self._end = begin
                self._write(bytes(_ENTRY.size * (row - rows.start)), _ENTRY.size * (self._num_groups + rows.start))

    def refuse(self, group: int, error: BadSampleError) -> None:
        """Write down why a group cannot be read."""
        data = json.dumps({"reason": error.reason, "detail": error.detail}).encode()
        self._write(_ENTRY.pack(self._append(data), len(data), 0), _ENTRY.size * group)

    def finish(self) -> None:
        """Give back the room that was not needed."""
        with disk_errors():
            self._file.truncate(self._end)

    def _add_message(self, rows: pa.RecordBatch) -> bytes:
        """Append rows and return their entries."""
        if rows.num_rows == 1 and rows.nbytes > MAX_MEDIUM_BYTES:
            return _ENTRY.pack(0, min(rows.nbytes, _MOST_BYTES), 0)
        message = rows.serialize()
        offset = self._append(message)
        return b"".join(_ENTRY.pack(offset, message.size, place) for place in range(rows.num_rows))

    def _append(self, data: bytes | pa.Buffer) -> int:
        offset, size = self._end, len(data)
        if offset + size > self._reserved:
            self._reserved = offset + size + self._end // 8
            self._reserve(self._reserved)
        self._write(data, offset)
        self._end += size
        return offset

    def _write(self, data: bytes | pa.Buffer, offset: int) -> None:
        view = memoryview(data)
        with disk_errors():
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written


def read_row(file: Blob, schema: pa.Schema, num_groups: int, group: int, row: int) -> pa.RecordBatch | None:
    """Return the row `row` of a file of `num_groups` groups as a batch of one; None where its group is not in the file.

    Raises BadSampleError where the group is damaged or the row too large.
    """
    offset, size, place = _ENTRY.unpack(file.pread(_ENTRY.size * (num_groups + row), _ENTRY.size))
    if offset:
        return pa.ipc.read_record_batch(pa.py_buffer(file.pread(offset, size)), schema).slice(place, 1)
    check_size("the row", size, MAX_MEDIUM_BYTES)
    offset, size, _ = _ENTRY.unpack(file.pread(_ENTRY.size * group, _ENTRY.size))
    if size:
        wrong = json.loads(file.pread(offset, size))
        raise BadSampleError(Reason(wrong["reason"]), wrong["detail"])
    return None


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return a type of the same values that a message holds by itself, and no more of than its rows: no dictionary, no view."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type), keys_sorted=kind.keys_sorted)
    return kind


def _wrong_rows(rows: range) -> BadSampleError:
    return BadSampleError(Reason.ARCHIVE_CORRUPT, f"the row group has not the {len(rows)} rows that the footer says")


def _messages(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows in parts of at most MESSAGE_BYTES, or of one row."""
    if rows.num_rows > 1 and rows.nbytes > MESSAGE_BYTES:
        half = rows.num_rows // 2
        yield from _messages(rows.slice(0, half))
        yield from _messages(rows.slice(half))
    elif rows.num_rows:
        yield rows
