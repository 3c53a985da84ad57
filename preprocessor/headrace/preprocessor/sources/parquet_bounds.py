"""What a row group takes in memory, foreseen from its metadata: a page of a kilobyte can stand for gigabytes.

In a column with a dictionary a value of 100 kB that 200,000 rows share is written once, and decoded 200,000 times. Such a
column is read with its dictionary instead, so that it takes about what it takes in the file, and a row is measured before it
is spread out.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.preprocessor.sources.blob import Blob
from headrace.quarantine import BadSampleError, Reason

MAX_BYTES = 4 * 2**30
USUAL_BYTES = 512 * 2**20
"""Any row group may take so much."""
MAX_RATIO = 32
"""Decoded bytes of one in the file; text is packed to a tenth."""
_SPREAD = 4  # times its encoded size, up to which a column with a dictionary is read plain: to look values up costs time
_LEVEL_BYTES = 8  # of a value, beside it: whether it is there, at what depth of nesting
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_DICTIONARIES = frozenset(("PLAIN_DICTIONARY", "RLE_DICTIONARY"))
_HEADER_BYTES = 64  # more than the first two numbers of a page's header have


def shared_columns(file: Any, group: int, blob: Blob) -> list[str]:
    """Columns of a row group that are to be read with their dictionaries, by their paths. `file`: a pyarrow ParquetFile.

    Raises BadSampleError (too_large) where the group would take out of proportion all the same.
    """
    metadata = file.metadata.row_group(group)
    columns = [(metadata.column(index), file.schema.column(index)) for index in range(metadata.num_columns)]
    packed = min(blob.size, sum(max(0, column.total_compressed_size) for column, _ in columns))
    limit = min(MAX_BYTES, max(USUAL_BYTES, MAX_RATIO * packed))
    taken = sum(_plain_bytes(column, schema) for column, schema in columns)
    if taken > limit:
        raise BadSampleError(Reason.TOO_LARGE, f"row group {group} takes {taken} bytes in memory, more than {limit}")
    return [column.path_in_schema for column, _ in columns if _is_spread(column, blob)]


def spread_bytes(column: pa.Array) -> int:
    """What the values of an array take that is plain, or has dictionaries somewhere inside."""
    if isinstance(column, pa.DictionaryArray):
        lengths = pc.binary_length(column.dictionary).cast(pa.int64())
        return int(pc.sum(lengths.take(column.indices)).as_py() or 0)
    if pa.types.is_struct(column.type):
        return sum(map(spread_bytes, column.flatten()))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return spread_bytes(column.flatten())
    return int(column.nbytes)


def _plain_bytes(column: Any, schema: Any) -> int:
    """What a column takes, its values not spread out of a dictionary."""
    width = schema.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS.get(column.physical_type, 0)
    return int(column.num_values * (width + _LEVEL_BYTES) + max(0, column.total_uncompressed_size))


def _is_spread(column: Any, blob: Blob) -> bool:
    if column.physical_type != "BYTE_ARRAY" or _DICTIONARIES.isdisjoint(column.encodings):
        return False
    usual = max(USUAL_BYTES, _SPREAD * column.total_uncompressed_size)
    return bool(column.num_values * _dictionary_bytes(column, blob) > usual)


def _dictionary_bytes(column: Any, blob: Blob) -> int:
    """No value of the column's dictionary is longer: the size of the page that it is in."""
    header = blob.pread(column.dictionary_page_offset, _HEADER_BYTES) if column.has_dictionary_page else b""
    # Thrift's compact protocol: fields 1 (the kind of page) and 2 (its bytes, not compressed), both of type 5, i32.
    if header[:1] != b"\x15":
        return int(column.total_uncompressed_size)
    _, position = _varint(header, 1)
    if header[position : position + 1] != b"\x15":
        return int(column.total_uncompressed_size)
    return _varint(header, position + 1)[0] >> 1  # zigzag; none is negative


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the position behind it."""
    number = shift = 0
    for byte in data[position : position + 5]:
        number |= (byte & 0x7F) << shift
        shift += 7
        position += 1
        if byte < 0x80:
            break
    return number, position
