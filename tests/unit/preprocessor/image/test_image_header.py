"""The header parser: it says what Pillow says, or leaves it to Pillow; never a third thing."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headrace.preprocessor.image import header, reference
from headrace.quarantine import BadSampleError
from headrace.spec import ImageSpec
from tests.examples import with_examples

ROOT = Path(__file__).parents[4]
HOSTILE = ROOT / "tests" / "data" / "hostile" / "images"
NO_LIMITS = ImageSpec().model_copy(update={"max_source_pixels": 2**62, "max_decode_mib": 2**40, "max_aspect_ratio": 2.0**31})
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def file_of(kind: str, picture: Image.Image = PICTURE, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


ORDINARY = {
    "jpeg": file_of("JPEG"),
    "jpeg_progressive": file_of("JPEG", progressive=True),
    "jpeg_grey": file_of("JPEG", PICTURE.convert("L")),
    "jpeg_exif": file_of("JPEG", exif=turned(6)),
    "jpeg_comment": file_of("JPEG", comment=b"words", dpi=(300, 300)),
    "png": file_of("PNG"),
    "png_palette": file_of("PNG", PICTURE.convert("P")),
    "png_alpha": file_of("PNG", PICTURE.convert("LA"), dpi=(72, 72)),
    "png_transparent": file_of("PNG", PICTURE.convert("P"), transparency=3),
    "webp": file_of("WEBP"),
    "webp_lossless": file_of("WEBP", lossless=True),
}
LEFT_TO_PILLOW = {
    "jpeg_cmyk": file_of("JPEG", PICTURE.convert("CMYK")),
    "mpo": file_of("MPO", save_all=True, append_images=[PICTURE]),
    "png_exif": file_of("PNG", exif=turned(8)),
    "webp_exif": file_of("WEBP", exif=turned(3)),
    "webp_alpha": file_of("WEBP", Image.new("RGBA", (40, 24), (1, 2, 3, 100))),
    "gif": file_of("GIF"),
    "bmp": file_of("BMP"),
    "tiff": file_of("TIFF", compression="tiff_lzw"),
    "avif": file_of("AVIF"),
    "jpeg_2000": file_of("JPEG2000"),
    "ppm": file_of("PPM"),
}


def assert_agrees(data: bytes) -> None:
    parsed = header.parse(data)
    if parsed is not None:
        assert parsed == reference.read_header(data, NO_LIMITS)


def examples() -> Iterator[bytes]:
    for path in sorted((ROOT / "examples" / "data").glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.name.endswith((".jpg", ".png")) and (file := archive.extractfile(member)):
                    yield file.read()


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_headers_are_parsed(name: str) -> None:
    parsed = header.parse(ORDINARY[name])
    assert parsed == reference.read_header(ORDINARY[name], NO_LIMITS)
    assert (parsed.width, parsed.height) == (40, 24)


@pytest.mark.parametrize("name", LEFT_TO_PILLOW)
def test_other_headers_are_left_to_pillow(name: str) -> None:
    assert header.parse(LEFT_TO_PILLOW[name]) is None
    assert reference.read_header(LEFT_TO_PILLOW[name], NO_LIMITS).width == 40


def test_rotation_is_read_and_swaps_the_sides() -> None:
    for orientation in range(1, 9):
        parsed = header.parse(file_of("JPEG", exif=turned(orientation)))
        assert parsed is not None
        assert parsed.orientation == orientation
        assert parsed.upright == ((24, 40) if orientation >= 5 else (40, 24))


def test_every_example_is_parsed() -> None:
    for data in examples():
        assert header.parse(data) == reference.read_header(data, NO_LIMITS)


@pytest.mark.parametrize("path", sorted(HOSTILE.iterdir()), ids=lambda path: path.name)
def test_hostile_files(path: Path) -> None:
    assert_agrees(path.read_bytes())


@pytest.mark.parametrize("name", [*ORDINARY, *LEFT_TO_PILLOW])
def test_cut_at_every_byte(name: str) -> None:
    """Cuts in the first 700 bytes, which hold every header, and some behind."""
    data = {**ORDINARY, **LEFT_TO_PILLOW}[name]
    for end in [*range(min(700, len(data))), *range(700, len(data), 97)]:
        assert_agrees(data[:end])


@given(st.sampled_from(sorted(ORDINARY)), st.lists(st.tuples(st.integers(0, 240), st.integers(0, 255)), min_size=1, max_size=3))
@with_examples(600)
def test_changed_bytes(name: str, changes: list[tuple[int, int]]) -> None:
    data = bytearray(ORDINARY[name])
    for position, value in changes:
        data[position % len(data)] = value
    assert_agrees(bytes(data))


@given(
    st.sampled_from(["jpeg", "jpeg_exif"]),
    st.integers(0xC0, 0xFE),
    st.sampled_from([b"", b"Exif\0\0", b"JFIF", b"MPF\0", b"FPXR\0", b"ICC_PROFILE\0", b"Adobe", b"Photoshop 3.0\0"]),
    st.binary(max_size=24),
)
@with_examples(600)
def test_any_further_segment(name: str, marker: int, start: bytes, rest: bytes) -> None:
    body = start + rest
    segment = bytes((0xFF, marker)) + (len(body) + 2).to_bytes(2, "big") + body
    assert_agrees(b"\xff\xd8" + segment + ORDINARY[name][2:])


@given(
    st.sampled_from(
        [b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"tIME", b"tRNS", b"sBIT", b"bKGD", b"tEXt", b"zTXt", b"eXIf", b"IHDR", b"abCd"]
    ),
    st.binary(max_size=34),
    st.sampled_from(["png", "png_palette", "png_alpha"]),
)
@with_examples(400)
def test_any_further_chunk(kind: bytes, body: bytes, name: str) -> None:
    chunk = len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
    assert_agrees(ORDINARY[name][:33] + chunk + ORDINARY[name][33:])


@given(st.binary(max_size=80))
@with_examples(100)
def test_any_exif_block(block: bytes) -> None:
    assert_agrees(file_of("JPEG", exif=b"Exif\0\0" + block))
    assert_agrees(file_of("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08" + block))


def test_noise_is_left_to_pillow() -> None:
    for data in (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"GIF89a"):
        assert header.parse(data) is None
        with pytest.raises(BadSampleError):
            reference.read_header(data, NO_LIMITS)
