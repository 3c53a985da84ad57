"""A picture that lacks a part of its pixels is refused, also where its codec fills up the rest and says nothing."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.preprocessor import image
from headrace.preprocessor.image import jpeg
from headrace.preprocessor.image.header import end_of_scans
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import ImageSpec

SPEC = ImageSpec()
Y, X = np.mgrid[0:140, 0:213]
PHOTO = Image.fromarray((np.stack([np.sin(X / 9), np.cos(Y / 17), np.sin(X * Y / 900)], axis=-1) * 120 + 128).astype(np.uint8))
END = b"\xff\xd9"


def encoded(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def is_whole(data: bytes) -> bool:
    try:
        image.decode(data, SPEC)
    except BadSampleError as error:
        return error.reason is not Reason.CORRUPT_MEDIA
    return True


@pytest.fixture(params=["with the fast codec", "without"])
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(jpeg, "_decode", None)


@pytest.mark.usefixtures("codec")
@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_blocks": 3}, {"optimize": True}], ids=str
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_that_was_cut_and_got_an_end_again_is_refused(options: dict[str, Any], mode: str) -> None:
    data = encoded(PHOTO.convert(mode), **options)
    assert is_whole(data)
    last_scan = data.rindex(b"\xff\xda")
    for end in (len(data) - 40, (last_scan + len(data)) // 2):
        assert not is_whole(data[:end].rstrip(b"\xff") + END)


@pytest.mark.usefixtures("codec")
def test_bytes_that_a_picture_does_not_need_do_no_harm() -> None:
    """Between its last pixels and its end, which libjpeg only warns of, and behind its end."""
    data = encoded(PHOTO)
    assert data.endswith(END)
    assert is_whole(data[:-2] + bytes(20) + END)
    assert is_whole(data + encoded(PHOTO)[:-500])


@pytest.mark.usefixtures("codec")
def test_few_changed_bits_are_noticed_by_the_pixels_that_are_missing_then() -> None:
    """A JPEG has no checksum."""
    data, rng = encoded(PHOTO), np.random.default_rng(0)
    begin = data.rindex(b"\xff\xda") + 20
    noticed = 0
    for position in rng.integers(begin, len(data) - 100, 40):
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(0, 8))
        noticed += not is_whole(bytes(damaged))
    assert 0 < noticed < 20


def test_the_end_is_that_of_the_first_picture() -> None:
    preview, data = encoded(PHOTO.resize((20, 20))), encoded(PHOTO)
    segment = b"\xff\xe5" + struct.pack(">H", len(preview) + 2) + preview
    assert end_of_scans(data[:2] + segment + data[2:] + preview) == len(segment) + len(data) - 2
    assert end_of_scans(data[:-2]) == len(data) - 2


def test_a_png_is_held_to_the_checksums_of_its_pixels() -> None:
    data = encoded(PHOTO, "PNG")
    begin = data.index(b"IDAT")
    (length,) = struct.unpack_from(">I", data, begin - 4)
    assert is_whole(data)
    for position in (begin + 4 + length, begin + 4 + length // 2):
        damaged = bytearray(data)
        damaged[position] ^= 1
        assert not is_whole(bytes(damaged))
    pixels = data[begin + 4 : begin + 4 + length]
    parts = b"".join(
        struct.pack(">I", len(part)) + b"IDAT" + part + struct.pack(">I", zlib.crc32(b"IDAT" + part))
        for part in (pixels[:100], b"", pixels[100:])
    )
    split = data[: begin - 4] + parts + data[begin + 8 + length :]
    np.testing.assert_array_equal(image.read_pixels(split, SPEC), image.read_pixels(data, SPEC))


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


@pytest.mark.parametrize("interlaced", [0, 1])
@pytest.mark.parametrize(
    ("colour", "bits", "channels"), [(0, 1, 1), (0, 8, 1), (0, 16, 1), (4, 8, 2), (2, 8, 3), (2, 16, 3), (6, 8, 4), (3, 4, 1)]
)
def test_a_png_has_all_of_its_rows(colour: int, bits: int, channels: int, interlaced: int) -> None:
    """Also one whose last rows are black. Rows that are missing would come out as such."""
    columns_and_rows = [(4, 3), (3, 3), (7, 2), (6, 5), (13, 5), (12, 10), (25, 9)] if interlaced else [(25, 19)]
    rows = [bytes(1 + -(-columns * bits * channels // 8)) for columns, number in columns_and_rows for _ in range(number)]
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 25, 19, bits, colour, 0, 0, interlaced))
    head += chunk(b"PLTE", bytes(range(48))) if colour == 3 else b""
    for number, whole in ((len(rows), True), (len(rows) - 1, False), (len(rows) // 2, False)):
        packed = zlib.compress(b"".join(rows[:number]))
        data = head + chunk(b"IDAT", packed[:7]) + chunk(b"IDAT", packed[7:]) + chunk(b"IEND", b"")
        assert is_whole(data) == whole, number


def test_an_interlaced_png_needs_its_last_pass() -> None:
    """Its last row may be there nevertheless."""
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 7, 8, 0, 0, 0, 1))
    sizes = [(1, 1), (1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 3)]
    rows = [b"\0" + bytes([200]) * columns for columns, number in sizes for _ in range(number)]
    for number, whole in ((len(rows), True), (len(rows) - 1, False)):
        assert is_whole(data + chunk(b"IDAT", zlib.compress(b"".join(rows[:number]))) + chunk(b"IEND", b"")) == whole
