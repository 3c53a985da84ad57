"""Resizing and cutting into patches, compiled: with antialiasing, exactly as Pillow does it, in integers.

A pass over one axis computes every new line as the weighted sum of 2 * reach * max(scale, 1), or a few more, old ones (with the
weights of the bilinear filter, of the cubic of Keys, 1981, with a = -0.5, or of Lanczos with three lobes, in units of 2**-22) and
rounds it to 8 bits. Which axis goes first follows Pillow 13; earlier versions always begin with the columns, and on charts that
alone makes a difference of up to 25 of 255. Integers make the result the same on every machine, whatever its vector units.

Pixels are (height, width, 4), uint8, C-contiguous; the fourth byte has no meaning. All functions are thread-safe and
release the interpreter lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from headrace.jit import kernel
from headrace.preprocessor.image.scratch import Scratch

_BITS = 22  # fraction bits of a weight: 8 bits of pixel, 22 and a sign leave one bit for overshoot
_LANES = 32  # bytes of a line blended at once
_ROWS = _LANES // 4  # rows transposed and narrowed together
_PIXELS = 16  # pixels of a line split into channels at once
_AHEAD = 1176  # bytes between what is written and what is prefetched
_CACHE_LINE = 64
_KEPT_BYTES = 2**17  # largest weights that are kept, of which a thousand are: those from 4,000 lines to 1,000 have 68 KB

_REACH = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
"""Filters by their names in a spec, and how many old lines each reaches to either side where nothing is shrunk."""

Pixels = NDArray[np.uint8]


class Box(NamedTuple):
    """The part of the pixels that is resized, in pixels; its edges may cut through a pixel."""

    left: float
    top: float
    width: float
    height: float


class Taps(NamedTuple):
    """Which old lines are summed into each of n new ones, and their weights; k: most old lines of any new one."""

    first: NDArray[np.int32]
    """First old line of each new one, shape (n,)."""
    length: NDArray[np.int32]
    """Number of old lines of each new one, shape (n,)."""
    weights: NDArray[np.int32]
    """Weight of each old line, shape (n, k), in units of 2**-22."""


def resize(
    pixels: Pixels, width: int, height: int, scratch: Scratch, box: Box | None = None, resample: str = "bicubic"
) -> Pixels:
    """Resize pixels, or the `box` of them, to shape (height, width, 4), by the filter `resample`: bilinear, bicubic or lanczos.

    The result may lie in `scratch`; it is `pixels` itself if they have the size already.
    """
    box = box or Box(0, 0, pixels.shape[1], pixels.shape[0])
    if _rows_first(pixels, width, height):
        return _resize_width(_resize_height(pixels, height, scratch, box, resample), width, scratch, box, resample)
    return _resize_height(_resize_width(pixels, width, scratch, box, resample), height, scratch, box, resample)


def to_patches(pixels: Pixels, patch: int, merge: int, out: NDArray[np.uint8]) -> None:
    """Cut pixels, with sides that are multiples of patch * merge, into `out`: (patches, 3 * patch * patch), C-contiguous.

    Each patch is channel-first. The merge * merge patches that become one token are contiguous, row by row; so are these
    groups (NaViT packing, arXiv:2307.06304, in Qwen2-VL's order).
    """
    _cut(_words(pixels), patch, merge, out.reshape(-1))


def warm_up() -> None:
    """Compile all kernels, once when a container image or an installation is set up, so that no first picture waits for it."""
    out, scratch = np.empty((4, 588), np.uint8), Scratch()
    to_patches(resize(np.zeros((64, 64, 4), np.uint8), 28, 28, scratch), 14, 2, out)


def _rows_first(pixels: Pixels, width: int, height: int) -> bool:
    """Whether to resize the height first: Pillow 13 does so if it loses over twice as many pixels as the width."""
    return height < len(pixels) and 2 * (pixels.shape[1] - width) < len(pixels) - height


def _resize_height(pixels: Pixels, height: int, scratch: Scratch, box: Box, resample: str) -> Pixels:
    old_height, width, _ = pixels.shape
    if old_height == height == box.height:
        return pixels
    if width < _ROWS:
        wide = np.zeros((old_height, _ROWS, 4), np.uint8)
        wide[:, :width] = pixels
        return np.ascontiguousarray(_resize_height(wide, height, scratch, box, resample)[:, :width])
    out = scratch.take("rows", height, width, 4)
    taps = _taps(old_height, height, box.top, box.height, resample)
    _blend_rows(pixels.reshape(old_height, -1), *taps, out.reshape(height, -1))
    return out


def _resize_width(pixels: Pixels, width: int, scratch: Scratch, box: Box, resample: str) -> Pixels:
    height, old_width, _ = pixels.shape
    if old_width == width == box.width:
        return pixels
    out = scratch.take("columns", height, width, 4)
    _blend_columns(_words(pixels), *_taps(old_width, width, box.left, box.width, resample), _words(out))
    return out


def _words(pixels: Pixels) -> NDArray[np.uint32]:
    """View pixels as one word each, red in its lowest byte, on the same memory."""
    return pixels.view("<u4")[..., 0]


def _taps(size: int, new: int, start: float, extent: float, resample: str) -> Taps:
    """Return the taps that make `new` lines from the part of `size` lines that begins at `start` and is `extent` long.

    Large ones, which are made in a small part of the time in which they are used, are made every time.
    """
    stretch = max(extent / new, 1.0)
    num_bytes = 4 * new * (2 * math.ceil(_REACH[resample] * stretch) + 1)
    return (_kept_taps if num_bytes <= _KEPT_BYTES else _made_taps)(size, new, start, extent, resample)


def _made_taps(size: int, new: int, start: float, extent: float, resample: str) -> Taps:
    scale = extent / new
    stretch = max(scale, 1.0)
    support = _REACH[resample] * stretch
    taps = Taps(
        first=np.empty(new, np.int32),
        length=np.empty(new, np.int32),
        weights=np.zeros((new, 2 * math.ceil(support) + 1), np.int32),
    )
    _weigh(size, float(start), scale, 1.0 / stretch, support, _REACH[resample], *taps)
    return taps


_kept_taps = lru_cache(maxsize=1024)(_made_taps)


@kernel
def _weigh(
    size: int,
    start: float,
    scale: float,
    shrink: float,
    support: float,
    reach: float,
    first: NDArray[np.int32],
    length: NDArray[np.int32],
    weights: NDArray[np.int32],
) -> None:
    exact = np.empty(weights.shape[1])
    for new in range(len(first)):
        centre = start + (new + 0.5) * scale
        begin = max(int(centre - support + 0.5), 0)
        end = min(int(centre + support + 0.5), size)
        total = 0.0
        for i in range(end - begin):
            exact[i] = _filter(abs((i + begin - centre + 0.5) * shrink), reach)
            total += exact[i]
        for i in range(end - begin):
            weight = exact[i] / total * (1 << _BITS)
            weights[new, i] = int(weight + (0.5 if weight >= 0 else -0.5))
        first[new], length[new] = begin, end - begin


@kernel
def _filter(distance: float, reach: float) -> float:
    """Return the weight at a distance of the filter with that reach, of which each has another."""
    if reach == 1.0:
        return max(0.0, 1.0 - distance)
    if reach == 2.0:
        return _cubic(distance)
    return _sinc(distance) * _sinc(distance / 3.0) if distance < 3.0 else 0.0


@kernel
def _sinc(distance: float) -> float:
    return math.sin(distance * math.pi) / (distance * math.pi) if distance != 0.0 else 1.0


@kernel
def _cubic(distance: float) -> float:
    if distance < 1.0:
        return (1.5 * distance - 2.5) * distance * distance + 1.0
    if distance < 2.0:
        return (((distance - 5.0) * distance + 8.0) * distance - 4.0) * -0.5
    return 0.0


def _blending(
    _context: Any, lines: Any, _start: Any, _stride: Any, weights: Any, _first: Any, _length: Any, out: Any, _to: Any
) -> tuple[Any, Any]:
    """Generate the intrinsic `_blend(lines, start, stride, weights, first, length, out, to)`, which does, for i < _LANES:

    out[to + i] = the rounded sum over t < length of weights[first + t] * lines[start + t * stride + i]

    Arrays are flat, and no bounds are checked. It is written out as vectors, for any processor: from a loop over the lanes with
    a loop over the lines in it, LLVM makes code that keeps the sums in memory and takes twice the time.
    """
    signature = types.void(lines, types.intp, types.intp, weights, types.intp, types.intp, out, types.intp)
    word = ir.IntType(32)
    bytes_, words = ir.VectorType(ir.IntType(8), _LANES), ir.VectorType(word, _LANES)

    def constant(value: int) -> ir.Constant:
        return ir.Constant(words, [value] * _LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def place(array: int, index: Any) -> Any:
            data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
            return builder.gep(data, [index])

        def splat(value: Any) -> Any:
            anything = ir.Constant(words, ir.Undefined)
            return builder.shuffle_vector(builder.insert_element(anything, value, ir.Constant(word, 0)), anything, constant(0))

        _, start, stride, _, first, length, _, to = arguments
        sums = cgutils.alloca_once_value(builder, constant(1 << (_BITS - 1)))  # type: ignore[no-untyped-call]
        with cgutils.for_range(builder, length) as loop:
            line = place(0, builder.add(start, builder.mul(loop.index, stride)))
            lanes = builder.load(builder.bitcast(line, bytes_.as_pointer()), align=1)
            weight = splat(builder.load(place(3, builder.add(first, loop.index))))
            builder.store(builder.add(builder.load(sums), builder.mul(builder.zext(lanes, words), weight)), sums)
        result = builder.ashr(builder.load(sums), constant(_BITS))
        for limit, beyond in ((0, "<"), (255, ">")):
            result = builder.select(builder.icmp_signed(beyond, result, constant(limit)), constant(limit), result)
        builder.store(builder.trunc(result, bytes_), builder.bitcast(place(6, to), bytes_.as_pointer()), align=1)
        return context.get_dummy_value()

    return signature, generate


_blend = cast(Callable[..., None], intrinsic(_blending))


@kernel
def _blend_rows(
    lines: NDArray[np.uint8],
    first: NDArray[np.int32],
    length: NDArray[np.int32],
    weights: NDArray[np.int32],
    out: NDArray[np.uint8],
) -> None:
    """Resize the height, (old height, bytes) to (height, bytes), bytes >= _LANES; a row's last lanes overlap those before."""
    num_bytes, taps = lines.shape[1], weights.shape[1]
    old, new, flat_weights = lines.reshape(-1), out.reshape(-1), weights.reshape(-1)
    for row in range(len(first)):
        for lane in range(0, num_bytes, _LANES):
            begin = min(lane, num_bytes - _LANES)
            start = first[row] * num_bytes + begin
            _blend(old, start, num_bytes, flat_weights, row * taps, length[row], new, row * num_bytes + begin)


@kernel
def _blend_columns(
    words: NDArray[np.uint32],
    first: NDArray[np.int32],
    length: NDArray[np.int32],
    weights: NDArray[np.int32],
    out: NDArray[np.uint32],
) -> None:
    """Resize the width, (height, old width) to (height, width): transpose _ROWS rows, blend them as rows, transpose back."""
    taps, flat_weights = weights.shape[1], weights.reshape(-1)
    turned = np.empty(_ROWS * words.shape[1], np.uint32)
    narrow = np.empty((len(first), _ROWS), np.uint32)
    old, new = turned.view(np.uint8), narrow.reshape(-1).view(np.uint8)
    for top in range(0, len(words), _ROWS):
        _transpose_rows(words, top, turned)
        for column in range(len(first)):
            _blend(old, _LANES * first[column], _LANES, flat_weights, column * taps, length[column], new, _LANES * column)
        for row in range(min(_ROWS, len(words) - top)):
            for column in range(len(first)):
                out[top + row, column] = narrow[column, row]


@kernel
def _transpose_rows(words: NDArray[np.uint32], top: int, out: NDArray[np.uint32]) -> None:
    """Transpose the 8 rows from `top` on, repeating the last row if there are fewer. LLVM vectorises it in this form."""
    last = len(words) - 1
    a, b, c, d = words[top], words[min(top + 1, last)], words[min(top + 2, last)], words[min(top + 3, last)]
    e, f, g, h = words[min(top + 4, last)], words[min(top + 5, last)], words[min(top + 6, last)], words[min(top + 7, last)]
    for column in range(words.shape[1]):
        to = 8 * column
        out[to], out[to + 1], out[to + 2], out[to + 3] = a[column], b[column], c[column], d[column]
        out[to + 4], out[to + 5], out[to + 6], out[to + 7] = e[column], f[column], g[column], h[column]


def _spreading(_context: Any, words: Any, _start: Any, out: Any, _to: Any, _plane: Any) -> tuple[Any, Any]:
    """Generate the intrinsic `_spread(words, start, out, to, plane)`, which does, for i < _PIXELS and channels c < 3:

    out[to + c * plane + i] = byte c of words[start + i]

    Arrays are flat, and no bounds are checked. It is written out as vectors for the reason that `_blending` gives.
    """
    signature = types.void(words, types.intp, out, types.intp, types.intp)
    words_, bytes_ = ir.VectorType(ir.IntType(32), _PIXELS), ir.VectorType(ir.IntType(8), _PIXELS)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def place(array: int, index: Any, kind: ir.Type) -> Any:
            data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
            return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())

        _, start, _, to, plane = arguments
        pixels = builder.load(place(0, start, words_), align=4)
        for channel in range(3):
            shifted = builder.lshr(pixels, ir.Constant(words_, [8 * channel] * _PIXELS))
            builder.store(builder.trunc(shifted, bytes_), place(2, to, bytes_), align=1)
            to = builder.add(to, plane)
        return context.get_dummy_value()

    return signature, generate


