"""Resizing and patches, compiled: bicubic with antialiasing, exactly as Pillow does it, in integers.

A pass over one axis makes every new line the sum of 2 * 2 * max(scale, 1) or a few more old ones (the cubic of Keys, 1981,
with a = -0.5), weighted in units of 2**-22, and rounds to 8 bits. Which axis goes first follows Pillow 13; earlier
versions always begin with the columns, and on charts that alone differs by up to 25 of 255. Integers make the result the
same on every machine, whatever its vector units.

Pixels are (height, width, 4), uint8, C-contiguous; the fourth byte has no meaning. All functions are thread-safe and
release the interpreter lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from preprocessor.image.scratch import Scratch

_Function = TypeVar("_Function", bound=Callable[..., Any])

_BITS = 22  # of a weight's fraction: 8 bits of pixel, 22 and a sign leave one bit for overshoot
_ROWS = 64  # rows that are turned and narrowed together: 256 lanes of the processor's vector units

Pixels = NDArray[np.uint8]


def _kernel(function: _Function) -> _Function:
    return cast(_Function, numba.njit(cache=True, nogil=True, fastmath=False)(function))


class Taps(NamedTuple):
    """Which old lines make each of n new ones; k: the most for any."""

    first: NDArray[np.int32]
    """(n,)"""
    length: NDArray[np.int32]
    """(n,)"""
    weights: NDArray[np.int32]
    """(n, k), in units of 2**-22"""


def resize(pixels: Pixels, width: int, height: int, scratch: Scratch) -> Pixels:
    """Pixels of shape (height, width, 4), in `scratch`; the same array where the size is right already."""
    if _rows_first(pixels, width, height):
        return _resize_width(_resize_height(pixels, height, scratch), width, scratch)
    return _resize_height(_resize_width(pixels, width, scratch), height, scratch)


def to_patches(pixels: Pixels, patch: int, merge: int, out: NDArray[np.uint8]) -> None:
    """Fill `out`, (patches, 3 * patch * patch), C-contiguous, from pixels with sides that are multiples of patch * merge.

    Channel first inside of a patch. The merge * merge patches that become one token are contiguous, row by row; so are the
    groups (NaViT packing, arXiv:2307.06304, in Qwen2-VL's order).
    """
    _cut(_words(pixels), patch, merge, out.reshape(len(out), 3, patch, patch))


def _rows_first(pixels: Pixels, width: int, height: int) -> bool:
    """Pillow 13's rule: where the height loses over twice as many pixels as the width."""
    return height < len(pixels) and 2 * (pixels.shape[1] - width) < len(pixels) - height


def _resize_height(pixels: Pixels, height: int, scratch: Scratch) -> Pixels:
    old_height, width, _ = pixels.shape
    if old_height == height:
        return pixels
    out = scratch.take("rows", height, width, 4)
    _blend_rows(pixels.reshape(old_height, -1), *_taps(old_height, height), out.reshape(height, -1))
    return out


def _resize_width(pixels: Pixels, width: int, scratch: Scratch) -> Pixels:
    height, old_width, _ = pixels.shape
    if old_width == width:
        return pixels
    out = scratch.take("columns", height, width, 4)
    _blend_columns(_words(pixels), *_taps(old_width, width), _words(out))
    return out


def _words(pixels: Pixels) -> NDArray[np.uint32]:
    """One word a pixel, red in its lowest byte; the same memory."""
    return pixels.view("<u4")[..., 0]


@lru_cache(maxsize=4096)
def _taps(size: int, new: int) -> Taps:
    scale = size / new
    stretch = max(scale, 1.0)
    support = 2.0 * stretch
    taps = Taps(
        first=np.empty(new, np.int32),
        length=np.empty(new, np.int32),
        weights=np.zeros((new, 2 * math.ceil(support) + 1), np.int32),
    )
    _weigh(size, scale, 1.0 / stretch, support, *taps)
    return taps


@_kernel
def _weigh(
    size: int,
    scale: float,
    shrink: float,
    support: float,
    first: NDArray[np.int32],
    length: NDArray[np.int32],
    weights: NDArray[np.int32],
) -> None:
    exact = np.empty(weights.shape[1])
    for new in range(len(first)):
        centre = (new + 0.5) * scale
        begin = max(int(centre - support + 0.5), 0)
        end = min(int(centre + support + 0.5), size)
        total = 0.0
        for i in range(end - begin):
            exact[i] = _cubic(abs((i + begin - centre + 0.5) * shrink))
            total += exact[i]
        for i in range(end - begin):
            weight = exact[i] / total * (1 << _BITS)
            weights[new, i] = int(weight + (0.5 if weight >= 0 else -0.5))
        first[new], length[new] = begin, end - begin


@_kernel
def _cubic(distance: float) -> float:
    if distance < 1.0:
        return (1.5 * distance - 2.5) * distance * distance + 1.0
    if distance < 2.0:
        return (((distance - 5.0) * distance + 8.0) * distance - 4.0) * -0.5
    return 0.0


@_kernel
def _blend(
    lines: NDArray[np.uint8], first: int, weights: NDArray[np.int32], sums: NDArray[np.int32], out: NDArray[np.uint8]
) -> None:
    """out = the weighted sum of the lines from `first` on; `sums` is scratch. The casts keep 32-bit lanes."""
    for i in range(len(sums)):
        sums[i] = 1 << (_BITS - 1)
    tap = 0
    while tap + 4 <= len(weights):
        w0, w1, w2, w3 = weights[tap], weights[tap + 1], weights[tap + 2], weights[tap + 3]
        a, b, c, d = lines[first + tap], lines[first + tap + 1], lines[first + tap + 2], lines[first + tap + 3]
        for i in range(len(sums)):
            left = np.int32(np.int32(w0 * np.int32(a[i])) + np.int32(w1 * np.int32(b[i])))
            right = np.int32(np.int32(w2 * np.int32(c[i])) + np.int32(w3 * np.int32(d[i])))
            sums[i] += np.int32(left + right)
        tap += 4
    while tap < len(weights):
        weight, line = weights[tap], lines[first + tap]
        for i in range(len(sums)):
            sums[i] += np.int32(weight * np.int32(line[i]))
        tap += 1
    for i in range(len(sums)):
        out[i] = min(max(sums[i] >> np.int32(_BITS), np.int32(0)), np.int32(255))


@_kernel
def _blend_rows(
    lines: NDArray[np.uint8],
    first: NDArray[np.int32],
    length: NDArray[np.int32],
    weights: NDArray[np.int32],
    out: NDArray[np.uint8],
) -> None:
    """(old height, bytes) to (height, bytes)."""
    sums = np.empty(lines.shape[1], np.int32)
    for row in range(len(first)):
        _blend(lines, first[row], weights[row, : length[row]], sums, out[row])


@_kernel
def _blend_columns(
    words: NDArray[np.uint32],
    first: NDArray[np.int32],
    length: NDArray[np.int32],
    weights: NDArray[np.int32],
    out: NDArray[np.uint32],
) -> None:
    """(height, old width) to (height, width): turn some rows, blend them as rows, turn back."""
    turned = np.zeros((words.shape[1], _ROWS), np.uint32)
    narrow = np.empty((len(first), _ROWS), np.uint32)
    lines, results = turned.view(np.uint8), narrow.view(np.uint8)
    sums = np.empty(4 * _ROWS, np.int32)
    for top in range(0, len(words), _ROWS):
        rows = min(_ROWS, len(words) - top)
        for column in range(words.shape[1]):
            for row in range(rows):
                turned[column, row] = words[top + row, column]
        for column in range(len(first)):
            _blend(lines, first[column], weights[column, : length[column]], sums, results[column])
        for column in range(len(first)):
            for row in range(rows):
                out[top + row, column] = narrow[column, row]


@_kernel
def _cut(words: NDArray[np.uint32], patch: int, merge: int, out: NDArray[np.uint8]) -> None:
    """`out`: (patches, 3, patch, patch)."""
    columns = words.shape[1] // patch
    for row in range(words.shape[0] // patch):
        group = row // merge * columns * merge + row % merge * merge  # this row's first patch
        for column in range(columns):
            to = group + column // merge * merge * merge + column % merge
            for y in range(patch):
                for x in range(patch):
                    word = words[row * patch + y, column * patch + x]
                    out[to, 0, y, x] = np.uint8(word)
                    out[to, 1, y, x] = np.uint8(word >> np.uint32(8))
                    out[to, 2, y, x] = np.uint8(word >> np.uint32(16))
