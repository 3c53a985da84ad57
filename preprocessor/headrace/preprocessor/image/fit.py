"""How an image is brought to the patch grid: the sizes that it is resized to, and the tiles that it is cut into.

Each rule is that of a published image processor, and gives the same sizes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from headrace.anyres import Anyres, anyres
from headrace.preprocessor.image.grid import Grid
from headrace.spec import ImageSpec

Size = tuple[int, int]
"""(width, height) in pixels."""

Crop = tuple[int, int, int, int]
"""(left, top, width, height) of a part of an image in pixels."""

_LONGEST = 4096  # the side that Idefics 3 never exceeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What becomes of an image: it is resized to each of `sizes` in turn, and the last result is cut into tiles, row by row.

    With `crops` it is cut first: each crop, and the whole image in front of them, is resized to the size of a tile. With `anyres`
    the last result is put in the middle of the tiles, on black, and the whole image is in front of them too.
    """

    sizes: tuple[Size, ...]
    rows: int = 1
    """Number of rows of tiles."""
    columns: int = 1
    whole: Literal["original", "resized"] | None = None
    """What is resized to the size of a tile and put behind the tiles, if anything: the image or the last result."""
    crops: tuple[Crop, ...] = ()
    """The parts of the image that become tiles, row by row."""
    canvas: Size | None = None
    """The size of all tiles together, if the last result does not fill them."""
    square: bool = False
    """Whether the image is put in the middle of a square, on grey, before it is resized."""
    anyres: Anyres | None = None

    @property
    def tile(self) -> Size:
        """Size of each tile."""
        width, height = self.canvas or self.sizes[-1]
        return width // max(1, self.columns), height // max(1, self.rows)

    def grid(self, patch: int) -> Grid:
        """Return the patch grid; pixels of a tile behind its last whole patch are left out, as by a convolution."""
        width, height = self.tile
        return Grid(
            height=height // patch,
            width=width // patch,
            rows=self.rows,
            columns=self.columns,
            whole=self.whole is not None,
            crops=bool(self.crops),
            anyres=self.anyres,
        )


def fit_of(width: int, height: int, spec: ImageSpec) -> Fit:
    """Return what becomes of an image of `width` x `height` pixels."""
    match spec.fit:
        case "area":
            return Fit(sizes=(smart_resize(width, height, spec),))
        case "longest_side":
            return Fit(sizes=(_below(width, height, spec.longest_side, spec.patch * spec.merge),))
        case "square":
            return Fit(sizes=((spec.side, spec.side),))
        case "tiles":
            return _tiles(width, height, spec.side, spec.max_tiles)
        case "split":
            return _split(width, height, spec.side, spec.longest_side)
        case "crops":
            return _crops(width, height, spec)
        case "anyres":
            return _anyres(width, height, spec)


def smart_resize(width: int, height: int, spec: ImageSpec) -> Size:
    """Return the (width, height) to resize an image to: multiples of patch * merge, min_pixels <= area <= max_pixels.

    The aspect ratio stays nearly the same. This is the rule of Qwen2-VL (arXiv:2409.12191, section 2.1, "naive dynamic
    resolution"; the published image processor's `smart_resize`): round each side half to even, then shrink or grow both by one
    factor if the area is out of bounds. A side never gets less than patch * merge, so very long images may exceed max_pixels.
    """
    unit = spec.patch * spec.merge
    new_width, new_height = round(width / unit) * unit, round(height / unit) * unit
    if new_width * new_height > spec.max_pixels:
        factor = math.sqrt(width * height / spec.max_pixels)
        return max(unit, math.floor(width / factor / unit) * unit), max(unit, math.floor(height / factor / unit) * unit)
    if new_width * new_height < spec.min_pixels:
        factor = math.sqrt(spec.min_pixels / (width * height))
        return math.ceil(width * factor / unit) * unit, math.ceil(height * factor / unit) * unit
    return new_width, new_height


