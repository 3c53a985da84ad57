"""A small picture of what can be seen of a refused image, for whoever looks into the quarantine.

What is refused is damaged, too large or made to harm. So only formats that are read as they come are tried (JPEG, PNG, simple
WebP); the size that the header says bounds what is decoded, a JPEG's is decoded at an eighth; one is made at a time, within the
memory for decoding, and no more of them than a budget has. Bytes that are none of these, or that nothing can be seen of, have no
thumbnail: this is no error.
"""

from __future__ import annotations

import io
import struct
import threading
import time
import zlib
from collections.abc import Callable

from PIL import Image

from headrace.preprocessor.decode_memory import room_for
from headrace.preprocessor.image.header import MOST_SCANS, count_scans, parse
from headrace.preprocessor.image.png import pixel_chunks, row_bytes
from headrace.thumbnail_check import THUMBNAIL_SIDE, is_thumbnail

MOST_PIXELS = 2048 * 2048
"""Of an image that is decoded whole, or kept as coefficients. It then takes some 100 MB at most, and a tenth of a second."""
MOST_REDUCED_PIXELS = 8 * MOST_PIXELS
"""Of a JPEG that is decoded line by line at an eighth of its size."""
MOST_FILE_BYTES = 32 << 20
AT_ONCE, EVERY_S = 32, 1.0
"""Thumbnails that may be made without a pause, and the time in which the budget has another one."""

_DECODING_BYTES = 100 << 20
_QUALITIES = (70, 40, 10)
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_JPEG_END = b"\xff\xd9"
_BLOCK_BYTES = 2**10
_alone = threading.Lock()


class ThumbnailBudget:
    """How many thumbnails may be made: AT_ONCE, and another one every EVERY_S. Thread-safe."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._left, self._counted_s = float(AT_ONCE), now_s()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether one more may be made; it is counted then."""
        with self._lock:
            now_s = self._now_s()
            self._left = min(float(AT_ONCE), self._left + (now_s - self._counted_s) / EVERY_S)
            self._counted_s = now_s
            if self._left < 1:
                return False
            self._left -= 1
            return True


def thumbnail_of(data: bytes) -> bytes:
    """Return a JPEG, as `is_thumbnail` takes it, of what can be seen of an image file; empty where nothing can.

    Of a file that is cut off, or damaged on the way, it shows what comes before. Waits for memory while others decode.
    """
    if not may_have_thumbnail(data):
        return b""
    try:
        with _alone, room_for(_DECODING_BYTES):
            image = _decoded(data)
            return b"" if image is None else _encoded(image)
    except MemoryError:
        raise
    except Exception:  # Pillow raises nearly every kind on damaged data
        return b""


def may_have_thumbnail(data: bytes) -> bool:
    """Whether a file is of a format that is tried: opening it decodes nothing. A WebP's header is read here, not by Pillow."""
    if len(data) > MOST_FILE_BYTES:
        return False
    if data.startswith((_JPEG, _PNG)):
        return True
    header = parse(data)
    return header is not None and header.width * header.height <= MOST_PIXELS


def _decoded(data: bytes) -> Image.Image | None:
    """Decode an image to at least the size of a thumbnail; None if it has too many pixels, which its header says."""
    if data.startswith(_JPEG):
        data += _JPEG_END  # a decoder fills up what is missing
    elif data.startswith(_PNG):
        width, height = struct.unpack_from(">II", data, 16)
        if width * height > MOST_PIXELS:
            return None
        data = _mended_png(data)
    image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
    if image.width * image.height > _most_pixels(image, data):
        return None
    image.draft("RGB", (THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    image.load()
    return image


def _most_pixels(image: Image.Image, data: bytes) -> int:
    """Return how many pixels an opened image may have: of several scans a decoder keeps all coefficients, and reads each scan."""
    if image.format != "JPEG":
        return MOST_PIXELS
    scans = count_scans(data)
    return MOST_REDUCED_PIXELS if scans == 1 else MOST_PIXELS if scans < MOST_SCANS else 0


def _encoded(image: Image.Image) -> bytes:
    """Encode an image as a thumbnail, on white where it is transparent; empty where it does not get small enough."""
    image = image.convert("RGBA")
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    flat = Image.new("RGB", image.size, "white")
    flat.paste(image, mask=image.getchannel("A"))
    for quality in _QUALITIES:
        file = io.BytesIO()
        flat.save(file, "JPEG", quality=quality)
        if is_thumbnail(file.getvalue()):
            return file.getvalue()
    return b""


def _mended_png(data: bytes) -> bytes:
    """Return a PNG with the rows that another one has before it is damaged, zeros below, and nothing that these do not need."""
    wanted, begin = row_bytes(data), next(pixel_chunks(data))[0] - 8
    rows, unpacking, packed = bytearray(), zlib.decompressobj(), b"".join(data[at:end] for at, end in pixel_chunks(data))
    try:
        for at in range(0, len(packed), _BLOCK_BYTES):
            rows += unpacking.decompress(packed[at : at + _BLOCK_BYTES], wanted - len(rows) + 1)
            if len(rows) > wanted:
                break
    except zlib.error:
        pass  # what was unpacked before is whole
    rows = rows[:wanted].ljust(wanted, b"\0")
    kept = [data[16:29], *(_chunk_body(data[8:begin], name) for name in (b"PLTE", b"tRNS"))]
    bodies = zip((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"), (*kept, zlib.compress(rows, 1), b""), strict=True)
    return _PNG + b"".join(_chunk(name, body) for name, body in bodies if body or name == b"IEND")


def _chunk_body(chunks: bytes, wanted: bytes) -> bytes:
    """Return the body of the first chunk of that name; empty where there is none."""
    position = 0
    while position + 12 <= len(chunks):
        length, name = struct.unpack_from(">I4s", chunks, position)
        if name == wanted:
            return chunks[position + 8 : position + 8 + length]
        position += 12 + length
    return b""


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
