"""AVIF, JPEG 2000 and PNM have Pillow's pixels, and no frame or record beyond what their headers say; pixels of 32 bits."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from headrace.preprocessor import image
from headrace.preprocessor.image import avif, jpeg2000
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import ImageSpec

SPEC = ImageSpec()
Y, X = np.mgrid[0:60, 0:90]
COLOUR = Image.fromarray(np.stack([X * 2, Y * 4, (X + Y) % 256], axis=-1).astype(np.uint8))


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def by_pillow(data: bytes) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(data)) as opened:
        return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))


def reason_of(data: bytes, spec: ImageSpec = SPEC) -> Reason:
    with pytest.raises(BadSampleError) as caught:
        image.decode(data, spec)
    return caught.value.reason


@pytest.mark.parametrize("options", [{}, {"quality": 100, "subsampling": "4:4:4"}, {"subsampling": "4:0:0"}], ids=str)
@pytest.mark.parametrize("orientation", [1, 2, 6])
def test_avif_is_pillows(options: dict[str, Any], orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(COLOUR, "AVIF", exif=exif, **options)
    rgb = image.read_pixels(data, SPEC)[:, :, :3]
    np.testing.assert_array_equal(rgb, by_pillow(data))
    assert image.read_size(data, SPEC) == rgb.shape[1::-1]


def test_transparent_avif_lies_on_the_background() -> None:
    see_through = Image.new("RGBA", (64, 64), (200, 10, 10, 0))
    rgb = image.read_pixels(encoded(see_through, "AVIF", quality=90), ImageSpec(background=(1, 2, 3)))
    assert rgb[20, 20, :3].tolist() == [1, 2, 3]


def test_avif_frames_are_counted_and_not_believed_from_the_container() -> None:
    data = encoded(COLOUR, "AVIF")
    assert avif.pixel_bytes(data, 90, 60) < 24
    assert avif.pixel_bytes(data, 9, 6) > 900
    both = encoded(Image.merge("RGBA", (*COLOUR.split(), COLOUR.convert("L"))), "AVIF")
    assert avif.pixel_bytes(both, 90, 60) > avif.pixel_bytes(data, 90, 60)


def test_an_avif_with_two_directories_or_very_many_parts_is_damaged() -> None:
    data = encoded(COLOUR, "AVIF")
    for extents in (0, 65_535):
        places = struct.pack(">BBHBBH", 0, 0, 0, 0, 0x10, 1) + struct.pack(">HHBH", 1, 0, 1, extents)
        directory = bytes(4) + struct.pack(">I4s", 8 + len(places), b"iloc") + places
        hidden = data + struct.pack(">I4s", 8 + len(directory), b"meta") + directory
        with pytest.raises(BadSampleError, match=r"corrupt_media: .* has two of one box"):
            avif.pixel_bytes(hidden, 90, 60)
    with pytest.raises(BadSampleError, match=r"corrupt_media: .* has 65535 parts"):
        list(avif._item_places(places))


@pytest.mark.parametrize("brand", [b"avis", b"heic", b"mif1", b"isom"])
def test_films_and_relatives_of_avif_are_refused(brand: bytes) -> None:
    data = encoded(COLOUR, "AVIF")
    kept = data.replace(b"avif", brand) if brand == b"mif1" else data[:8] + brand + data[12:]
    assert reason_of(kept) is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"irreversible": True},
        {"no_jp2": True},
        {"tile_size": (32, 32)},
        {"num_resolutions": 3, "codeblock_size": (32, 32)},
        {"precinct_size": (128, 128)},
        {"quality_layers": [20, 5, 1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_jpeg_2000_is_pillows(options: dict[str, Any], mode: str) -> None:
    data = encoded(COLOUR.convert(mode), "JPEG2000", **options)
    np.testing.assert_array_equal(image.read_pixels(data, SPEC)[:, :, :3], by_pillow(data))
    assert image.read_size(data, SPEC) == (90, 60)


def test_16_bit_jpeg_2000_is_scaled() -> None:
    values = (X * 700 + Y).astype(np.uint16)
    rgb = image.read_pixels(encoded(Image.fromarray(values), "JPEG2000"), SPEC)
    np.testing.assert_array_equal(rgb[:, :, 0], (values.astype(int) + 128) // 257)


def test_small_precincts_and_blocks_of_jpeg_2000_cost_memory(hostile: Path) -> None:
    plain = jpeg2000.pixel_bytes(encoded(COLOUR, "JPEG2000"), 90, 60)
    assert jpeg2000.pixel_bytes(encoded(COLOUR, "JPEG2000", codeblock_size=(4, 4)), 90, 60) > 3 * plain
    bomb = (hostile / "images" / "bomb_precincts_8000x8000.j2k").read_bytes()
    assert jpeg2000.pixel_bytes(bomb, 8000, 8000) > 500


def test_a_jpeg_2000_whose_parts_disagree_is_corrupt() -> None:
    data = bytearray(encoded(COLOUR, "JPEG2000"))
    size = data.index(b"\xff\x4f\xff\x51") + 8
    data[size : size + 4] = (91).to_bytes(4, "big")
    assert reason_of(bytes(data)) is Reason.CORRUPT_MEDIA


@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_pnm_is_pillows(mode: str) -> None:
    data = encoded(COLOUR.convert(mode), "PPM")
    np.testing.assert_array_equal(image.read_pixels(data, SPEC)[:, :, :3], by_pillow(data))


@pytest.mark.parametrize(
    "data",
    [
        b"P1\n2 2\n1 0 0 1\n",
        b"P3\n1 1\n255\n1 2 3\n",
        b"P6\n2 2\n65535\n" + bytes(24),
        b"P5\n2 2\n1023\n" + bytes(8),
        b"PyP\n2 2\n255\n" + bytes(4),
        b"P0CMYK\n2 2\n255\n" + bytes(16),
    ],
    ids=lambda data: repr(data[:6]),
)
def test_pnm_that_takes_minutes_or_has_no_standard_is_refused(data: bytes) -> None:
    assert reason_of(data) is Reason.UNSUPPORTED_MEDIA


def pfm(values: np.ndarray[Any, Any]) -> bytes:
    return b"Pf\n%d %d\n-1.0\n" % values.shape[::-1] + values[::-1].astype("<f4").tobytes()


def test_16_bit_pgm_is_scaled() -> None:
    values = (X * 700 + Y).astype(np.uint16)
    rgb = image.read_pixels(b"P5\n90 60\n65535\n" + values.astype(">u2").tobytes(), SPEC)
    np.testing.assert_array_equal(rgb[:, :, 0], (values.astype(int) + 128) // 257)


def test_floats_from_0_to_1_are_black_to_white() -> None:
    values = (X / 89).astype(np.float32)
    for data in (pfm(values), encoded(Image.fromarray(values), "TIFF")):
        rgb = image.read_pixels(data, SPEC)
        np.testing.assert_array_equal(rgb[:, :, 0], np.rint(values * np.float32(255)))


@pytest.mark.parametrize("value", [-0.001, 1.001, 255.0, np.nan, np.inf])
def test_floats_without_a_known_white_are_refused(value: float) -> None:
    values = np.zeros((60, 90), np.float32)
    values[59, 89] = value
    assert reason_of(pfm(values)) is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize(("least", "most", "taken"), [(0, 65_535, True), (-1, 255, False), (0, 65_536, False)])
def test_integers_of_32_bits_count_as_of_16(least: int, most: int, taken: bool) -> None:
    values = np.full((60, 90), least, np.int32)
    values[0, 0] = most
    data = encoded(Image.fromarray(values), "TIFF")
    if taken:
        assert image.read_pixels(data, SPEC)[0, :2, 0].tolist() == [255, 0]
    else:
        assert reason_of(data) is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize("kind", ["AVIF", "JPEG2000", "PPM"])
def test_cut_and_changed_files_are_refused_or_agree(kind: str) -> None:
    sound, rng = encoded(COLOUR, kind), np.random.default_rng(2)
    assert reason_of(sound[: len(sound) * 2 // 3]) is Reason.CORRUPT_MEDIA
    for _ in range(150):
        data = bytearray(sound)
        for position in rng.integers(0, min(len(sound), 400), rng.integers(1, 4)):
            data[position] = rng.integers(0, 256)
        if rng.random() < 0.3:
            del data[rng.integers(1, len(data)) :]
        try:
            patches, grid = image.decode(bytes(data), SPEC)
        except BadSampleError:
            continue
        assert image.probe(bytes(data), SPEC) == grid
        assert len(patches) == grid.patches
