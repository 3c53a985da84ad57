"""Thumbnails of refused images: what can be seen of damage, nothing of what would take memory or time, and a budget."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.preprocessor import image
from headrace.preprocessor.image.thumbnail import (
    AT_ONCE,
    EVERY_S,
    MOST_PIXELS,
    MOST_REDUCED_PIXELS,
    ThumbnailBudget,
    may_have_thumbnail,
    thumbnail_of,
)
from headrace.quarantine import BadSampleError
from headrace.spec import ImageSpec
from headrace.thumbnail_check import is_thumbnail

HOSTILE = Path(__file__).parents[3] / "data" / "hostile"
CASES = [
    case for case in json.loads((HOSTILE / "expectations.json").read_text())["cases"] if case["modality"] in ("image", "audio")
]
SEEN = {
    "truncated_jpeg",
    "jpeg_half_with_eoi",
    "progressive_jpeg_half_with_eoi",
    "jpeg_missing_eoi",
    "png_bad_crc",
    "png_bad_pixel_crc",
    "png_half_of_the_rows",
    "very_wide",
    "very_tall",
}
"""Refused images of which something can be seen."""


def file_of(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def pixels_of(thumbnail: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(thumbnail)).convert("RGB")).astype(int)


def refused(data: bytes) -> bool:
    try:
        image.decode(data, ImageSpec())
    except BadSampleError:
        return True
    return False


def test_of_the_hostile_files_that_are_refused_those_show_something_that_can() -> None:
    bad = {case["case"]: (HOSTILE / case["path"]).read_bytes() for case in CASES}
    bad = {name: data for name, data in bad.items() if refused(data)}
    thumbnails = {name: thumbnail_of(data) for name, data in bad.items()}
    assert {name for name, found in thumbnails.items() if found} == SEEN
    assert all(is_thumbnail(found) for found in thumbnails.values() if found)


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {"quality": 95}), ("PNG", {})])
def test_what_is_cut_off_shows_what_comes_before(kind: str, options: dict[str, Any]) -> None:
    noise = np.random.default_rng(0).integers(0, 40, (300, 200, 3), np.uint8)
    noise[:, :, 0] += 200  # red all over
    whole = file_of(Image.fromarray(noise), kind, **options)
    top_and_bottom = pixels_of(thumbnail_of(whole[: len(whole) // 2]))[[1, -2]].mean(axis=1)
    assert top_and_bottom[0][0] > 180 > 60 > top_and_bottom[0][1]
    assert np.ptp(top_and_bottom[1]) < 10  # nobody knows its colour


def test_transparent_pictures_are_on_white() -> None:
    clear = file_of(Image.new("RGBA", (80, 40), (255, 0, 0, 0)), "PNG")
    assert pixels_of(thumbnail_of(clear)).shape == (32, 64, 3)
    assert pixels_of(thumbnail_of(clear)).min() > 250


@pytest.mark.parametrize("options", [{}, {"lossless": True}])
def test_a_simple_webp_has_one(options: dict[str, bool]) -> None:
    data = file_of(Image.new("RGB", (300, 100), "green"), "WEBP", **options)
    assert pixels_of(thumbnail_of(data)).shape == (21, 64, 3)
    assert not may_have_thumbnail(data[:-5])  # what its header says is not so


def test_noise_gets_small_enough() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    assert is_thumbnail(thumbnail_of(file_of(Image.fromarray(noise), "PNG")))


def saying(jpeg: bytes, width: int, height: int) -> bytes:
    """The JPEG with another size in its header: a decoder fills up what is missing."""
    at = next(found for marker in (b"\xff\xc0", b"\xff\xc2") if (found := jpeg.find(marker)) > 0) + 5
    return jpeg[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + jpeg[at + 4 :]


def test_more_pixels_than_the_bound_are_not_decoded() -> None:
    side = int(MOST_PIXELS**0.5)
    assert thumbnail_of(file_of(Image.new("1", (side, side)), "PNG"))
    assert not thumbnail_of(file_of(Image.new("1", (side, side + 1)), "PNG"))
    picture = Image.new("RGB", (64, 64), "teal")
    baseline, progressive = file_of(picture, "JPEG"), file_of(picture, "JPEG", progressive=True)
    assert thumbnail_of(saying(baseline, 8192, MOST_REDUCED_PIXELS // 8192))
    assert not thumbnail_of(saying(baseline, 8192, MOST_REDUCED_PIXELS // 8192 + 1))
    assert thumbnail_of(saying(progressive, side, side))
    assert not thumbnail_of(saying(progressive, side, side + 1))


def test_a_jpeg_of_very_many_scans_is_not_decoded() -> None:
    data = file_of(Image.new("RGB", (64, 64), "teal"), "JPEG", progressive=True)
    scan = data.rindex(b"\xff\xda")
    assert not thumbnail_of(data[:scan] + data[scan:-2] * 100 + data[-2:])


def test_the_budget_has_so_many_at_once_and_then_one_every_so_often() -> None:
    now_s = 5.0
    budget = ThumbnailBudget(lambda: now_s)
    assert [budget.take() for _ in range(AT_ONCE + 1)] == [True] * AT_ONCE + [False]
    now_s += EVERY_S
    assert [budget.take() for _ in range(2)] == [True, False]
    now_s += 1000 * AT_ONCE * EVERY_S
    assert sum(budget.take() for _ in range(2 * AT_ONCE)) == AT_ONCE
