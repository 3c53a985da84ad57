"""The tiles of an image of any resolution, and the tokens that are left of them: LLaVA-OneVision (arXiv:2408.03326, section 3.2).

An image is resized into the arrangement of tiles that keeps most of its pixels, and padded there. Its encoder sees the whole
image, resized to one tile, and then each tile. Of what it makes of the tiles, the padding is cut off, all the rest is scaled
down if it is too much, and each row ends with a newline. The preprocessor needs this for pixels and placeholders, the trainer
for features, and both have the image's size for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from headrace.spec import ImageSpec

_LEAST_SCALED = 1.1  # features that are less than so many times too long on each side stay as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Anyres:
    """What becomes of one image. Cells are what becomes one token: squares of `merge` x `merge` patches."""

    width: int
    """Of the upright image in pixels."""
    height: int
    rows: int
    """Number of rows of tiles; 0 for an image that is not cut, which has a newline behind the tokens of the whole image."""
    columns: int
    cell_rows: int
    """Number of rows of cells that the tiles have together, from the middle, once the padding is cut off."""
    cell_columns: int
    token_rows: int
    """Number of rows of tokens to which these cells are scaled down; as many as of cells where they are not."""
    token_columns: int

    @property
    def tokens(self) -> int:
        """Number of tokens behind those of the whole image: of the tiles, and newlines."""
        return self.token_rows * (self.token_columns + 1) if self.rows else 1


def anyres(width: int, height: int, image: ImageSpec) -> Anyres:
    """Return what becomes of an image of `width` x `height` pixels in a job with `fit: anyres`.

    The numbers are those of `LlavaOnevisionProcessor` in transformers, with its rounding.
    """
    most = image.max_tiles_per_side
    if most == 0:
        return Anyres(width=width, height=height, rows=0, columns=0, cell_rows=0, cell_columns=0, token_rows=0, token_columns=0)
    rows, columns = _arrangement(width, height, image.side, most)
    side = image.side // image.patch // image.merge
    cell_rows, cell_columns = side * rows, side * columns
    if width / height > cell_columns / cell_rows:
        cell_rows -= (cell_rows - int(round(height * (cell_columns / width), 7))) // 2 * 2
    else:
        cell_columns -= (cell_columns - int(round(width * (cell_rows / height), 7))) // 2 * 2
    ratio = math.sqrt(cell_rows * cell_columns / (image.anyres_max * side**2))
    scale = ratio if ratio > _LEAST_SCALED else 1
    return Anyres(
        width=width,
        height=height,
        rows=rows,
        columns=columns,
        cell_rows=cell_rows,
        cell_columns=cell_columns,
        token_rows=int(cell_rows // scale),
        token_columns=int(cell_columns // scale),
    )


def image_of_sample(image: ImageSpec, num_images: int) -> ImageSpec:
    """Return how each image of a sample with so many is resized: `fit: anyres` cuts only one that is alone."""
    if image.fit != "anyres" or num_images == 1:
        return image
    return image.model_copy(update={"max_tiles_per_side": 0})


def uncut_tokens(patches: int, image: ImageSpec) -> int:
    """Return the number of tokens of an image of so many patches that is not cut into tiles."""
    return patches // image.merge**2 + (image.fit == "anyres")


@lru_cache(maxsize=4096)
def _arrangement(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """Return (rows, columns) of the tiles that keep most of an image's pixels and, of these, waste the fewest of their own."""
    best, kept, wasted = (1, 1), 0, math.inf
    for rows in range(1, most + 1):
        for columns in range(1, most + 1):
            scale = min(columns * side / width, rows * side / height)
            keeps = min(int(width * scale) * int(height * scale), width * height)
            wastes = rows * columns * side**2 - keeps
            if keeps > kept or (keeps == kept and wastes < wasted):
                best, kept, wasted = (rows, columns), keeps, wastes
    return best
