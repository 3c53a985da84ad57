"""The size and rotation of an image from the first bytes of its file, without a decoder.

Only ordinary headers are parsed. Everything else (unknown or damaged segments, odd orders, rare formats) is left to the
reference codec, so that a header means the same everywhere: `parse` gives what Pillow gives, or None.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass, replace

MOST_SCANS = 101
"""Number of scans at which counting stops, and which is too many: encoders write 10 or fewer, the format allows any."""
PIXEL_BYTES = 8
WEBP_BYTES = 18
"""The `Header.pixel_bytes` of a WebP, which Pillow decodes as an animation, on canvases of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an image's header says: its size, rotation and what decoding depends on."""

    width: int
    height: int
    """Height in pixels as they are stored, before rotation; `width` likewise."""
    orientation: int = 1
    """EXIF orientation, 1 to 8."""
    plain_jpeg: bool = False
    """Whether it is a JPEG of one picture with 8 bits a sample and one or three channels."""
    scans: int = 1
    """Number of passes over all pixels: more than one in a progressive JPEG, or in one that stores its channels apart."""
    pixel_bytes: int = PIXEL_BYTES
    """Peak memory of decoding in bytes per pixel: the codec's own copy and the decoded pixel."""

    @property
    def upright(self) -> tuple[int, int]:
        """(width, height) in pixels after rotation."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def parse(data: bytes) -> Header | None:
    """Parse the header of an ordinary JPEG, PNG or WebP file; return None if the reference codec must be asked."""
    try:
        if data[:3] == b"\xff\xd8\xff":
            header = _jpeg(data)
        elif data[:8] == b"\x89PNG\r\n\x1a\n":
            header = _png(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            header = _webp(data)
        else:
            return None
    except (struct.error, IndexError):  # the data ends in the middle of a header
        return None
    return header if header and header.width > 0 and header.height > 0 else None


_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # all markers except escaped bytes, restarts and fill bytes


def count_scans(data: bytes, position: int = 2) -> int:
    """Count the scans of a JPEG from the segment at `position` on, up to MOST_SCANS; a decoder goes through them one by one."""
    scans = 0
    while scans < MOST_SCANS and (match := _MARKER.search(data, position)):
        marker, position = data[match.end() - 1], match.end()
        if marker == _END:
            break
        scans += marker == _SCAN
        if marker != _START:  # all others are followed by their segment's length
            position += int.from_bytes(data[position : position + 2], "big")
    return scans


def end_of_scans(data: bytes) -> int:
    """Return where the end marker of a JPEG's first picture is; the length of the data if it has none."""
    position = 2
    while match := _MARKER.search(data, position):
        marker, position = data[match.end() - 1], match.end()
        if marker == _END:
            return match.start()
        if marker != _START:
            position += int.from_bytes(data[position : position + 2], "big")
    return len(data)


def with_scans(header: Header, scans: int, channels: int) -> Header:
    """Return the header with its number of scans; with several, the codec keeps all coefficients, two bytes a channel."""
    return replace(header, scans=scans, pixel_bytes=header.pixel_bytes + 2 * channels) if scans > 1 else header


