"""Arrow files as `save_to_disk` of Hugging Face datasets writes them: a stream of record batches.

    schema message | message of a record batch, its buffers | ... | end
    message: ff ff ff ff | size of the metadata, 32 bits | metadata, a flatbuffer | the body, of a size that the metadata tell

The messages are walked when the file is opened. To read a row, the bytes of its batch are mapped into memory, of which only the
pages with the row are read; files that are not on a local disk are read by the whole batch. The file format (ARROW1), which
pandas calls Feather, is the stream between two marks, and is read too. So are batches with packed buffers, if they are small: to
read a row, all of its batch is unpacked. Formats: Arrow Columnar Format, "IPC Streaming Format"; FlatBuffers, "Internals".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.base import MAX_MEDIUM_BYTES, NumberedShard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, open_blob
from headrace.quarantine import BadSampleError, Reason, Rejected

_FILE_MAGIC, _OLD_MAGIC = b"ARROW1", b"FEA1"
_MESSAGE = struct.Struct("<Ii")
_CONTINUES = 0xFFFFFFFF
_MAX_METADATA = 64 * 2**20
_SCHEMA, _BATCH = 1, 3  # kinds of messages
_MAX_ROWS = 2**31 - 1
_MAX_MAPPED = 8 * 2**30
_MAX_UNPACKED = 32 * 2**20  # one packed batch is kept by each open shard
_BUFFER = struct.Struct("<qq")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    offset: int
    size: int
    """Bytes of the message with its body."""
    rows: int
    packed: bool


class ArrowShard(NumberedShard):
    """A shard that is one Arrow stream, with a row for each row of its record batches."""

    def __init__(self, url: str, cache: BlobCache | None = None, blob: Blob | None = None) -> None:
        """`blob`: is read in place of the file at `url`."""
        self._blob = blob or open_blob(url, cache)
        self._batches: list[_Batch] = []
        self._schema: Any = None
        self._sound: set[int] = set()
        self._unpacked: tuple[int, Any] | None = None
        self.rejected = ()
        try:
            for message in _messages(self._blob):
                if isinstance(message, _Batch):
                    self._batches.append(message)
                elif self._schema is None:
                    self._schema = message
            if self._schema is None:
                raise _corrupt("there is no schema")
        except BadSampleError as err:
            self.rejected = (Rejected(name="", reason=err.reason, detail=err.detail),)
        if self._schema is None:
            self._batches = []
        self._starts = np.array(list(accumulate((batch.rows for batch in self._batches), initial=0)))
        self.num_rows = int(self._starts[-1])

    def read(self, row: int) -> Record:
        """Return the record at `row`, whose fields are its cells as Python values. Raises BadSampleError where it is damaged."""
        key = self.key(row)
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        cells = self._cells(number).slice(row - int(self._starts[number]), 1)
        check_size("the row", cells.nbytes, MAX_MEDIUM_BYTES)
        try:
            return Record(key=key, fields=cells.to_pylist()[0], load=_no_files)
        except (ValueError, OverflowError, pa.ArrowException) as err:  # a date out of Python's range
            raise BadSampleError(Reason.SCHEMA_ERROR, f"a cell has no value in Python: {err}") from err

    def close(self) -> None:
        """Close the file."""
        self._blob.close()

    def _cells(self, number: int) -> Any:
        """Return a record batch. The last one that was packed is kept."""
        if not self._batches[number].packed:
            return self._batch(number)
        kept = self._unpacked
        if kept is None or kept[0] != number:
            self._unpacked = kept = number, self._batch(number)
        return kept[1]

    def _batch(self, number: int) -> Any:
        """Return a record batch over mapped memory. Its offsets are checked once, as a wrong one would lead out of the memory."""
        batch = self._batches[number]
        data = self._blob.view(batch.offset, batch.size)
        if len(data) < batch.size:
            raise BadSampleError(Reason.ARCHIVE_TRUNCATED, f"{len(data)} of the {batch.size} bytes of batch {number} are there")
        try:
            cells = pa.ipc.read_record_batch(pa.py_buffer(data), self._schema)
            if number not in self._sound:
                cells.validate(full=True)
                self._sound.add(number)
        except (pa.ArrowException, OSError, ValueError) as err:
            raise _corrupt(f"batch {number} does not decode: {err}") from err
        if cells.num_rows != batch.rows:
            raise _corrupt(f"batch {number} has {cells.num_rows} rows, not {batch.rows}")
        return cells


def _messages(blob: Blob) -> Iterator[pa.Schema | _Batch]:
    """Yield the schema and the batches of a stream. Raises BadSampleError behind the last sound message of a damaged one."""
    magic = blob.pread(0, len(_FILE_MAGIC))
    if magic.startswith(_OLD_MAGIC):
        raise _corrupt("it is Feather of version 1, which is not Arrow: write it again with pandas, or as Parquet")
    offset = 8 if magic == _FILE_MAGIC else 0
    while offset < blob.size:
        head = blob.pread(offset, _MESSAGE.size)
        if len(head) < _MESSAGE.size:
            raise _truncated(blob, offset)
        marker, size = _MESSAGE.unpack(head)
        if marker == _CONTINUES and size == 0:
            return
        if marker != _CONTINUES or not 0 < size <= _MAX_METADATA:
            raise _corrupt(f"no message begins at byte {offset}")
        metadata = blob.pread(offset + len(head), size)
        if len(metadata) < size:
            raise _truncated(blob, offset)
        kind, body, rows, packed = _parsed(metadata, offset)
        if packed:
            _check_packed(blob, metadata, offset + len(head) + size)
        whole = _MESSAGE.size + size + body
        if offset + whole > blob.size:
            raise _truncated(blob, offset)
        if kind == _SCHEMA:
            yield _schema(head + metadata, offset)
        elif kind == _BATCH:
            yield _Batch(offset=offset, size=whole, rows=rows, packed=packed)
        else:
            raise _corrupt(f"the message at byte {offset} is of kind {kind}; columns with dictionaries are not read")
        offset += whole
    raise _truncated(blob, offset)


def _parsed(metadata: bytes, offset: int) -> tuple[int, int, int, bool]:
    """Return the kind of a message, the bytes of its body and, for a record batch, its rows and whether its buffers are packed.

    Raises BadSampleError.
    """
    try:
        message = _Table(metadata, struct.unpack_from("<I", metadata)[0])
        kind, body = message.scalar(1, "<B"), message.scalar(3, "<q")
        header = message.table(2)
        rows = header.scalar(0, "<q") if kind == _BATCH else 0
        packed = kind == _BATCH and header.place(3) is not None
    except (struct.error, RecursionError) as err:
        raise _corrupt(f"the message at byte {offset} is damaged: {err}") from err
    if not 0 <= body <= _MAX_MAPPED or not 0 <= rows <= _MAX_ROWS:
        raise _corrupt(f"the message at byte {offset} says that it has {body} bytes and {rows} rows")
    return kind, body, rows, packed


def _check_packed(blob: Blob, metadata: bytes, body: int) -> None:
    """Raise BadSampleError if the buffers of a record batch become too large: each begins with its size, unpacked.

    `body`: where the batch's buffers begin. A row of a packed batch is read by unpacking all of the batch.
    """
    try:
        batch = _Table(metadata, struct.unpack_from("<I", metadata)[0]).table(2)
        buffers = batch.vector(2, _BUFFER)
    except (struct.error, RecursionError) as err:
        raise _corrupt(f"the buffers of the batch at byte {body} are damaged: {err}") from err
    sizes = [int.from_bytes(blob.pread(body + offset, 8), "little", signed=True) for offset, size in buffers if size >= 8]
    total = sum(size if size >= 0 else 0 for size in sizes)
    if total > _MAX_UNPACKED:
        raise _corrupt(
            f"a record batch has {total} bytes unpacked, and at most {_MAX_UNPACKED} are unpacked for a row: write it without "
            "compression, in smaller batches, or as Parquet"
        )


class _Table:
    """A table of a flatbuffer. Its methods raise struct.error where it leads outside of the data."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position
        self._fields = position - self._at("<i", position)

    def place(self, field: int) -> int | None:
        """Return where the value of a field is; None where the table has no such field."""
        if 4 + 2 * field >= self._at("<H", self._fields):
            return None
        distance = self._at("<H", self._fields + 4 + 2 * field)
        return self._position + distance if distance else None

    def scalar(self, field: int, form: str) -> int:
        """Return the number in a field, in the form of `struct`; 0 where it is not there."""
        place = self.place(field)
        return 0 if place is None else self._at(form, place)

    def table(self, field: int) -> _Table:
        """Return the table that a field points at."""
        place = self.place(field)
        if place is None:
            raise struct.error(f"field {field} is missing")
        return _Table(self._data, place + self._at("<I", place))

    def vector(self, field: int, form: struct.Struct) -> list[tuple[Any, ...]]:
        """Return the structs in the vector that a field points at."""
        place = self.place(field)
        if place is None:
            return []
        start = place + self._at("<I", place)
        end = start + 4 + form.size * self._at("<I", start)
        if end > len(self._data):
            raise struct.error(f"a vector ends at byte {end}")
        return list(form.iter_unpack(self._data[start + 4 : end]))

    def _at(self, form: str, position: int) -> int:
        if position < 0:
            raise struct.error(f"it leads to byte {position}")
        number: int = struct.unpack_from(form, self._data, position)[0]
        return number


def _schema(message: bytes, offset: int) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(message))
    except (pa.ArrowException, OSError, ValueError) as err:
        raise _corrupt(f"the schema at byte {offset} is damaged: {err}") from err


def _corrupt(detail: str) -> BadSampleError:
    return BadSampleError(Reason.ARCHIVE_CORRUPT, detail)


def _truncated(blob: Blob, offset: int) -> BadSampleError:
    return BadSampleError(Reason.ARCHIVE_TRUNCATED, f"the file of {blob.size} bytes ends inside of the message at byte {offset}")


def _no_files(name: Any) -> bytes:
    raise BadSampleError(Reason.SCHEMA_ERROR, f"expected a medium as {{bytes, path}} or bytes, got the string {name!r}")
