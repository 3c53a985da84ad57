"""Decoding of the values of MDS columns, from their bytes to what a record holds.

Pictures stay encoded: `jpeg` and `png` as they are, and `pil` (width, height, mode, pixels) as an uncompressed PNG or TIFF.
Arrays become nested lists. `pkl` stays the bytes that it is, which nothing takes: a pickle is a program, and is never run.
"""

from __future__ import annotations

import io
import json
import math
import operator
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.preprocessor.sources.base import MAX_MEDIUM_BYTES, check_size
from headrace.quarantine import BadSampleError, Reason

Decode = Callable[[bytes], Any]

_MAX_PIL_PIXELS = 2**28
_LIST_BYTES, _POINTER_BYTES, _NUMBER_BYTES = 64, 8, 32  # in memory; small integers are shared objects
_SHAPE_TYPES = ("<u1", "<u2", "<u4", "<u8")
_VALUE_TYPES = {
    "uint8": (8, "<u1"),
    "int8": (9, "<i1"),
    "uint16": (16, "<u2"),
    "int16": (17, "<i2"),
    "float16": (18, "<f2"),
    "uint32": (32, "<u4"),
    "int32": (33, "<i4"),
    "float32": (34, "<f4"),
    "uint64": (64, "<u8"),
    "int64": (65, "<i8"),
    "float64": (66, "<f8"),
}
_TYPE_OF_CODE = dict(_VALUE_TYPES.values())


def decoder(encoding: str) -> Decode | None:
    """Return the function that decodes values of an encoding; None for an unknown encoding.

    The function raises ValueError (such as UnicodeDecodeError), IndexError or BadSampleError for damaged values.
    """
    name, colon, arguments = encoding.partition(":")
    if name == "ndarray":
        return _array_decoder(arguments)
    if colon:
        return None
    if name in _VALUE_TYPES:
        return partial(_scalar, _VALUE_TYPES[name][1])
    return _DECODERS.get(name)


def _scalar(kind: str, data: bytes) -> int | float:
    (value,) = np.frombuffer(data, kind)
    number: int | float = value.item()
    return number


def _array_decoder(arguments: str) -> Decode | None:
    """Return the decoder for ndarray arguments "", "DTYPE" or "DTYPE:N,M"; None where they are malformed.

    A dtype or shape that the arguments leave open precedes the values in the data.
    """
    dtype, _, sides = arguments.partition(":")
    if dtype and dtype not in _VALUE_TYPES:
        return None
    if not all(side.isdigit() for side in sides.split(",") if sides):
        return None
    shape = tuple(int(side) for side in sides.split(",")) if sides else None
    return partial(_array, _VALUE_TYPES[dtype][1] if dtype else None, shape)


def _array(kind: str | None, shape: tuple[int, ...] | None, data: bytes) -> list[Any]:
    start = 0
    if kind is None:
        if data[0] not in _TYPE_OF_CODE:
            raise ValueError(f"no array has the type {data[0]}")
        kind, start = _TYPE_OF_CODE[data[0]], 1
    if shape is None:
        sides = np.dtype(_SHAPE_TYPES[data[start] % 4])
        end = start + 1 + (data[start] >> 2) * sides.itemsize
        shape = tuple(np.frombuffer(data[start + 1 : end], sides).tolist())
        start = end
    return array_lists(np.frombuffer(data[start:], kind), shape)


def array_lists(values: npt.NDArray[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return values in a shape as nested lists. Raises BadSampleError (too_large), ValueError if they do not fill the shape."""
    check_size("the array, as lists,", _list_bytes(shape, values.itemsize), MAX_MEDIUM_BYTES)
    lists: list[Any] = values.reshape(shape).tolist()
    return lists


def _list_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Estimate the bytes of memory of an array as nested lists. A shape may have many lists but no value: (200000000, 0)."""
    num_lists = sum(accumulate(shape[:-1], operator.mul, initial=1))
    return _LIST_BYTES * num_lists + math.prod(shape) * (_POINTER_BYTES + (_NUMBER_BYTES if itemsize > 1 else 0))


def _picture(data: bytes) -> bytes:
    width, height, mode_bytes = np.frombuffer(data[:12], "<u4").tolist()
    if width * height > _MAX_PIL_PIXELS:
        raise BadSampleError(Reason.TOO_LARGE, f"a picture of {width} x {height} pixels")
    mode = data[12 : 12 + mode_bytes].decode()
    if width * height // (8 if mode == "1" else 1) > len(data):  # check before allocating memory for it
        raise ValueError(f"{len(data)} bytes are no {width} x {height} pixels")
    buffer = io.BytesIO()
    image = Image.frombytes(mode, (width, height), data[12 + mode_bytes :])
    if mode in ("I", "F"):  # 32 bits, which PNG has not
        image.save(buffer, "TIFF")
        return buffer.getvalue()
    if mode.startswith("I"):  # 16 bits, which RGB would cut off at 8: they are scaled to 8 later, as for all 16-bit pictures
        image = image.convert("I").convert("I;16")
    elif mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = image.convert("RGB")
    image.save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def _list_of(decode: Decode, data: bytes) -> list[Any]:
    """Decode a list: a reserved 32-bit word, the number of items, their sizes, the items. Raises ValueError."""
    return _items(decode, data, 4)


def _items(decode: Decode, data: bytes, start: int) -> list[Any]:
    (count,) = np.frombuffer(data[start : start + 4], "<u4").tolist()
    position = start + 4 + 4 * count
    sizes = np.frombuffer(data[start + 4 : position], "<u4").tolist()
    if len(sizes) != count or position + sum(sizes) != len(data):
        raise ValueError(f"{count} items do not fill {len(data)} bytes")
    items = []
    for size in sizes:
        items.append(decode(data[position : position + size]))
        position += size
    return items


def _number(data: bytes) -> float:
    number = float(data)
    if not math.isfinite(number):
        raise ValueError(f"{data!r} is not a finite number")
    return number


_DECODERS: dict[str, Decode] = {
    "bytes": bytes,
    "pkl": bytes,
    "str": bytes.decode,
    "int": partial(_scalar, "<i8"),
    "str_int": int,
    "str_float": _number,
    "str_decimal": _number,
    "json": json.loads,
    "jpeg": bytes,
    "png": bytes,
    "pil": _picture,
    "list[jpeg]": partial(_list_of, bytes),
    "list[png]": partial(_list_of, bytes),
    "list[pil]": partial(_list_of, _picture),
    "jpeg_array": partial(_items, bytes, start=0),
    "jpegarray": partial(_items, bytes, start=0),
}
