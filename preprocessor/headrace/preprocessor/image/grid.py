"""The patch grid: to which size an image is brought, how many patches and tokens that gives, what decoding may leave out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.spec import ImageSpec

_LEAST_LEFT = 1.5  # times the grid's sides, for bicubic to shrink: a photograph of 12 megapixels to 1 is halved
_LEAST_SIDE = 64  # of an image that is decoded smaller; below, several scales give the same size and nothing is gained


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Patches of one image before merging."""

    height: int
    width: int

    @property
    def patches(self) -> int:
        """Patches before merging."""
        return self.height * self.width

    def tokens(self, merge: int) -> int:
        """Tokens of the LLM: one for each merge * merge patches."""
        return self.patches // merge**2


def grid_of(width: int, height: int, spec: ImageSpec) -> Grid:
    """The grid of an image of so many pixels."""
    width, height = smart_resize(width, height, spec)
    return Grid(height=height // spec.patch, width=width // spec.patch)


def smart_resize(width: int, height: int, spec: ImageSpec) -> tuple[int, int]:
    """(width, height) as multiples of patch * merge with nearly the same aspect ratio and min_pixels <= area <= max_pixels.

    The rule of Qwen2-VL (arXiv:2409.12191, section 2.1, "naive dynamic resolution"; the published image processor's
    `smart_resize`): round each side half to even, then shrink or grow both by one factor if the area is out of bounds. A
    side never gets less than one unit, so very long images may pass max_pixels by the other side.
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
    """1, 2, 4 or 8: a JPEG of so many pixels is decoded at one part in so many of each side (`ImageSpec.reduced_scale`).

    The other eighths that libjpeg-turbo knows are slower than the full size.
    """
    if not spec.reduced_scale or min(width, height) < _LEAST_SIDE:
        return 1
    left = min(width / (grid.width * spec.patch), height / (grid.height * spec.patch))
    return max((scale for scale in (2, 4, 8) if scale * _LEAST_LEFT <= left), default=1)
