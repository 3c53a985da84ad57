"""Decoding of the leaves of LitData's rows, from their bytes to what a record holds.

Media stay encoded, and PIL images become uncompressed PNG or TIFF. Arrays and tensors become nested lists. What LitData would
unpickle, and what a serializer of one's own wrote, stays the bytes that it is, which nothing takes without being told: a pickle
is a program, and is never run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.preprocessor.sources.mds_columns import array_lists, decoder
from headrace.quarantine import BadSampleError, Reason

_TORCH = {
    **dict.fromkeys((0, 1), "<f4"), **dict.fromkeys((2, 3), "<f8"), **dict.fromkeys((8, 9), "<f2"), 11: "<u1", 12: "<i1",
    **dict.fromkeys((13, 14), "<i2"), **dict.fromkeys((15, 16), "<i4"), **dict.fromkeys((17, 18), "<i8"), 19: "?", 20: "<u2",
}  # fmt: skip
_NUMPY = {
    **dict(enumerate(("<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"))),
    13: "?",
}
"""Types of values by the numbers that LitData gives them."""
_CELLS = {0x10: 11, 0x11: 7, 0x12: 8, 0x13: 9, 0x14: 10}
"""Tags of cells of records, and the tags of the same values elsewhere."""
_OLD_JSON = 0x20
_MAX_DEPTH = 64
_MOST_OF_A_HEAD = 2**16  # no array has as many sides, and no type such a number


def decoded(form: str, data: bytes) -> Any:
    """Return the value of a leaf that is stored in a form, such as `str` or `no_header_tensor:15`. Raises BadSampleError."""
    name, _, kind = form.partition(":")
    try:
        return _decode(name, kind, data)
    except UnicodeDecodeError as err:
        raise BadSampleError(Reason.ENCODING_ERROR, f"a leaf is not UTF-8: {err.reason} at byte {err.start}") from err
    except (ValueError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as err:
        raise BadSampleError(Reason.SCHEMA_ERROR, f"a leaf is no value of {form}: {err}") from err


def _decode(name: str, kind: str, data: bytes) -> Any:
    match name:
        case "str" | "text":
            return data.decode()
        case "int" | "float":
            return struct.unpack("<q" if name == "int" else "<d", data)[0]
        case "bool":
            return data != b"\0"
        case "json":
            return json.loads(data) if data[:1] > bytes([_OLD_JSON]) else _Nested(data).value(0)
        case "tensor" | "numpy":
            order = "<" if max(struct.unpack_from("<II", data)) < _MOST_OF_A_HEAD else ">"  # of tensors, newer releases turn it
            number, num_sides = struct.unpack_from(f"{order}II", data)
            start = 8 + 4 * num_sides
            shape = struct.unpack_from(f"{order}{num_sides}I", data, 8)
            return _array(_TORCH if name == "tensor" else _NUMPY, number, data[start:], shape)
        case "no_header_tensor" | "no_header_numpy":
            return _array(_TORCH if name == "no_header_tensor" else _NUMPY, int(kind), data, None)
        case "pil" | "jpeg_array":
            decode = decoder(name)
            assert decode is not None, "both are encodings of MDS, too"
            return decode(data)
    return data


def _array(types: Mapping[int, str], number: int, data: bytes, shape: tuple[int, ...] | None) -> list[Any]:
    if number not in types:
        raise ValueError(f"values of the type {number} are not read")
    values = np.frombuffer(data, types[number])
    return array_lists(values, (len(values),) if shape is None else shape)


class _Nested:
    """A reader of LitData's compact form of lists and objects: a tag, a number of items, the items.

    Its methods raise ValueError, IndexError or struct.error where the data are damaged.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def value(self, depth: int) -> Any:
        """Read the next value."""
        tag = self._byte()
        if depth > _MAX_DEPTH:
            raise ValueError(f"values are nested more than {_MAX_DEPTH} deep")
        match tag:
            case 0:  # what has no form of its own
                return json.loads(self._bytes(self._number()))
            case 1:
                return [self._text() for _ in self._items(4)]
            case 2 | 3:
                return np.frombuffer(self._bytes(8 * self._number()), "<i8" if tag == 2 else "<f8").tolist()
            case 4:
                return [byte != 0 for byte in self._bytes(self._number())]
            case 5:
                return {self._text(): self.value(depth + 1) for _ in self._items(5)}
            case 6:  # a list of objects with the same keys, which are there once
                num_rows, num_keys = self._number(), self._number()
                self._check(max(num_rows, 4 * num_keys))
                keys = [self._text() for _ in range(num_keys)]
                return [{key: self._scalar(_CELLS[self._byte()]) for key in keys} for _ in range(num_rows)]
        return self._scalar(tag)

    def _scalar(self, tag: int) -> Any:
        match tag:
            case 7:
                return self._text()
            case 8:
                return struct.unpack("<q", self._bytes(8))[0]
            case 9:
                return struct.unpack("<d", self._bytes(8))[0]
            case 10:
                return self._byte() != 0
            case 11:
                return None
        raise ValueError(f"no value has the tag {tag}")

    def _items(self, least_bytes: int) -> range:
        count = self._number()
        self._check(count * least_bytes)
        return range(count)

    def _check(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError(f"{size} bytes are needed, and {len(self._data) - self._at} are there")

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _number(self) -> int:
        number: int = struct.unpack("<I", self._bytes(4))[0]
        return number

    def _text(self) -> str:
        return self._bytes(self._number()).decode()

    def _bytes(self, size: int) -> bytes:
        self._check(size)
        self._at += size
        return self._data[self._at - size : self._at]
