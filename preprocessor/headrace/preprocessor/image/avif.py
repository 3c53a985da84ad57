"""What decoding an AVIF picture would hold, from the AV1 frames in it.

The container says a size, and so does the video coding inside; libavif, Pillow's decoder, decodes by the latter and then scales.
So a container of 100 pixels can hold a frame of 268 million. The sizes inside are read here first, from the sequence headers of
all pictures in the file (tiles, transparency, previews).

The formats: ISO/IEC 14496-12 and 23008-12 (boxes, items), AV1 bitstream 5.3 to 5.5.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from headrace.quarantine import BadSampleError, Reason

_FULL_BOX = 4  # bytes of version and flags
_SEQUENCE_HEADER = 1
_SEQUENCE_HEADER_BYTES = 128  # up to the sizes it has at most 100
_MOST_ITEMS = 4096
_DECIDING = frozenset((b"meta", b"moov", b"iinf", b"iloc", b"iprp", b"ipco", b"idat"))
_COPIES = 12  # bytes per pixel: those of libavif, or Pillow's and ours, and the bytes between them
_FRAME_BYTES = 9  # per pixel of a frame: three channels of 16 bits, and half of them again for what the decoder works with


def is_iso_media(data: bytes) -> bool:
    """Whether a file is of the family of AVIF, HEIF and MP4."""
    return data[4:8] == b"ftyp"


def pixel_bytes(data: bytes, width: int, height: int) -> int:
    """Return `Header.pixel_bytes` of a picture whose container says `width` x `height`.

    Raises BadSampleError with corrupt_media or unsupported_media.
    """
    frames = sum(_frame_pixels(item) for item in _av1_items(data))
    return _COPIES + -(-_FRAME_BYTES * frames // (width * height))


def check_kind(data: bytes) -> None:
    """Raise BadSampleError with unsupported_media if a file of this family is no AVIF of a single picture."""
    length = int.from_bytes(data[:4], "big")
    brands = {data[position : position + 4] for position in range(16, min(length, len(data)), 4)}
    if data[8:12] == b"avis":
        raise _unsupported("an AVIF sequence")
    if data[8:12] != b"avif" and (b"avif" not in brands or data[8:12] not in (b"mif1", b"msf1")):
        raise _unsupported("HEIC or MP4")


def _av1_items(data: bytes) -> Iterator[bytes]:
    """Yield the coded data of each picture in the file."""
    try:
        file = _once(_boxes(data))
        if b"moov" in file and data[8:12] != b"avif":
            raise _unsupported("an AVIF sequence")
        boxes = _once(_boxes(file[b"meta"][_FULL_BOX:]))
        if any(kind == b"clap" for kind, _ in _boxes(_once(_boxes(boxes[b"iprp"]))[b"ipco"])):
            raise _unsupported("an AVIF picture that is to be cropped")
        kinds = dict(_item_kinds(boxes[b"iinf"]))
        left = len(data)  # items on top of each other would be read many times
        for item, extents in _item_places(boxes[b"iloc"]):
            if kinds.get(item) == b"av01":
                parts = []
                for inside, begin, size in extents:
                    place = boxes[b"idat"] if inside else data
                    left -= size or max(0, len(place) - begin)
                    if left < 0:
                        raise _corrupt("has pictures on top of each other")
                    parts.append(place[begin : begin + size if size else None])
                yield b"".join(parts)
    except (struct.error, IndexError, KeyError):
        raise _corrupt("has a damaged directory") from None


def _once(boxes: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return boxes by kind. Raises BadSampleError where one that decides is there twice: decoders take either."""
    found: dict[bytes, bytes] = {}
    for kind, body in boxes:
        if kind in found and kind in _DECIDING:
            raise _corrupt("has two of one box")
        found[kind] = body
    return found


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and body of each box."""
    position = 0
    while position < len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        header = 8
        if size == 1:
            (size,), header = struct.unpack_from(">Q", data, position + 8), 16
        elif size == 0:
            size = len(data) - position
        if size < header or position + size > len(data):
            raise _corrupt("ends in the middle of a box")
        yield kind, data[position + header : position + size]
        position += size


def _item_kinds(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and kind of each item."""
    for kind, entry in _boxes(body[_FULL_BOX + (2 if body[0] == 0 else 4) :]):
        if kind == b"infe" and entry[0] >= 2:
            item, kind = struct.unpack_from(">H2x4s" if entry[0] == 2 else ">I2x4s", entry, _FULL_BOX)
            yield item, kind


