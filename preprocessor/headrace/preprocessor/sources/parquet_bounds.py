"""Bounds on the memory that a row group takes, estimated before it is decoded: a page of a kilobyte can stand for gigabytes.

In a dictionary-encoded column a value of 100 kB that 200,000 rows share is written once and decoded 200,000 times. Such a
column is read as Arrow dictionary arrays instead, which take about as much memory as in the file, and the size of a row is
checked before its values are expanded.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.preprocessor.sources.blob import Blob
from headrace.preprocessor.sources.parquet_pages import dictionary_use, unpacked_page_bytes
from headrace.quarantine import BadSampleError, Reason

MAX_BYTES = 4 * 2**30
USUAL_BYTES = 512 * 2**20
"""Bytes of memory that any row group may take, however small it is in the file."""
MAX_RATIO = 32
"""Decoded bytes allowed per byte in the file; text is compressed to a tenth."""
STREAM_BYTES = 512 * 2**10
"""Bytes of rows that are decoded at a time, by their average: what stays in a core's cache."""
MOST_STREAM_BYTES = 512 * 2**20
"""Bytes that they might take at most, if every value from a dictionary were as long as the whole dictionary; a row may take as
many by itself."""
# Largest ratio of expanded to encoded size at which a column is still read plain, since looking values up costs time.
_MAX_EXPANSION = 4
_LEVEL_BYTES = 8  # of a value's definition and repetition levels
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_DICTIONARIES = frozenset(("PLAIN_DICTIONARY", "RLE_DICTIONARY"))
_MOST_ROWS = 8192


def rows_at_once(metadata: pq.FileMetaData, group: int, blob: Blob) -> int:
    """Return how many rows of a row group to decode at a time, so that they take about STREAM_BYTES and can be bounded.

    It is 0 where a single row might take far more than its share, as its lists may refer many times to a long value of a
    dictionary: such a row group is decoded as a whole, with its dictionaries.
    """
    columns = _columns(metadata, group)
    row_bytes = sum(_plain_bytes(column, schema) for column, schema in columns) // max(1, metadata.row_group(group).num_rows)
    rows = min(_MOST_ROWS, int(STREAM_BYTES // max(1, row_bytes)))
    for column, schema in columns:
        if not _is_expanded_too_much(column, blob):
            continue
        if schema.max_repetition_level == 0:
            rows = min(rows, MOST_STREAM_BYTES // _dictionary_bytes(column, blob))
        elif (use := dictionary_use(column, blob)) is None or use.expanded_bytes > _usual_bytes(column):
            return 0
    return max(1, rows)


def dictionary_columns(metadata: pq.FileMetaData, group: int, blob: Blob) -> list[str]:
    """Return the paths of the columns in a row group to read as dictionary arrays, where the group is decoded as a whole.

    Raises BadSampleError (too_large) where the row group would take too much memory even so.
    """
    columns = _columns(metadata, group)
    packed = min(blob.size, sum(max(0, column.total_compressed_size) for column, _ in columns))
    limit = min(MAX_BYTES, max(USUAL_BYTES, MAX_RATIO * packed))
    taken = sum(_plain_bytes(column, schema) for column, schema in columns)
    if taken > limit:
        raise BadSampleError(Reason.TOO_LARGE, f"row group {group} takes {taken} bytes in memory, more than {limit}")
    return [column.path_in_schema for column, _ in columns if _is_expanded_too_much(column, blob)]


def most_unpacked_bytes(metadata: pq.FileMetaData, group: int) -> int:
    """Return the bytes that a row group may be unpacked to before its values are thought of as expanded."""
    return max(USUAL_BYTES, _MAX_EXPANSION * sum(int(column.total_uncompressed_size) for column, _ in _columns(metadata, group)))


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


def _columns(metadata: pq.FileMetaData, group: int) -> list[tuple[Any, Any]]:
    """Return pyarrow's metadata of each column chunk in a row group, with the column's schema."""
    row_group = metadata.row_group(group)
    return [(row_group.column(index), metadata.schema.column(index)) for index in range(row_group.num_columns)]


def _plain_bytes(column: Any, schema: Any) -> int:
    """Estimate the bytes of memory that a column takes with its dictionary not expanded."""
    width = schema.length if column.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS.get(column.physical_type, 0)
    return int(column.num_values * (width + _LEVEL_BYTES) + max(0, column.total_uncompressed_size))


def _is_expanded_too_much(column: Any, blob: Blob) -> bool:
    if column.physical_type != "BYTE_ARRAY" or _DICTIONARIES.isdisjoint(column.encodings):
        return False
    return bool(column.num_values * _dictionary_bytes(column, blob) > _usual_bytes(column))


def _usual_bytes(column: Any) -> int:
    """Return the bytes that a column's values may take in all before they are thought of as expanded."""
    return max(USUAL_BYTES, _MAX_EXPANSION * int(column.total_uncompressed_size))


def _dictionary_bytes(column: Any, blob: Blob) -> int:
    """Return an upper bound on the bytes of a value in the column's dictionary: the unpacked size of the dictionary's page.

    Where the page's header cannot be read it is the unpacked size of the column.
    """
    size = unpacked_page_bytes(blob, column.dictionary_page_offset) if column.has_dictionary_page else None
    return int(column.total_uncompressed_size) if size is None else size
