"""The headers of a Parquet column's pages: how many values come from its dictionary, and how long the longest of these is.

pyarrow reads pages but does not tell what is in them. Headers are in Thrift's compact protocol, of which a page's header has
booleans, integers, binaries and structures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.preprocessor.sources.blob import Blob

MOST_PAGES = 100_000
"""Pages of a column chunk that are looked at; writers make pages of about 1 MiB."""
MOST_VALUES = 1_000_000
"""Values of a dictionary that are looked at; writers end a dictionary at about 1 MiB."""
_HEADER_BYTES = (256, 64 << 10)  # read first, and where that is too short: a header may hold two values as statistics
_MOST_DEPTH = 8
_DICTIONARY_PAGE = 2
_DATA_PAGES = {0: (5, 2), 3: (8, 4)}  # kind -> the field of the header that describes the page, and in it that of the encoding
_DICTIONARY_ENCODINGS = frozenset((2, 8))  # PLAIN_DICTIONARY, RLE_DICTIONARY
_LENGTH_BYTES = 4
_CODECS = {"LZ4": "lz4_raw"}  # where Arrow's name is not Parquet's in small letters


@dataclass(frozen=True, slots=True, kw_only=True)
class DictionaryUse:
    """What a column of byte strings takes from its dictionary."""

    values: int
    """Values, over all rows, that are references into the dictionary."""
    longest_bytes: int
    """Length of the dictionary's longest value."""

    @property
    def expanded_bytes(self) -> int:
        """Upper bound on the bytes of these values once they are looked up."""
        return self.values * self.longest_bytes


def dictionary_use(column: Any, blob: Blob) -> DictionaryUse | None:
    """Return how a column chunk, given as pyarrow's metadata of it, uses its dictionary; None where its pages do not parse."""
    at = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    end, values, longest = at + column.total_compressed_size, 0, 0
    try:
        for _ in range(MOST_PAGES):
            if at >= end:
                return DictionaryUse(values=values, longest_bytes=longest)
            header, at = _header(blob, at)
            kind, unpacked_bytes, packed_bytes = header[1], header[2], header[3]
            if not 0 <= packed_bytes <= end - at or not 0 <= unpacked_bytes <= column.total_uncompressed_size:
                break
            if kind == _DICTIONARY_PAGE:
                page = _unpacked(blob.pread(at, packed_bytes), unpacked_bytes, column.compression)
                longest = max(longest, _longest_value(page, header[7][1]))
            elif kind in _DATA_PAGES:
                field, encoding = _DATA_PAGES[kind]
                values += header[field][1] if header[field][encoding] in _DICTIONARY_ENCODINGS else 0
            at += packed_bytes
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, pa.ArrowException):
        pass
    return None


def unpacked_page_bytes(blob: Blob, at: int) -> int | None:
    """Return the unpacked size of the page whose header is at `at`; None where it is no header."""
    try:
        size = _header(blob, at)[0][2]
    except (IndexError, KeyError, ValueError):
        return None
    return size if isinstance(size, int) and size >= 0 else None


def _header(blob: Blob, at: int) -> tuple[dict[int, Any], int]:
    """Return the fields of the page header at `at` by number, and the position behind it. Raises IndexError or ValueError."""
    for size in _HEADER_BYTES:
        try:
            fields, length = _structure(blob.pread(at, size), 0, _MOST_DEPTH)
            return fields, at + length
        except IndexError:
            if size == _HEADER_BYTES[-1]:
                raise
    raise AssertionError("the last size raises or returns")


def _structure(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    if not depth:
        raise ValueError("structures inside of structures")
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        fields[number], at = _value(data, at, head & 0x0F, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):
        return kind == 1, at
    if kind in (4, 5, 6):
        return _integer(data, at)
    if kind == 8:
        length, at = _varint(data, at)
        if at + length > len(data):
            raise IndexError("the data end inside of a binary")
        return data[at : at + length], at + length
    if kind == 12:
        return _structure(data, at, depth - 1)
    raise ValueError(f"a page's header has no field of type {kind}")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    number, at = _varint(data, at)
    return (number >> 1) ^ -(number & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode the varint at `at` (seven bits a byte); return it and the position behind it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise ValueError("a number of more than 64 bits")


def _unpacked(packed: bytes, size: int, compression: str) -> memoryview:
    if compression == "UNCOMPRESSED":
        return memoryview(packed)
    return memoryview(pa.decompress(packed, decompressed_size=size, codec=_CODECS.get(compression, compression.lower())))


def _longest_value(page: memoryview, num_values: int) -> int:
    """Return the length of the longest of a dictionary's values, which stand behind their lengths."""
    if num_values > MOST_VALUES:
        raise ValueError(f"a dictionary of {num_values} values")
    longest = at = 0
    for _ in range(num_values):
        length = int.from_bytes(page[at : at + _LENGTH_BYTES], "little")
        longest = max(longest, length)
        at += _LENGTH_BYTES + length
    return longest