def _item_places(body: bytes) -> Iterator[tuple[int, list[tuple[bool, int, int]]]]:
    """Yield the number of each item and its parts: whether they lie in the box idat or in the file, their begin and size."""
    version, sizes, base_and_index = body[0], body[4], body[5]
    offset_bytes, size_bytes, base_bytes = sizes >> 4, sizes & 15, base_and_index >> 4
    index_bytes = base_and_index & 15 if version else 0
    position = 6

    def number(length: int) -> int:
        nonlocal position
        if position + length > len(body):
            raise _corrupt("has a damaged directory")
        position += length
        return int.from_bytes(body[position - length : position], "big")

    count, parts = number(2 if version < 2 else 4), 0
    if count > _MOST_ITEMS:
        raise _corrupt(f"has {count} items")
    for _ in range(count):
        item = number(2 if version < 2 else 4)
        inside = version > 0 and number(2) & 15 == 1
        number(2)  # which file: always this one
        base = number(base_bytes)
        extents = []
        num_extents = number(2)
        parts += num_extents
        if parts > _MOST_ITEMS:
            raise _corrupt(f"has {parts} parts")
        for _ in range(num_extents):
            number(index_bytes)
            begin = base + number(offset_bytes)
            extents.append((inside, begin, number(size_bytes)))
        yield item, extents


def _frame_pixels(item: bytes) -> int:
    """Return the pixels of the largest frame that a picture's sequence headers allow; 0 if it has none, and so no frame."""
    position, most = 0, 0
    while position < len(item):
        header = item[position]
        position += 2 if header & 4 else 1
        size, shift = 0, 0
        if not header & 2:
            size = len(item) - position
        else:
            while position < len(item) and shift < 56:
                byte, position = item[position], position + 1
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
        if header >> 3 & 15 == _SEQUENCE_HEADER:
            most = max(most, _most_pixels(item[position : position + min(size, _SEQUENCE_HEADER_BYTES)]))
        position += size
    return most


def _most_pixels(sequence_header: bytes) -> int:
    """Return the pixels of the largest frame that a sequence header allows."""
    bits = int.from_bytes(sequence_header.ljust(_SEQUENCE_HEADER_BYTES, b"\0"), "big")
    position = 0

    def take(count: int) -> int:
        nonlocal position
        position += count
        return bits >> 8 * _SEQUENCE_HEADER_BYTES - position & (1 << count) - 1

    take(4)  # profile, whether it is a still picture
    reduced = bool(take(1))
    if reduced:
        take(5)  # level
    else:
        if take(1):
            raise _unsupported("an AVIF picture with timing")
        delays, points = take(1), 1 + take(5)
        for _ in range(points):
            take(12)
            if take(5) > 7:
                take(1)  # tier
            if delays and take(1):
                take(4)
    width_bits, height_bits = 1 + take(4), 1 + take(4)
    if not reduced:  # each frame may have a size of its own
        return 1 << width_bits + height_bits
    return (1 + take(width_bits)) * (1 + take(height_bits))


def _corrupt(what: str) -> BadSampleError:
    return BadSampleError(Reason.CORRUPT_MEDIA, f"the AVIF picture {what}")


def _unsupported(what: str) -> BadSampleError:
    return BadSampleError(Reason.UNSUPPORTED_MEDIA, f"{what} is not taken; convert it to JPEG, PNG or WebP")
