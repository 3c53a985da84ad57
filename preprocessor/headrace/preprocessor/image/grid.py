"""The patch grid of an image, and the scale at which a JPEG is decoded for it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.anyres import Anyres
from headrace.spec import ImageSpec

# A JPEG decoded at a reduced scale keeps at least so many times the sides of its grid, for bicubic to shrink: a photograph of 12
# megapixels that becomes one of 1 is halved.
_LEAST_LEFT = 1.5
_LEAST_SIDE = 64  # shortest side of an image decoded at a reduced scale; below, several scales give the same size


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Height and width of one image in patches, before they are merged into tokens; of each of its tiles, if it is cut."""

    height: int
    width: int
    rows: int = 1
    """Number of rows of tiles."""
    columns: int = 1
    whole: bool = False
    """Whether the whole image follows the tiles, as one more of them; it is in front of crops, and where there is `anyres`."""
    crops: bool = False
    """Whether the tiles are crops."""
    anyres: Anyres | None = None
    """What becomes of the image with `fit: anyres`, whose tokens are not those of the patches."""

    @property
    def tiles(self) -> int:
        """Number of tiles, each of which is a picture of its own for the encoder; 1 if the image is not cut."""
        return self.rows * self.columns + self.whole

    @property
    def patches(self) -> int:
        """Number of patches of all tiles before merging."""
        return self.tiles * self.height * self.width

    def tokens(self, merge: int) -> int:
        """Return the number of LLM tokens: one for each merge * merge patches; with `anyres`, of the whole image only."""
        if self.anyres is not None:
            return self.height * self.width // merge**2 + self.anyres.tokens
        return self.patches // merge**2


def reduction(width: int, height: int, size: tuple[int, int], spec: ImageSpec) -> int:
    """Return 1, 2, 4 or 8, by which both sides of a JPEG of `width` x `height` pixels are divided when it is decoded, before it
    is resized to `size` (`ImageSpec.reduced_scale`).

    The other eighths that libjpeg-turbo offers are slower than the full size.
    """
    if not spec.reduced_scale or min(width, height) < _LEAST_SIDE:
        return 1
    left = min(width / size[0], height / size[1])
    return max((scale for scale in (2, 4, 8) if scale * _LEAST_LEFT <= left), default=1)
