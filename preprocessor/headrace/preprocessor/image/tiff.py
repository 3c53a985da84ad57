"""TIFF files are checked here, and reduced to what was checked, before Pillow opens one.

A TIFF is a directory of tags, which may ask for tiles of gigabytes, point outside of the file, or lead to further directories. So
its first directory is read here, and Pillow gets the same pixels with a new directory that has only the tags below.

Taken are bits, grey, palettes, colour and floats, whole or in strips or tiles, stored as they are or packed by CCITT (fax), LZW,
JPEG, Deflate or PackBits. A file with further pages is refused, since nobody would see that they are missing; reduced copies and
masks behind the picture are no pages. The format: TIFF revision 6.0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.preprocessor.image.header import PIXEL_BYTES
from headrace.quarantine import BadSampleError, Reason

_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_NUMBERS = {1: "u1", 3: "u2", 4: "u4"}  # dtypes of the kinds of values that are used here
_VALUE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 254, 256, 257, 258, 259, 262
_STRIPS, _ORIENTATION, _SAMPLES, _ROWS, _STRIP_BYTES, _PLANAR = 273, 274, 277, 278, 279, 284
_COLOURS, _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _EXTRA, _FORMAT = 320, 322, 323, 324, 325, 338, 339
_CODING = (266, 292, 293, 317, 347, 529, 530, 531, 532)  # order of bits, fax options, predictor, JPEG tables, YCbCr
_KEPT = frozenset((
    *(_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _STRIPS, _SAMPLES, _ROWS, _STRIP_BYTES, _PLANAR),
    *(_COLOURS, _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _EXTRA, _FORMAT, *_CODING),
))  # fmt: skip
_RAW, _JPEG, _FAX = 1, 7, (2, 3, 4)
_COMPRESSIONS = (_RAW, _JPEG, *_FAX, 5, 8, 32773, 32946)  # further ones: LZW, Deflate, PackBits, Deflate by its old number
_WHITE_IS_ZERO, _YCBCR, _LAB = 0, 6, 8
_SIGNED = 2
_NO_PAGE = 0b101  # bits of _SUBFILE: a reduced copy, a mask
_MOST_TAGS, _MOST_DIRECTORIES, _MOST_VALUES = 1024, 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiff:
    """What the first directory of a TIFF says, and a file that says nothing else."""

    orientation: int
    """As EXIF's, 1 to 8; the tag is not in `data`, for which Pillow would turn the pixels."""
    pixel_bytes: int
    """`Header.pixel_bytes`: decoding also holds a strip or tile, which may be larger than the picture."""
    data: bytes
    """The file with a directory of the checked tags only."""


def is_tiff(data: bytes) -> bool:
    """Whether a file begins as a TIFF does, of any variant and byte order."""
    return data.startswith((b"II*\0", b"MM\0*", b"MM*\0", b"II\0*", b"II+\0", b"MM\0+"))


def read(data: bytes) -> Tiff:
    """Check a TIFF. Raises BadSampleError with corrupt_media or unsupported_media."""
    order = _ORDERS.get(data[:4])
    if order is None:
        raise _unsupported("a BigTIFF" if b"+" in data[:4] else "a TIFF without a byte order")
    try:
        directory = _Directory(data, order, struct.unpack_from(order + "I", data, 4)[0])
        _check_pages(directory)
        _check_layout(directory)
        buffer = _checked_segments(directory)
    except struct.error:
        raise _corrupt("ends in the middle of its tags") from None
    orientation = directory.one(_ORIENTATION, 1)
    pixels = max(1, directory.one(_WIDTH) * directory.one(_HEIGHT))
    return Tiff(
        orientation=orientation if 1 <= orientation <= 8 else 1,
        pixel_bytes=PIXEL_BYTES + -(-buffer // pixels),
        data=directory.alone(),
    )


class _Directory:
    """The tags of one directory of a TIFF."""

    def __init__(self, data: bytes, order: str, begin: int) -> None:
        self._data, self._order = data, order
        (count,) = struct.unpack_from(order + "H", data, begin)
        if count > _MOST_TAGS:
            raise _corrupt(f"has {count} tags")
        end = begin + 2 + 12 * count
        self._entries: dict[int, int] = {}
        for position in range(begin + 2, end, 12):
            self._entries.setdefault(struct.unpack_from(order + "H", data, position)[0], position)
        (self._next,) = struct.unpack_from(order + "I", data, end)

    def __contains__(self, tag: int) -> bool:
        return tag in self._entries

    def following(self) -> _Directory | None:
        """Return the directory behind this one."""
        return _Directory(self._data, self._order, self._next) if self._next else None

    def values(self, tag: int, most: int = _MOST_VALUES) -> NDArray[np.int64]:
        """Return a tag's numbers, at most `most` of them."""
        if tag not in self._entries:
            raise _corrupt(f"lacks the tag {tag}")
        kind, count, begin = self._place(tag)
        if kind not in _NUMBERS or not 1 <= count <= most:
            raise _corrupt(f"has {count} values of type {kind} in the tag {tag}")
        return np.frombuffer(self._data, self._order + _NUMBERS[kind], count, begin).astype(np.int64)

    def _place(self, tag: int) -> tuple[int, int, int]:
        """Return the kind and number of a tag's values, and where they begin: beside the tag, where four bytes hold them."""
        position = self._entries[tag]
        kind, count = struct.unpack_from(self._order + "HI", self._data, position + 2)
        size, begin = count * _VALUE_BYTES.get(kind, 0), position + 8
        if size > 4:
            (begin,) = struct.unpack_from(self._order + "I", self._data, begin)
        if begin + size > len(self._data):
            raise _corrupt(f"ends in the middle of the tag {tag}")
        return kind, count, begin

    def one(self, tag: int, default: int | None = None) -> int:
        """Return a tag's first number."""
        return default if default is not None and tag not in self._entries else int(self.values(tag)[0])

    def alone(self) -> bytes:
        """Return the file with a directory of the kept tags alone, behind all else."""
        kept = []
        for tag in sorted(self._entries.keys() & _KEPT):
            self._place(tag)  # in the file
            kept.append(self._data[self._entries[tag] : self._entries[tag] + 12])
        padding = bytes(len(self._data) % 2)
        begin = struct.pack(self._order + "I", len(self._data) + len(padding))
        count = struct.pack(self._order + "H", len(kept))
        return b"".join((self._data[:4], begin, self._data[8:], padding, count, *kept, bytes(4)))

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self._data)