_spread = cast(Callable[..., None], intrinsic(_spreading))


def _prefetching(_context: Any, out: Any, _to: Any) -> tuple[Any, Any]:
    """Generate the intrinsic `_prefetch(out, to)`, which prefetches out[to] for writing; it may lie behind the array's end."""
    signature = types.void(out, types.intp)
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        to_write, into_all_caches, data_not_code = word(1), word(3), word(1)
        place = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(prefetch, [place, to_write, into_all_caches, data_not_code])
        return context.get_dummy_value()

    return signature, generate


_prefetch = cast(Callable[..., None], intrinsic(_prefetching))


@kernel
def _cut(words: NDArray[np.uint32], patch: int, merge: int, out: NDArray[np.uint8]) -> None:
    """Cut pixels into the patches `out`, (patches * 3 * patch * patch,), which is written from front to back.

    It is rarely in a cache, and a cache line that is written in pieces waits for its former contents, so each is prefetched,
    which saves a fifth of the time. A row of a narrow patch is written too wide, into bytes that are written next; not in a
    channel's last bytes, behind which another channel has been written already.
    """
    height, width = words.shape
    flat, plane, to = words.reshape(-1), patch * patch, 0
    for top in range(0, height, merge * patch):
        for left in range(0, width, merge * patch):
            for row in range(top, top + merge * patch, patch):
                for column in range(left, left + merge * patch, patch):
                    for line in range(to + _AHEAD, to + _AHEAD + 3 * plane, _CACHE_LINE):
                        _prefetch(out, line)
                    for y in range(patch):
                        if (patch - y) * patch >= _PIXELS:
                            for lane in range(0, patch, _PIXELS):
                                x = max(0, min(lane, patch - _PIXELS))
                                _spread(flat, (row + y) * width + column + x, out, to + y * patch + x, plane)
                        else:
                            for x in range(patch):
                                word = words[row + y, column + x]
                                for channel in range(3):
                                    out[to + channel * plane + y * patch + x] = np.uint8(word >> np.uint32(8 * channel))
                    to += 3 * plane
