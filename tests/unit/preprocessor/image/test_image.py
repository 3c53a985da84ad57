"""Images: Qwen2-VL's grid, patches in its order, every mode and rotation, and agreement of probe and decode."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from headrace.preprocessor import image
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import ImageSpec

SPEC = ImageSpec()
RNG = np.random.default_rng(0)


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)


def rgb_of(data: bytes, spec: ImageSpec = SPEC) -> NDArray[np.uint8]:
    """(height, width, 3)"""
    return image.read_pixels(data, spec)[:, :, :3]


def refusal(data: bytes, spec: ImageSpec = SPEC) -> Reason:
    """The reason of probe and of decode."""
    reasons = []
    for read in (image.probe, image.decode):
        with pytest.raises(BadSampleError) as caught:
            read(data, spec)
        reasons.append(caught.value.reason)
    assert reasons[0] is reasons[1]
    return reasons[0]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((28, 28), (56, 56)),  # below min_pixels
        ((1, 1), (56, 56)),
        ((400, 300), (392, 308)),
        ((42, 98), (56, 112)),  # 1.5 and 3.5 units, half to even: 2 and 4
        ((70, 98), (56, 112)),  # 2.5 and 3.5 units: 2 and 4
        ((5000, 5000), (980, 980)),  # above max_pixels, floored
        ((10, 2000), (28, 1988)),  # 0 units and 71: too small, grown by 0.396
    ],
)
def test_smart_resize(size: tuple[int, int], expected: tuple[int, int]) -> None:
    if size == (10, 2000):
        factor = math.sqrt(SPEC.min_pixels / 20_000)
        expected = (math.ceil(10 * factor / 28) * 28, math.ceil(2000 * factor / 28) * 28)
    assert image.smart_resize(*size, SPEC) == expected


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_smart_resize_gives_units_within_bounds(width: int, height: int) -> None:
    new_width, new_height = image.smart_resize(width, height, SPEC)
    assert new_width % 28 == new_height % 28 == 0
    assert new_width >= 28
    assert new_height >= 28
    assert new_width * new_height >= SPEC.min_pixels
    if min(new_width, new_height) > 28:
        assert new_width * new_height <= SPEC.max_pixels
    assert image.smart_resize(height, width, SPEC) == (new_height, new_width)


def test_patches_are_in_groups_channel_first() -> None:
    """Against the plain loop over groups, patches in a group, channels and pixels."""
    spec = ImageSpec(patch=2, merge=2)
    pixels = RNG.integers(0, 256, (8, 12, 3), np.uint8)
    expected = [
        pixels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].transpose(2, 0, 1).reshape(-1)
        for group_row in range(2)
        for group_column in range(3)
        for row in (2 * group_row, 2 * group_row + 1)
        for column in (2 * group_column, 2 * group_column + 1)
    ]
    np.testing.assert_array_equal(image.to_patches(pixels, spec), expected)


def test_patches_go_where_the_caller_says() -> None:
    data = encoded(noise(100, 60), "JPEG")
    room = np.zeros((40, 588), np.uint8)
    patches, _ = image.decode(data, SPEC, room[4:36])
    assert np.shares_memory(patches, room)
    np.testing.assert_array_equal(room[4:36], image.decode(data, SPEC)[0])
    assert not room[:4].any()
    assert not room[36:].any()
    for wrong in (room[:31], room[::-1][:32].T.copy().T):
        with pytest.raises(ValueError, match=r"contiguous and of shape \(32, 588\)"):
            image.decode(data, SPEC, wrong)


def test_a_result_is_not_touched_by_the_next_image() -> None:
    """Scratch memory is used again; results are not in it."""
    first, second = (encoded(noise(112, 112), "JPEG", quality=95) for _ in range(2))  # no resizing
    patches, pixels = image.decode(first, SPEC)[0], image.read_pixels(first, SPEC)
    kept = patches.copy(), pixels.copy()
    image.decode(second, SPEC)
    image.read_pixels(second, SPEC)
    np.testing.assert_array_equal(patches, kept[0])
    np.testing.assert_array_equal(pixels, kept[1])


def test_decode_is_resize_and_patches() -> None:
    picture = noise(100, 60)
    patches, grid = image.decode(encoded(picture, "PNG"), SPEC)
    assert (grid.height, grid.width, grid.patches, grid.tokens(2)) == (4, 8, 32, 8)
    assert patches.dtype == np.uint8
    assert patches.shape == (32, 588)
    resized = np.asarray(picture.resize((112, 56), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(patches, image.to_patches(resized, SPEC))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM"])
def test_formats(kind: str) -> None:
    assert rgb_of(encoded(noise(40, 30), kind)).shape == (30, 40, 3)


@pytest.mark.parametrize("kind", ["ICO", "PDF"])
def test_other_formats_are_unsupported(kind: str) -> None:
    assert refusal(encoded(noise(40, 30), kind)) is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize("head", [b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", b"\xff\x0a\xfa\x1f", b"8BPS\0\1", b"<svg xmlns"])
def test_formats_that_pillow_cannot_read_are_refused_by_name(head: bytes) -> None:
    assert refusal(head + bytes(40)) is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_png_modes(mode: str) -> None:
    grey = Image.fromarray(np.full((30, 40), 128, np.uint8))
    picture = Image.fromarray(np.full((30, 40), 128 * 257, np.uint16)) if mode == "I;16" else grey.convert(mode)
    rgb = rgb_of(encoded(picture, "PNG"))
    assert rgb.shape == (30, 40, 3)
    assert abs(rgb.mean() - 128) < 1.5


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    values = np.array([[0, 256, 257, 32_896, 65_278, 65_535]], np.uint16).repeat(4, axis=0)
    rgb = rgb_of(encoded(Image.fromarray(values), "PNG"))
    assert rgb[0, :, 0].tolist() == [0, 1, 1, 128, 254, 255]


@pytest.mark.parametrize(("mode", "transparency"), [("P", 0), ("L", 7), ("RGB", (7, 7, 7))])
def test_transparent_colour_key(mode: str, transparency: Any) -> None:
    picture = Image.new(mode, (40, 30), 0 if mode == "P" else transparency)
    data = encoded(picture, "PNG", transparency=transparency)
    assert rgb_of(data, ImageSpec(background=(1, 2, 3)))[5, 5].tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_exif_orientation(kind: str, orientation: int) -> None:
    """As Pillow's own exif_transpose, where that one looks at the same block."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(100, 30), kind, exif=exif)
    with Image.open(io.BytesIO(data)) as plain:
        expected = ImageOps.exif_transpose(plain).convert("RGB")
    rgb = rgb_of(data)
    assert rgb.shape[1::-1] == image.read_size(data, SPEC) == expected.size
    np.testing.assert_array_equal(rgb, np.asarray(expected))


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.binary(max_size=60))
def test_any_exif_block_is_survived(block: bytes) -> None:
    data = encoded(noise(40, 30), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08" + block)
    assert image.read_size(data, SPEC) in ((40, 30), (30, 40))


def test_multi_picture_jpeg_is_its_first_picture() -> None:
    """Phones write MPO: a JPEG with previews behind it."""
    data = encoded(noise(64, 48), "MPO", save_all=True, append_images=[noise(32, 24)])
    patches, grid = image.decode(data, SPEC)
    assert image.read_size(data, SPEC) == (64, 48)
    assert len(patches) == grid.patches == image.probe(data, SPEC).patches


def test_limits() -> None:
    assert refusal(b"") is Reason.EMPTY_MEDIA
    assert refusal(encoded(noise(201, 1), "PNG")) is Reason.BAD_ASPECT_RATIO
    for kind in ("PNG", "JPEG"):
        assert refusal(encoded(noise(40, 31), kind), ImageSpec(min_source_side=32)) is Reason.TOO_SMALL
        assert image.probe(encoded(noise(40, 32), kind), ImageSpec(min_source_side=32)).patches > 0
    assert image.probe(encoded(noise(200, 1), "PNG"), SPEC).patches > 0
    assert refusal(encoded(noise(50, 50), "WEBP"), ImageSpec(max_source_pixels=2499)) is Reason.TOO_LARGE
    assert refusal(encoded(noise(50, 50), "WEBP", lossless=True), ImageSpec(max_source_pixels=2499)) is Reason.TOO_LARGE


@pytest.mark.parametrize(
    "name", ["good.jpg", "progressive.jpg", "rgba.png", "palette_alpha.png", "animated.webp", "animated.gif"]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_bytes_are_refused_or_agree(name: str, hostile: Path) -> None:
    """Flips and cuts: either a BadSampleError, or a decoded image of the size that the probe told."""
    sound = (hostile / "images" / name).read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(60):
        data = bytearray(sound)
        for position in rng.integers(0, min(len(sound), 1000), 3):
            data[position] = rng.integers(0, 256)
        if rng.random() < 0.3:
            del data[rng.integers(1, len(data)) :]
        try:
            patches, grid = image.decode(bytes(data), SPEC)
        except BadSampleError:
            continue
        assert image.probe(bytes(data), SPEC) == grid
        assert len(patches) == grid.patches
