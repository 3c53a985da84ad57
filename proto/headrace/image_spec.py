"""The section of a job spec that says how images become patches."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace import limits
from headrace.user_document import SpecSection


class ImageSpec(SpecSection):
    """How images are resized and cut into a patch grid. Sides in patches are multiples of merge."""

    patch: Annotated[int, Field(ge=1, le=limits.MAX_PATCH)] = 14
    """Side of a patch in pixels."""
    merge: Annotated[int, Field(ge=1, le=limits.MAX_MERGE)] = 2
    """`merge` x `merge` patches become one token of the LLM."""
    fit: Literal["area", "longest_side", "square", "tiles", "split", "crops", "anyres"] = "area"
    """What size an image gets. area: one of min_pixels to max_pixels with nearly its own aspect ratio, as in Qwen2-VL.
    longest_side: its own, with sides of at most `longest_side`, as in Pixtral. square: `side` x `side`, as in Gemma 3. tiles: at
    most `max_tiles` tiles of `side` x `side`, and then the whole image as one more, as in InternVL. split: the longer side
    becomes `longest_side`, in tiles of `side` x `side`, and then the whole image, as in Idefics 3 and SmolVLM. crops: the whole
    image as for square, and then at most `max_tiles` crops along its longer side, as in Gemma 3's pan and scan. anyres: the whole
    image as for square, and then up to `max_tiles_per_side` tiles of `side` x `side` along each side, as in LLaVA-OneVision
    (`headrace.anyres`). To an encoder each tile or crop is an image."""
    side: Annotated[int, Field(ge=1, le=limits.MAX_IMAGE_SIDE)] = 448
    """Sides in pixels of a square or of a tile."""
    longest_side: Annotated[int, Field(ge=1, le=limits.MAX_IMAGE_SIDE)] = 1024
    """For `fit: longest_side`: most pixels of a side. For `fit: split`: pixels that the longer side becomes."""
    max_tiles: Annotated[int, Field(ge=1, le=limits.MAX_TILES)] = 12
    """Most tiles or crops of an image, without the whole image beside them; for `fit: tiles` and `fit: crops`."""
    max_tiles_per_side: Annotated[int, Field(ge=0, le=limits.MAX_TILES_PER_SIDE)] = 6
    """For `fit: anyres`: most tiles along each side of an image that is alone in its sample. An image beside others, or with 0
    every image, is padded to a square in grey and resized to one tile."""
    anyres_max: Annotated[int, Field(ge=1, le=limits.MAX_TILES)] = 9
    """For `fit: anyres`: tokens of the tiles are scaled down to about those of so many tiles where they are clearly more; the
    number in the `vision_aspect_ratio` of a model, such as anyres_max_9."""
    crop_ratio: Annotated[float, Field(ge=1)] = 1.2
    """For `fit: crops`: how many times as long as the other one a side must be for an image to get crops."""
    min_crop_side: Annotated[int, Field(ge=2)] = 256
    """For `fit: crops`: least side of a crop in pixels; an image that is too small for that gets none."""
    resample: Literal["bicubic", "bilinear", "lanczos"] = "bicubic"
    """Filter that images are resized with, as Pillow has it."""
    min_pixels: Annotated[int, Field(ge=1)] = 56 * 56
    """Least pixels of an image once it is resized; for `fit: area`."""
    max_pixels: Annotated[int, Field(ge=1, le=limits.MAX_PIXELS)] = 28 * 28 * 1280
    """Most pixels of an image once it is resized; for `fit: area`."""
    max_source_pixels: Annotated[int, Field(ge=1, le=limits.MAX_SOURCE_PIXELS)] = 100_000_000
    """Images with more pixels than this are refused as too_large, from their header."""
    min_source_side: Annotated[int, Field(ge=1)] = 1
    """Images with a side of fewer pixels than this are refused as too_small, from their header."""
    max_decode_mib: Annotated[int, Field(ge=1, le=limits.MAX_DECODE_MIB)] = 768
    """Images whose decoding would hold more MiB than this are refused as too_large, from their header: 8 bytes a pixel, 14 for a
    progressive JPEG, 18 for a WebP, about 20 for an AVIF and 25 for a JPEG 2000."""
    max_aspect_ratio: Annotated[float, Field(ge=1)] = 200.0
    """Images whose longer side is more than this many times the shorter one are refused as bad_aspect_ratio."""
    background: tuple[int, int, int] = (255, 255, 255)
    """RGB colour behind transparent pixels."""
    reduced_scale: bool = False
    """Decode JPEGs at 1/2, 1/4 or 1/8 of their size before the bicubic resize, as long as the sides stay at least 1.5 times those
    of the patch grid: large photographs take half of the time. Pixels then differ from those of full-size decoding, by up to 3 of
    255 where the photograph is not sharp to the pixel, by up to 35 at the sharpest edges."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_pixels < max(self.min_pixels, (self.patch * self.merge) ** 2):
            raise ValueError(f"max_pixels ({self.max_pixels}) is below min_pixels or below one merged patch")
        return self

    @model_validator(mode="after")
    def _tiles_are_whole_tokens(self) -> Self:
        patches = self.side // self.patch
        if self.fit in ("square", "tiles", "split", "crops", "anyres") and (patches == 0 or patches % self.merge):
            raise ValueError(
                f"side ({self.side}) has {patches} patches of {self.patch} pixels, which is no multiple of merge ({self.merge})"
            )
        if self.fit in ("tiles", "crops") and self.max_tiles * self.side**2 > limits.MAX_PIXELS:
            tiles = f"{self.max_tiles} {self.fit} of side {self.side}"
            raise ValueError(f"{tiles} have more than {limits.MAX_PIXELS} pixels: lower one")
        if self.fit == "anyres" and (self.max_tiles_per_side * self.side) ** 2 > limits.MAX_PIXELS:
            tiles = f"{self.max_tiles_per_side} x {self.max_tiles_per_side} tiles of side {self.side}"
            raise ValueError(f"{tiles} have more than {limits.MAX_PIXELS} pixels: lower max_tiles_per_side or side")
        if self.fit == "crops" and self.min_crop_side < self.max_tiles:
            raise ValueError(f"min_crop_side ({self.min_crop_side}) is below max_tiles ({self.max_tiles}): raise it")
        return self
