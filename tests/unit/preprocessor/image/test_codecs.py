"""The fast codec and the reference: the same pixels and the same refusals, file by file; and what is said of them."""

from __future__ import annotations

import io
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from headrace.preprocessor import image
from headrace.preprocessor.image import header, jpeg, reference
from headrace.preprocessor.image.grid import reduction
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import ImageSpec

SPEC = ImageSpec()
REDUCED = ImageSpec(max_pixels=28 * 28 * 16, reduced_scale=True)  # 112 pixels a side
IMAGES = sorted((Path(__file__).parents[3] / "data" / "hostile" / "images").iterdir())

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(jpeg.NAME is None, reason="simplejpeg is not installed"),
]


def photo(width: int = 213, height: int = 140) -> Image.Image:
    """Smooth, with some noise: what a JPEG is made for."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / 9 + y / 31), np.cos(x / 17), np.sin(y / 7)], axis=-1) * 90 + 128
    return Image.fromarray((waves + np.random.default_rng(0).normal(0, 6, waves.shape)).clip(0, 255).astype(np.uint8))


def encoded(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def fast(data: bytes) -> NDArray[np.uint8] | None:
    """What the fast codec alone makes of it."""
    parsed = header.parse(data)
    if parsed is None or not parsed.plain_jpeg:
        return None
    pixels = np.empty((parsed.height, parsed.width, 4), np.uint8)
    return pixels[:, :, :3] if jpeg.decode(data, pixels) else None


def outcome(data: bytes, spec: ImageSpec = SPEC) -> Reason | list[Any]:
    try:
        return list(image.decode(data, spec)[0].tolist())
    except BadSampleError as error:
        return error.reason


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"quality": 97}, {"quality": 20}, {"restart_marker_blocks": 3}, {"optimize": True}],
    ids=str,
)
def test_fast_pixels_are_the_references_to_the_last_bit(options: dict[str, Any], subsampling: int) -> None:
    data = encoded(photo(), subsampling=subsampling, **options)
    pixels = fast(data)
    assert pixels is not None
    np.testing.assert_array_equal(pixels, reference.decode(data, SPEC)[:, :, :3])


def test_grey_is_grey() -> None:
    data = encoded(photo().convert("L"))
    pixels = fast(data)
    assert pixels is not None
    np.testing.assert_array_equal(pixels, reference.decode(data, SPEC)[:, :, :3])
    assert (pixels[:, :, :1] == pixels).all()


def test_red_green_blue_without_transform() -> None:
    """A JPEG whose channels are no luma and chroma, as Adobe's marker says."""
    data = encoded(photo(), keep_rgb=True)
    np.testing.assert_array_equal(image.read_pixels(data, SPEC)[:, :, :3], reference.decode(data, SPEC)[:, :, :3])


