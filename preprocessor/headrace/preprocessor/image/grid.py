"""The patch grid: the size that an image is resized to, its patches and tokens, and the scale at which a JPEG is decoded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.spec import ImageSpec

# A JPEG decoded at a reduced scale keeps at least so many times the sides of its grid, for bicubic to shrink: a photograph of 12
# megapixels that becomes one of 1 is halved.
_LEAST_LEFT = 1.5
_LEAST_SIDE = 64  # shortest side of an image decoded at a reduced scale; below, several scales give the same size


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Height and width of one image in patches, before they are merged into tokens."""

    height: int
    width: int

    @property
    def patches(self) -> int:
        """Number of patches before merging."""
        return self.height * self.width

    def tokens(self, merge: int) -> int:
        """Return the number of LLM tokens: one for each merge * merge patches."""
        return self.patches // merge**2


def grid_of(width: int, height: int, spec: ImageSpec) -> Grid:
    """Return the patch grid of an image of `width` x `height` pixels."""
    width, height = smart_resize(width, height, spec)
    return Grid(height=height // spec.patch, width=width // spec.patch)


def smart_resize(width: int, height: int, spec: ImageSpec) -> tuple[int, int]:
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


def reduction(width: int, height: int, grid: Grid, spec: ImageSpec) -> int:
    """Return 1, 2, 4 or 8, by which both sides of a JPEG are divided when it is decoded (`ImageSpec.reduced_scale`).

    The other eighths that libjpeg-turbo offers are slower than the full size.
    """
    if not spec.reduced_scale or min(width, height) < _LEAST_SIDE:
        return 1
    left = min(width / (grid.width * spec.patch), height / (grid.height * spec.patch))
    return max((scale for scale in (2, 4, 8) if scale * _LEAST_LEFT <= left), default=1)
