"""Bounds on the memory that a row group takes, estimated before it is decoded: a page of a kilobyte can stand for gigabytes.

In a dictionary-encoded column a value of 100 kB that 200,000 rows share is written once and decoded 200,000 times. Such a
column is read as Arrow dictionary arrays instead, which take about as much memory as in the file, and the size of a row is
checked before its values are expanded.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.preprocessor.sources.blob import Blob
from headrace.quarantine import BadSampleError, Reason

MAX_BYTES = 4 * 2**30
USUAL_BYTES = 512 * 2**20
"""Bytes of memory that any row group may take, however small it is in the file."""
MAX_RATIO = 32
"""Decoded bytes allowed per byte in the file; text is compressed to a tenth."""
# Largest ratio of expanded to encoded size at which a column is still read plain, since looking values up costs time.
_MAX_EXPANSION = 4
_LEVEL_BYTES = 8  # of a value's definition and repetition levels
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_DICTIONARIES = frozenset(("PLAIN_DICTIONARY", "RLE_DICTIONARY"))
_HEADER_BYTES = 64  # more than the first two fields of a page's header take


def dictionary_columns(file: Any, group: int, blob: Blob) -> list[str]:
    """Return the paths of the columns in a row group to read as dictionary arrays. `file` is a pyarrow ParquetFile.

    Raises BadSampleError (too_large) where the row group would take too much memory even so.
    """
    metadata = file.metadata.row_group(group)
    columns = [(metadata.column(index), file.schema.column(index)) for index in range(metadata.num_columns)]
    packed = min(blob.size, sum(max(0, column.total_compressed_size) for column, _ in columns))
    limit = min(MAX_BYTES, max(USUAL_BYTES, MAX_RATIO * packed))
    taken = sum(_plain_bytes(column, schema) for column, schema in columns)
    if taken > limit:
        raise BadSampleError(Reason.TOO_LARGE, f"row group {group} takes {taken} bytes in memory, more than {limit}")
    return [column.path_in_schema for column, _ in columns if _is_expanded_too_much(column, blob)]


def expanded_bytes(column: pa.Array) -> int:
    """Return the bytes that an array's values take once dictionaries in it, at any depth, are expanded."""
    if isinstance(column, pa.DictionaryArray):
        lengths = pc.binary_length(column.dictionary).cast(pa.int64())
        return int(pc.sum(lengths.take(column.indices)).as_py() or 0)
    if pa.types.is_struct(column.type):
        return sum(map(expanded_bytes, column.flatten()))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return expanded_bytes(column.flatten())
    return int(column.nbytes)


def _plain_bytes(column: Any, schema: Any) -> int:
    """Estimate the bytes of memory that a column takes with its dictionary not expanded."""
    width = schema.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS.get(column.physical_type, 0)
    return int(column.num_values * (width + _LEVEL_BYTES) + max(0, column.total_uncompressed_size))


def _is_expanded_too_much(column: Any, blob: Blob) -> bool:
    if column.physical_type != "BYTE_ARRAY" or _DICTIONARIES.isdisjoint(column.encodings):
        return False
    usual = max(USUAL_BYTES, _MAX_EXPANSION * column.total_uncompressed_size)
    return bool(column.num_values * _dictionary_bytes(column, blob) > usual)


def _dictionary_bytes(column: Any, blob: Blob) -> int:
    """Return an upper bound on the bytes of a value in the column's dictionary: the unpacked size of the dictionary's page.

    Where the page's header cannot be read it is the unpacked size of the column.
    """
    header = blob.pread(column.dictionary_page_offset, _HEADER_BYTES) if column.has_dictionary_page else b""
    # Thrift's compact protocol: fields 1 (the kind of page) and 2 (its bytes, not compressed), both of type 5, i32.
    if header[:1] != b"\x15":
        return int(column.total_uncompressed_size)
    _, position = _varint(header, 1)
    if header[position : position + 1] != b"\x15":
        return int(column.total_uncompressed_size)
    return _varint(header, position + 1)[0] >> 1  # zigzag; none is negative


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Decode the varint at `position` (seven bits a byte); return it and the position behind it."""
    number = shift = 0
    for byte in data[position : position + 5]:
        number |= (byte & 0x7F) << shift
        shift += 7
        position += 1
        if byte < 0x80:
            break
    return number, position