def orientation(exif: bytes) -> int:
    """Return the orientation, 1 to 8, in an EXIF block; 1 if it has none or is malformed."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 1
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(order + "H", tiff, start)
    for entry in range(start + 2, min(start + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
        if tag == 0x0112 and kind == 3:
            return value if 1 <= value <= 8 else 1
    return 1


_SEGMENT = struct.Struct(">BBH").unpack_from  # 0xff, marker, length with its own two bytes
_FRAME = struct.Struct(">BHHB").unpack_from  # bits, height, width, channels
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended, progressive; all with Huffman coding
_TABLES = frozenset((0xC4, 0xDD, 0xFE))  # Huffman tables, restart interval, comment
_PROGRESSIVE = 0xC2
_START, _END = 0xD8, 0xD9
_SCAN = 0xDA
_QUANTIZATION = 0xDB
_EXIF = 0xE1
_APPLICATIONS = frozenset(range(0xE0, 0xF0))
# Application segments that Pillow looks into and that can make it refuse the file or take it for something else: multi-picture
# index, FlashPix, colour profile in parts, Photoshop's resources.
_LOOKED_INTO = {0xE2: (b"MPF\0", b"FPXR\0"), 0xED: (b"Photoshop 3.0\0",)}
_LEAST_BODY = {0xE0: (b"JFIF", 7), 0xE2: (b"ICC_PROFILE\0", 14), 0xEE: (b"Adobe", 7)}


def _jpeg(data: bytes) -> Header | None:
    """Parse the segments of a JPEG up to its first scan (ITU-T T.81, annex B)."""
    position, frame, kind, exif = 2, None, 0, b""
    while True:
        prefix, marker, length = _SEGMENT(data, position)
        begin, end = position + 4, position + 2 + length
        if prefix != 0xFF or length < 2 or end > len(data):
            return None
        if marker in _APPLICATIONS:
            if marker == _EXIF and data.startswith(b"Exif\0\0", begin):
                if exif:
                    return None
                exif = data[begin:end]
            elif not _harmless(marker, data[begin : min(end, begin + 14)]):
                return None
        elif marker == _QUANTIZATION:
            if not _whole_quantization(data, begin, end):
                return None
        elif marker in _FRAMES:
            if frame:
                return None
            frame, kind = _FRAME(data, begin), marker
            if frame[0] != 8 or frame[3] not in (1, 3) or length != 8 + 3 * frame[3]:
                return None
        elif marker == _SCAN:
            break
        elif marker not in _TABLES:
            return None
        position = end
    if frame is None:
        return None
    header = Header(width=frame[2], height=frame[1], orientation=orientation(exif), plain_jpeg=True)
    channels = frame[3]
    several = kind == _PROGRESSIVE or data[begin] < channels  # data[begin]: channels in this scan
    return with_scans(header, count_scans(data, position), channels) if several else header


def _harmless(marker: int, body: bytes) -> bool:
    name, least = _LEAST_BODY.get(marker, (b"", 0))
    return not body.startswith(_LOOKED_INTO.get(marker, ())) and (len(body) >= least or not body.startswith(name))


def _whole_quantization(data: bytes, begin: int, end: int) -> bool:
    while begin < end:
        begin += 129 if data[begin] >> 4 else 65
    return begin == end


_CHUNK = struct.Struct(">I4s").unpack_from  # length of the body, name
_CHECKSUM = struct.Struct(">I").unpack_from
_IHDR = struct.Struct(">IIBBBBB").unpack_from  # width, height, bits, colour type, compression, filter, interlace
_BIT_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # allowed for each colour type
_BODY_BYTES = {b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"tIME": 7}
_ANY_BODY = frozenset((b"PLTE", b"sBIT", b"bKGD"))
_PALETTE = 3
_MOST_TEXT = 2**16


def _png(data: bytes) -> Header | None:
    """Parse the chunks of a PNG up to the first with pixels (W3C PNG, section 5)."""
    if _CHUNK(data, 8) != (13, b"IHDR"):
        return None
    width, height, bits, colour, compression, filters, interlace = _IHDR(data, 16)
    if bits not in _BIT_DEPTHS.get(colour, ()) or compression or filters or interlace > 1:
        return None
    position, end, text = 16, 29, 0  # begin and end of a chunk's body, bytes of text so far
    while _CHECKSUM(data, end)[0] == zlib.crc32(data[position - 4 : end]):
        length, name = _CHUNK(data, end + 4)
        position, end = end + 12, end + 12 + length
        if name == b"IDAT":
            return Header(width=width, height=height)
        if name == b"tEXt":
            text += length
            if text > _MOST_TEXT or data.startswith(b"exif", position):
                return None
        elif name == b"tRNS":
            if colour != _PALETTE and length < 6:
                return None
        elif name not in _ANY_BODY and _BODY_BYTES.get(name) != length:
            return None
    return None


def _webp(data: bytes) -> Header | None:
    """Parse the frame header of a simple WebP file, lossy (RFC 6386, section 9.1) or lossless (RFC 9649, section 3.4)."""
    riff, kind, length = struct.unpack_from("<I4x4sI", data, 4)
    if riff + 8 != len(data) or length + (length & 1) + 12 != riff:
        return None
    if kind == b"VP8 ":
        tag = int.from_bytes(data[20:23], "little")
        is_key, shown, profile, partition = not tag & 1, tag >> 4 & 1, tag >> 1 & 7, tag >> 5
        if not is_key or not shown or profile > 3 or partition >= length or data[23:26] != b"\x9d\x01\x2a":
            return None
        width, height = struct.unpack_from("<HH", data, 26)
        return Header(width=width & 0x3FFF, height=height & 0x3FFF, pixel_bytes=WEBP_BYTES)
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        return Header(width=width, height=height, pixel_bytes=WEBP_BYTES) if bits >> 29 == 0 else None
    return None