def _check_pages(first: _Directory) -> None:
    """Refuse files of several pages, and those whose first picture is the reduced copy of another."""
    if first.one(_SUBFILE, 0) & _NO_PAGE:
        raise _unsupported("a TIFF whose first picture is a reduced copy or a mask")
    following = first.following()
    for _ in range(_MOST_DIRECTORIES):
        if following is None:
            return
        if not following.one(_SUBFILE, 0) & _NO_PAGE:
            raise _unsupported("a TIFF of several pages", "save each page as an image of its own")
        following = following.following()
    raise _corrupt(f"has more than {_MOST_DIRECTORIES} directories")


def _check_layout(directory: _Directory) -> None:
    """Refuse pixels that Pillow would read wrongly, or whose decoding is not bounded; it refuses others itself."""
    compression, photometric = directory.one(_COMPRESSION, _RAW), directory.one(_PHOTOMETRIC, _WHITE_IS_ZERO)
    bits, samples, layout = _bits(directory), directory.one(_SAMPLES, 1), directory.one(_FORMAT, 1)
    if compression not in _COMPRESSIONS:
        raise _unsupported(f"a TIFF with compression {compression}")
    if compression in _FAX and (bits, samples) != (1, 1):
        raise _corrupt(f"has {samples} samples of {bits} bits, packed as bits")
    if bits not in (1, 2, 4, 8, 16, 32) or samples not in range(1, 7):
        raise _unsupported(f"a TIFF with {samples} samples of {bits} bits")
    if (photometric == _WHITE_IS_ZERO and bits > 8) or (layout == _SIGNED and bits == 8):
        raise _unsupported(f"a TIFF with white as zero or below it, in {bits} bits,")
    if photometric == _LAB or (photometric == _YCBCR and compression == _RAW):
        raise _unsupported(f"a TIFF with photometric interpretation {photometric} and compression {compression}")
    if _COLOURS in directory and len(directory.values(_COLOURS, most=3 << 8)) != 3 << bits:
        raise _corrupt("has a palette of another size than its bits")


def _bits(directory: _Directory) -> int:
    """Return the bits of each sample, which are the same for all."""
    bits = directory.values(_BITS) if _BITS in directory else np.ones(1, np.int64)
    if (bits != bits[0]).any():
        raise _unsupported(f"a TIFF with samples of {bits.tolist()} bits")
    return int(bits[0])


def _checked_segments(directory: _Directory) -> int:
    """Check that all strips or tiles are in the file; return the bytes of the largest of them, unpacked."""
    width, height, samples = directory.one(_WIDTH), directory.one(_HEIGHT), directory.one(_SAMPLES, 1)
    planes = samples if directory.one(_PLANAR, 1) == 2 else 1
    tiled = _TILE_WIDTH in directory
    if tiled == (_STRIPS in directory):
        raise _corrupt("has both strips and tiles, or none of them")
    columns = directory.one(_TILE_WIDTH) if tiled else width
    rows = directory.one(_TILE_HEIGHT) if tiled else min(directory.one(_ROWS, height), height)
    if not (width and height and columns and rows):
        raise _corrupt(f"has {width}x{height} pixels in parts of {columns}x{rows}")
    num_segments = -(-width // columns) * -(-height // rows) * planes
    line = -(-columns * _bits(directory) * (samples // planes) // 8)
    offsets = directory.values(_TILES if tiled else _STRIPS, most=num_segments)
    sizes = directory.values(_TILE_BYTES if tiled else _STRIP_BYTES, most=num_segments)
    if not len(offsets) == len(sizes) == num_segments:
        raise _corrupt(f"has {len(offsets)} places and {len(sizes)} sizes for {num_segments} strips or tiles")
    if (offsets + sizes > directory.num_bytes).any():
        raise _corrupt("ends in the middle of its pixels")
    if directory.one(_COMPRESSION, _RAW) == _RAW and (sizes < line * _rows_of(num_segments, planes, height, rows, tiled)).any():
        raise _corrupt("has a strip or tile with too few bytes")
    if int(sizes.sum()) > 4 * directory.num_bytes + line * rows * num_segments:  # each would be read anew
        raise _corrupt("has strips or tiles on top of each other")
    return line * rows


def _rows_of(num_segments: int, planes: int, height: int, rows: int, tiled: bool) -> NDArray[np.int64]:
    """Return the rows of each strip or tile; of strips, the last one of a plane may have fewer."""
    of_each = np.full((planes, num_segments // planes), rows, np.int64)
    if not tiled:
        of_each[:, -1] = height - rows * (of_each.shape[1] - 1)
    return of_each.reshape(-1)


def _corrupt(what: str) -> BadSampleError:
    return BadSampleError(Reason.CORRUPT_MEDIA, f"the TIFF {what}")


def _unsupported(what: str, remedy: str = "convert it to PNG") -> BadSampleError:
    return BadSampleError(Reason.UNSUPPORTED_MEDIA, f"{what} is not taken; {remedy}")
