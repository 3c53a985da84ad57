"""What decoding a JPEG 2000 picture would hold, from the markers of its codestream (ISO/IEC 15444-1, annex A).

OpenJPEG, Pillow's decoder, makes a record for each precinct and code block before it looks whether there are any data, so that a
file of a hundred bytes can ask for gigabytes. They are counted here first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from headrace.preprocessor.image.header import PIXEL_BYTES
from headrace.quarantine import BadSampleError, Reason

_CODESTREAM = b"\xff\x4f\xff\x51"  # its beginning: start, and size
_SIZE, _STYLE, _COMPONENT_STYLE, _TILE_PART, _DATA, _END = 0xFF51, 0xFF52, 0xFF53, 0xFF90, 0xFF93, 0xFFD9
_MOST_TILE_PARTS = 2**16
_TILE_BYTES, _PRECINCT_BYTES, _BLOCK_BYTES = 2**14, 2**9, 2**9  # of OpenJPEG's records, rounded up
_MOST_COMPONENTS = 4


def is_jpeg2000(data: bytes) -> bool:
    """Whether a file begins as a JPEG 2000 picture does, with or without a container."""
    return data.startswith((_CODESTREAM, b"\0\0\0\x0cjP  \r\n\x87\n"))


def pixel_bytes(data: bytes, width: int, height: int) -> int:
    """Return `Header.pixel_bytes` of a picture whose container says `width` x `height`.

    Raises BadSampleError with corrupt_media or unsupported_media.
    """
    try:
        return _pixel_bytes(data, width, height)
    except (struct.error, IndexError):
        raise _corrupt("ends in the middle of its header") from None


def _pixel_bytes(data: bytes, width: int, height: int) -> int:
    segments = _segments(data, _begin(data))
    kind, begin = next(segments, (0, 0))
    components: int
    right, bottom, left, top = struct.unpack_from(">4I", data, begin + 2)
    tile_width, tile_height, tile_left, tile_top, components = struct.unpack_from(">4IH", data, begin + 18)
    if (right - left, bottom - top) != (width, height) or kind != _SIZE:
        raise _corrupt(f"says {width}x{height} pixels, its codestream {right - left}x{bottom - top}")
    if not (0 < components <= _MOST_COMPONENTS and tile_width and tile_height):
        raise BadSampleError(Reason.UNSUPPORTED_MEDIA, f"a JPEG 2000 picture of {components} components is not taken")
    depths = [1 + (data[begin + 36 + 3 * component] & 0x7F) for component in range(components)]
    sample_bytes = sum(4 + (1 if depth <= 8 else 2 if depth <= 16 else 4) for depth in depths)  # decoder's own, and tile
    tiles: int = -(-(right - tile_left) // tile_width) * -(-(bottom - tile_top) // tile_height)
    records, layers = 0, 1
    for kind, begin in segments:
        if kind == _STYLE:
            (layers,) = struct.unpack_from(">H", data, begin + 2)
        if kind in (_STYLE, _COMPONENT_STYLE):
            style, coding = (data[begin], begin + 5) if kind == _STYLE else (data[begin + 1], begin + 2)
            records = max(records, _record_bytes(data[coding : coding + 38], bool(style & 1), width, height, layers))
    return PIXEL_BYTES + sample_bytes + math.ceil((_TILE_BYTES * tiles + components * records) / (width * height))


def _begin(data: bytes) -> int:
    """Return where the codestream begins: in a box of the container, or at once."""
    if data.startswith(_CODESTREAM):
        return 0
    position = 0
    while True:
        length, kind = struct.unpack_from(">I4s", data, position)
        header = 8
        if length == 1:
            (length,), header = struct.unpack_from(">Q", data, position + 8), 16
        if kind == b"jp2c":
            return position + header
        if length < header:
            raise _corrupt("has no codestream")
        position += length


def _segments(data: bytes, position: int) -> Iterator[tuple[int, int]]:
    """Yield each marker of the headers, the main one and those of all tile parts, and where what it says begins."""
    position, tile_part, parts = position + 2, 0, 0
    while position < len(data):
        (marker,) = struct.unpack_from(">H", data, position)
        if marker == _END or parts > _MOST_TILE_PARTS:
            break
        if marker == _DATA:
            if tile_part <= position:
                raise _corrupt("has data without a tile")
            position = tile_part
            continue
        (length,) = struct.unpack_from(">H", data, position + 2)
        if length < 2:
            raise _corrupt("has a segment without a length")
        if marker == _TILE_PART:
            (size,) = struct.unpack_from(">I", data, position + 6)
            tile_part, parts = position + size if size else len(data), parts + 1
            if tile_part > len(data):
                raise _corrupt("ends in the middle of a tile")
        yield marker, position + 4
        position += 2 + length
    if parts > _MOST_TILE_PARTS:
        raise _corrupt(f"has more than {_MOST_TILE_PARTS} parts of tiles")


def _record_bytes(coding: bytes, own_precincts: bool, width: int, height: int, layers: int) -> int:
    """Return the bytes of the decoder's records for one component of these sides, as if it were one tile.

    `coding`: number of levels, code block, style, transform, and with `own_precincts` the precinct of each resolution; sizes are
    exponents of two.
    """
    levels, block_width, block_height = coding[0], (coding[1] & 15) + 2, (coding[2] & 15) + 2
    if levels > 32 or len(coding) < 5 + (levels + 1) * own_precincts:
        raise _corrupt(f"has {levels} levels")
    records, most = 0, 0
    for resolution in range(levels + 1):
        size = coding[5 + resolution] if own_precincts else 0xFF
        across, down = size & 15, size >> 4
        columns, rows = _parts(width, levels - resolution), _parts(height, levels - resolution)
        precincts = _parts(columns, across) * _parts(rows, down)
        blocks = _parts(columns, min(across, block_width)) * _parts(rows, min(down, block_height))
        records += precincts * _PRECINCT_BYTES + 3 * (blocks + precincts) * _BLOCK_BYTES
        most = max(most, precincts)
    return records + 2 * layers * most * (levels + 1)


def _parts(length: int, exponent: int) -> int:
    """Return how many parts of 2**exponent a length has, the last one maybe incomplete."""
    return (length + (1 << exponent) - 1) >> exponent


def _corrupt(what: str) -> BadSampleError:
    return BadSampleError(Reason.CORRUPT_MEDIA, f"the JPEG 2000 picture {what}")
