"""Resizing is Pillow's, to the last bit; patches are cut as they should be, whatever the layout."""

from __future__ import annotations

import os
from importlib.metadata import version

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from headrace.preprocessor.image import resample
from headrace.preprocessor.image.scratch import KEEP_BYTES, Scratch
from tests.examples import with_examples

BICUBIC = Image.Resampling.BICUBIC
SIDES = st.integers(1, 150)
THOROUGH = with_examples(250)


def picture(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """Noise with hard edges: every overshoot happens."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (height, width, 4), np.uint8)
    pixels[rng.random((height, width)) < 0.3] = 255
    pixels[rng.random((height, width)) < 0.3] = 0
    return pixels


def by_pillow(pixels: NDArray[np.uint8], *sizes: tuple[int, int]) -> NDArray[np.uint8]:
    plain = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
    for size in sizes:
        plain = plain.resize(size, BICUBIC)
    return np.asarray(plain)


@given(SIDES, SIDES, SIDES, SIDES)
@example(150, 100, 75, 50)
@example(33, 70, 33, 70)
@example(1, 1, 150, 150)
@example(150, 150, 1, 1)
@THOROUGH
def test_one_axis_then_the_other_as_pillow_does_each(old_width: int, old_height: int, width: int, height: int) -> None:
    """Of a single axis every version of Pillow makes the same."""
    pixels = picture(old_width, old_height)
    rows_first = height < old_height and 2 * (old_width - width) < old_height - height
    between = (old_width, height) if rows_first else (width, old_height)
    resized = resample.resize(pixels, width, height, Scratch())
    np.testing.assert_array_equal(resized[:, :, :3], by_pillow(pixels, between, (width, height)))


@pytest.mark.skipif(int(version("pillow").split(".")[0]) < 13, reason="earlier versions begin with the columns always")
@given(SIDES, SIDES, SIDES, SIDES)
@example(100, 100, 90, 80)  # as many twice over: columns first
@example(100, 100, 90, 79)
@THOROUGH
def test_both_axes_as_pillow_does(old_width: int, old_height: int, width: int, height: int) -> None:
    pixels = picture(old_width, old_height, seed=1)
    resized = resample.resize(pixels, width, height, Scratch())
    np.testing.assert_array_equal(resized[:, :, :3], by_pillow(pixels, (width, height)))


@pytest.mark.parametrize("name", ["bilinear", "lanczos"])
@pytest.mark.skipif(int(version("pillow").split(".")[0]) < 13, reason="earlier versions begin with the columns always")
@given(old=st.tuples(SIDES, SIDES), new=st.tuples(SIDES, SIDES))
@with_examples(100)
def test_other_filters_are_pillows(name: str, old: tuple[int, int], new: tuple[int, int]) -> None:
    pixels = picture(*old, seed=3)
    resized = resample.resize(pixels, *new, Scratch(), resample=name)
    plain = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
    np.testing.assert_array_equal(resized[:, :, :3], plain.resize(new, Image.Resampling[name.upper()]))


@pytest.mark.skipif(int(version("pillow").split(".")[0]) < 13, reason="earlier versions begin with the columns always")
@given(SIDES, SIDES, st.integers(1, 60), st.integers(1, 60), st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 0.875])] * 4))
@THOROUGH
def test_a_box_is_pillows(old_width: int, old_height: int, width: int, height: int, cut: tuple[float, ...]) -> None:
    """A pixel at an edge may lie in the box by a part."""
    pixels = picture(old_width + 1, old_height + 1, seed=2)
    left, top, right, bottom = cut[0], cut[1], old_width + 1 - cut[2], old_height + 1 - cut[3]
    plain = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
    resized = resample.resize(pixels, width, height, Scratch(), resample.Box(left, top, right - left, bottom - top))
    np.testing.assert_array_equal(resized[:, :, :3], plain.resize((width, height), BICUBIC, box=(left, top, right, bottom)))


def test_more_rows_than_are_turned_at_once() -> None:
    pixels = picture(901, 677)
    for size in ((896, 672), (448, 336), (1008, 700)):
        resized = resample.resize(pixels, *size, Scratch())
        rows_first = size[1] < 677 and 2 * (901 - size[0]) < 677 - size[1]
        between = (901, size[1]) if rows_first else (size[0], 677)
        np.testing.assert_array_equal(resized[:, :, :3], by_pillow(pixels, between, size))


def test_right_size_is_left_alone() -> None:
    pixels = picture(28, 56)
    assert resample.resize(pixels, 28, 56, Scratch()) is pixels


@given(st.integers(1, 34), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
@with_examples(120)
def test_patches_are_the_plain_transposition(patch: int, merge: int, rows: int, columns: int) -> None:
    pixels = picture(columns * merge * patch, rows * merge * patch)
    cells = pixels[:, :, :3].reshape(rows, merge, patch, columns, merge, patch, 3)
    room = np.full((rows * columns * merge**2 + 1, 3 * patch**2), 201, np.uint8)
    out, behind = room[:-1], room[-1]
    resample.to_patches(pixels, patch, merge, out)
    np.testing.assert_array_equal(out, cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(out.shape))
    assert (behind == 201).all()


def test_scratch_gives_the_same_memory_again_and_keeps_nothing_large() -> None:
    scratch = Scratch()
    first = scratch.take("a", 100, 4)
    assert np.shares_memory(first, scratch.take("a", 50, 4))
    assert not np.shares_memory(first, scratch.take("b", 100, 4))
    assert not np.shares_memory(first, scratch.take("a", 101, 4)), "it grew"
    large = scratch.take("a", KEEP_BYTES + 1)
    assert not np.shares_memory(large, scratch.take("a", KEEP_BYTES + 1))


def test_after_warm_up_every_loop_that_python_calls_is_compiled() -> None:
    """Those that loops call are a part of their machine code."""
    resample.warm_up()
    called = (resample._weigh, resample._blend_rows, resample._blend_columns, resample._cut)
    assert os.environ.get("NUMBA_DISABLE_JIT") == "1" or all(loop.signatures for loop in called)  # type: ignore[attr-defined]


def test_taps_that_are_kept_have_a_bound() -> None:
    resample._kept_taps.cache_clear()
    resample.resize(picture(400, 4), 100, 1, Scratch())
    kept = resample._kept_taps.cache_info()
    assert kept.currsize > 0
    assert kept.maxsize * resample._KEPT_BYTES <= 2**27
    large = resample._taps(100_000, 2_000, 0, 100_000, "lanczos")
    assert large.weights.nbytes > resample._KEPT_BYTES
    assert resample._kept_taps.cache_info().currsize == kept.currsize
