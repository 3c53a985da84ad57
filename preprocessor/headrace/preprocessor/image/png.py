"""Checks the pixels of a PNG for what Pillow passes over: checksums that disagree, and rows that are not there.

The format: W3C PNG, sections 5 and 8.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from headrace.quarantine import BadSampleError, Reason

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_WHOLE = ((0, 0, 1, 1),)  # first column and row of a pass, and the steps from one to the next
_INTERLACED = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_BLOCK_BYTES = 2**20


def check_checksums(data: bytes) -> None:
    """Raise BadSampleError with corrupt_media if the checksum of a chunk of pixels disagrees; Pillow checks those of others."""
    for begin, end in pixel_chunks(data):
        if int.from_bytes(data[end : end + 4], "big") != zlib.crc32(memoryview(data)[begin - 4 : end]):
            raise BadSampleError(Reason.CORRUPT_MEDIA, "the checksum of the PNG's pixels disagrees")


def check_rows(data: bytes) -> None:
    """Raise BadSampleError with corrupt_media if the pixels end before the last row; unpacks them once more."""
    missing = row_bytes(data)
    unpacking = zlib.decompressobj()
    for begin, end in pixel_chunks(data):
        packed = data[begin:end]
        while missing > 0 and (block := unpacking.decompress(packed, _BLOCK_BYTES)):
            missing -= len(block)
            packed = unpacking.unconsumed_tail
    if missing > 0:
        raise BadSampleError(Reason.CORRUPT_MEDIA, "the PNG ends before its picture does")


def row_bytes(data: bytes) -> int:
    """Return how many bytes the rows of a PNG have once unpacked, by its header."""
    width, height, bits, colour, *_, interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    num_bytes = 0
    for left, top, across, down in _INTERLACED if interlaced else _WHOLE:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        num_bytes += rows * (1 + -(-columns * bits * _CHANNELS[colour] // 8)) if columns > 0 else 0
    return num_bytes


def pixel_chunks(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the body of each chunk of pixels."""
    position = 8
    while position + 12 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        if name == b"IDAT":
            yield position + 8, position + 8 + length
        position += 12 + length