@pytest.mark.parametrize("spec", [SPEC, REDUCED], ids=["full", "reduced"])
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_hostile_files_end_alike_with_and_without_the_fast_codec(
    path: Path, spec: ImageSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = path.read_bytes()
    with_it = outcome(data, spec)
    monkeypatch.setattr(jpeg, "_decode", None)
    assert outcome(data, spec) == with_it


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_hostile_files_end_alike_at_full_and_reduced_scale(path: Path) -> None:
    data = path.read_bytes()
    full, reduced = outcome(data, REDUCED.model_copy(update={"reduced_scale": False})), outcome(data, REDUCED)
    if isinstance(full, Reason):
        assert reduced is full
    else:
        assert isinstance(reduced, list)
        assert len(reduced) == len(full)


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("size", [(640, 480), (641, 483), (647, 479)], ids=str)
def test_reduced_pixels_are_the_references_too(size: tuple[int, int], subsampling: int, scale: int) -> None:
    data = encoded(photo(*size), subsampling=subsampling)
    pixels = np.empty((-(-size[1] // scale), -(-size[0] // scale), 4), np.uint8)
    assert jpeg.decode(data, pixels, scale)
    np.testing.assert_array_equal(pixels[:, :, :3], reference.decode(data, SPEC, scale)[:, :, :3])


@pytest.mark.parametrize(
    ("width", "height", "scale"),
    [(335, 335, 1), (336, 336, 2), (671, 671, 2), (672, 672, 4), (1343, 1343, 4), (1344, 1344, 8), (9000, 9000, 8), (63, 63, 1)],
)
def test_half_again_the_size_of_the_grid_is_left(width: int, height: int, scale: int) -> None:
    size = (8 * REDUCED.patch, 8 * REDUCED.patch)
    assert reduction(width, height, size, REDUCED) == scale
    assert reduction(width, height, size, SPEC) == 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_reduced_scale_shifts_nothing(orientation: int) -> None:
    """Sides that are no multiples of 4: the last pixel stands for one of the file, and lies first where the image is turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    large = photo().resize((893, 677), Image.Resampling.BICUBIC)
    data = encoded(large, exif=exif, quality=95)
    full, grid = image.decode(data, REDUCED.model_copy(update={"reduced_scale": False}))
    reduced, same_grid = image.decode(data, REDUCED)
    assert grid == same_grid == image.probe(data, REDUCED)
    assert 1 <= np.abs(full.astype(int) - reduced).max() <= 3


@pytest.mark.parametrize("progressive", [False, True])
def test_cut_anywhere_is_corrupt(progressive: bool) -> None:
    """The end marker is the last two bytes."""
    data = encoded(photo(), progressive=progressive)
    for end in [*range(700, len(data), 211), len(data) - 2, len(data) - 1]:
        assert outcome(data[:end]) is Reason.CORRUPT_MEDIA


def test_trailing_bytes_do_no_harm() -> None:
    data = encoded(photo())
    assert outcome(data + b"\0" * 100) == outcome(data)


def test_unusual_jpegs_are_left_to_the_reference() -> None:
    cmyk = encoded(photo().convert("CMYK"))
    mpo = encoded(photo(), "MPO", save_all=True, append_images=[photo(50, 40)])
    damaged = bytearray(encoded(photo(), restart_marker_blocks=4))
    damaged[-400] ^= 0xFF
    for data in (cmyk, mpo, bytes(damaged)):
        assert fast(data) is None
        np.testing.assert_array_equal(image.read_pixels(data, SPEC)[:, :, :3], reference.decode(data, SPEC)[:, :, :3])


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_whole_path_is_pillows(kind: str, orientation: int) -> None:
    """Decode, rotate, resize, cut; one axis after the other, see test_resample."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(), kind, exif=exif)
    with Image.open(io.BytesIO(data)) as opened:
        upright = ImageOps.exif_transpose(opened).convert("RGB")
    width, height = image.smart_resize(*upright.size, SPEC)
    loses = upright.height - height
    rows_first = loses > 0 and 2 * (upright.width - width) < loses
    between = (upright.width, height) if rows_first else (width, upright.height)
    resized = upright.resize(between, Image.Resampling.BICUBIC).resize((width, height), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(image.decode(data, SPEC)[0], image.to_patches(np.asarray(resized), SPEC))


def test_threads_do_not_share_scratch() -> None:
    files = [encoded(photo(100 + 13 * i, 300 - 11 * i), quality=90) for i in range(12)]
    alone = [image.decode(data, SPEC)[0] for data in files]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for patches, expected in zip(pool.map(lambda data: image.decode(data, SPEC)[0], files), alone, strict=True):
                np.testing.assert_array_equal(patches, expected)


def test_codecs_are_named_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    image.log_codecs.cache_clear()
    with caplog.at_level(logging.INFO):
        image.log_codecs()
        image.log_codecs()
    (line,) = caplog.messages
    assert line == f'image codecs jpeg="{jpeg.NAME}" other="{image.codecs()["other"]}"'
    caplog.clear()
    image.log_codecs.cache_clear()
    monkeypatch.setattr(jpeg, "NAME", None)
    with caplog.at_level(logging.WARNING):
        image.log_codecs()
    assert "simplejpeg is not installed" in caplog.messages[-1]
    assert image.codecs()["jpeg"] == image.codecs()["other"]


def test_a_pillow_that_lacks_formats_is_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples must be good or bad on every machine alike."""
    image.log_codecs.cache_clear()
    monkeypatch.setattr(reference, "LACKS", ("avif",))
    with caplog.at_level(logging.WARNING):
        image.log_codecs()
    assert "Pillow was built without avif" in caplog.messages[-1]
    image.log_codecs.cache_clear()