def _below(width: int, height: int, longest: int, unit: int) -> Size:
    """Shrink to sides of at most `longest`, then round each up to a multiple of `unit`: Pixtral (arXiv:2410.07073)."""
    factor = max(height / longest, width / longest)
    if factor > 1:
        width, height = max(1, math.floor(width / factor)), max(1, math.floor(height / factor))
    return -(-width // unit) * unit, -(-height // unit) * unit


def _tiles(width: int, height: int, side: int, most: int) -> Fit:
    """Cut into at most `most` tiles, with the arrangement nearest to the aspect ratio: InternVL 1.5 (arXiv:2404.16821, 3.3).

    Of arrangements that are equally near, the largest that the image fills at least half of is taken.
    """
    shapes = _shapes(most)
    nearest = min(abs(width / height - columns / rows) for columns, rows in shapes)
    near = [(columns, rows) for columns, rows in shapes if abs(width / height - columns / rows) == nearest]
    filled = [shape for shape in near if width * height > 0.5 * side * side * math.prod(shape)]
    columns, rows = (filled or near[:1])[-1]
    whole: Literal["original"] | None = "original" if columns * rows > 1 else None
    return Fit(sizes=((side * columns, side * rows),), rows=rows, columns=columns, whole=whole)


@lru_cache
def _shapes(most: int) -> tuple[Size, ...]:
    """Return (columns, rows) of all arrangements of at most `most` tiles, the smallest first."""
    shapes = ((columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
    return tuple(sorted(shapes, key=math.prod))


def _split(width: int, height: int, side: int, longest: int) -> Fit:
    """Bring the longer side to `longest`, then cut into tiles: Idefics 3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299)."""
    size = _at_most(*_with_longest(width, height, longest), _LONGEST)
    wide, high = _multiples(*size, side)
    is_whole = (wide, high) == (side, side)
    sizes = (size, (wide, high)) if size != (wide, high) else (size,)
    return Fit(sizes=sizes, rows=high // side, columns=wide // side, whole=None if is_whole else "resized")


def _crops(width: int, height: int, spec: ImageSpec) -> Fit:
    """Cut an image along its longer side, if that is long enough: Gemma 3 (arXiv:2503.19786, 2.1, "pan and scan").

    Crops are of one size, rounded up, of which the last one lacks what is behind the edge.
    """
    longer, ratio = max(width, height), max(width / height, height / width)
    number = min(max(2, min(longer // spec.min_crop_side, math.floor(ratio + 0.5))), spec.max_tiles)
    columns, rows = (number, 1) if width >= height else (1, number)
    wide, high = math.ceil(width / columns), math.ceil(height / rows)
    if ratio < spec.crop_ratio or min(wide, high) < spec.min_crop_side:
        return Fit(sizes=((spec.side, spec.side),))
    corners = itertools.product(range(0, rows * high, high), range(0, columns * wide, wide))
    parts = tuple((left, top, min(wide, width - left), min(high, height - top)) for top, left in corners)
    sizes = ((spec.side * columns, spec.side * rows),)
    return Fit(sizes=sizes, rows=rows, columns=columns, whole="original", crops=parts)


def _anyres(width: int, height: int, spec: ImageSpec) -> Fit:
    """Resize into the tiles that suit the image best, keeping its aspect ratio: LLaVA-OneVision (arXiv:2408.03326, 3.2)."""
    tiles, side = anyres(width, height, spec), spec.side
    if not tiles.rows:
        return Fit(sizes=((side, side),), rows=0, columns=0, whole="original", square=width != height, anyres=tiles)
    wide, high = side * tiles.columns, side * tiles.rows
    if wide / width < high / height:
        size = wide, min(high, math.ceil(height * (wide / width)))
    else:
        size = min(wide, math.ceil(width * (high / height))), high
    return Fit(sizes=(size,), rows=tiles.rows, columns=tiles.columns, whole="original", canvas=(wide, high), anyres=tiles)


def _with_longest(width: int, height: int, longest: int) -> Size:
    """Return the size with that longer side, and the other one even if it was rounded to an odd number."""
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return longest, max(1, other + other % 2)
    other = int(longest * ratio)
    return max(1, other + other % 2), longest


def _at_most(width: int, height: int, longest: int) -> Size:
    ratio = width / height
    if width >= height and width > longest:
        width, height = longest, int(longest / ratio)
    elif height > width and height > longest:
        width, height = int(longest * ratio), longest
    return max(1, width), max(1, height)


def _multiples(width: int, height: int, side: int) -> Size:
    """Round the longer side up to a multiple of `side`, and then the other one in proportion to it."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return width, max(1, math.ceil(int(width / ratio) / side)) * side
    height = math.ceil(height / side) * side
    return max(1, math.ceil(int(height * ratio) / side)) * side, height
