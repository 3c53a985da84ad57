"""What a thumbnail of a refused image may be: a JPEG so small, and of so few kinds of segments, that any viewer may decode it.

A preprocessor makes it, and the reorder service stores and shows it without a decoder. So whoever takes one from another process
checks its bytes here: a JPEG of a few bytes can say that it has billions of pixels, and one of a camera says where it was taken.
"""

from __future__ import annotations

import struct

THUMBNAIL_SIDE = 64
"""Most pixels of a thumbnail's sides."""
MOST_THUMBNAIL_BYTES = 4096

_SEGMENT = struct.Struct(">BBH").unpack_from  # 0xff, marker, length with its own two bytes
_SIZE = struct.Struct(">BHH").unpack_from  # bits, height, width
_FRAME, _SCAN = 0xC0, 0xDA  # of a baseline JPEG
_OTHERS = (0xC4, 0xDB, 0xE0)  # Huffman and quantization tables, JFIF
_BEGIN, _END = b"\xff\xd8", b"\xff\xd9"


def is_thumbnail(data: bytes) -> bool:
    """Whether bytes are a baseline JPEG of one picture, of MOST_THUMBNAIL_BYTES and THUMBNAIL_SIDE pixels a side at most."""
    if len(data) > MOST_THUMBNAIL_BYTES or not (data.startswith(_BEGIN) and data.endswith(_END)):
        return False
    position, frames = len(_BEGIN), 0
    try:
        while True:
            prefix, marker, length = _SEGMENT(data, position)
            body, position = position + 4, position + 2 + length
            if prefix != 0xFF or length < 2 or position > len(data):
                return False
            if marker == _SCAN:
                return frames == 1
            if marker == _FRAME:
                bits, *sides = _SIZE(data, body)
                frames += bits == 8 and all(1 <= side <= THUMBNAIL_SIDE for side in sides)
            elif marker not in _OTHERS:
                return False
    except struct.error:  # it ends in front of its picture
        return False
