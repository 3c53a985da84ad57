"""Sizes, tiles and pixels of images are those of the published image processors of `transformers`."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from headrace.anyres import image_of_sample
from headrace.preprocessor import image
from headrace.preprocessor.image.decode_cost import decode_bytes
from headrace.preprocessor.image.fit import fit_of
from headrace.preprocessor.image.header import Header
from headrace.spec import ImageSpec
from tests.examples import with_examples

Pixels = NDArray[np.uint8]

GEMMA = ImageSpec(fit="square", side=896, patch=14, merge=4, resample="bilinear")
GEMMA_CROPS = ImageSpec(fit="crops", side=896, patch=14, merge=4, max_tiles=4, resample="bilinear")
INTERN = ImageSpec(fit="tiles", side=448, patch=14, merge=2)
PIXTRAL = ImageSpec(fit="longest_side", longest_side=1024, patch=16, merge=1)
MISTRAL_SMALL = ImageSpec(fit="longest_side", longest_side=1540, patch=14, merge=2)
SMOL = ImageSpec(fit="split", side=512, longest_side=2048, patch=16, merge=4, resample="lanczos")
SIGLIP = ImageSpec(fit="split", side=384, longest_side=1536, patch=14, merge=3, resample="lanczos")
ONEVISION = ImageSpec(fit="anyres", side=384, patch=14, merge=1)
BESIDE_OTHERS = image_of_sample(ONEVISION, 2)
PUBLISHED = {
    "gemma3": GEMMA,
    "gemma3-crops": GEMMA_CROPS,
    "internvl": INTERN,
    "pixtral": PIXTRAL,
    "mistral-small": MISTRAL_SMALL,
    "smolvlm": SMOL,
    "smolvlm-384": SIGLIP,
    "llava-onevision": ONEVISION,
    "llava-onevision, of several": BESIDE_OTHERS,
}
PAN_AND_SCAN: dict[str, Any] = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
SIZES = ((640, 427), (500, 500), (1600, 300), (90, 800), (33, 21), (448, 896))
MORE_SIZES = ((427, 640), (1024, 768), (1300, 1301))
SIDES = st.integers(1, 3000)


def theirs(name: str) -> Callable[[Image.Image], list[Pixels]]:
    """The published image processor: the pictures (3, height, width), uint8, that it makes of one image."""
    pytest.importorskip("transformers")
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    made: dict[str, Any] = {
        "gemma3": lambda: Gemma3ImageProcessorPil(size={"height": 896, "width": 896}),
        "gemma3-crops": lambda: Gemma3ImageProcessorPil(size={"height": 896, "width": 896}, **PAN_AND_SCAN),
        "internvl": lambda: GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True),
        "pixtral": PixtralImageProcessorPil,
        "mistral-small": lambda: PixtralImageProcessorPil(size={"longest_edge": 1540}, patch_size=28),
        "smolvlm": lambda: SmolVLMImageProcessorPil(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}),
        "smolvlm-384": lambda: SmolVLMImageProcessorPil(size={"longest_edge": 1536}, max_image_size={"longest_edge": 384}),
        "llava-onevision": lambda: LlavaOnevisionImageProcessorPil(image_mean=[0.5] * 3),
        "llava-onevision, of several": lambda: LlavaOnevisionImageProcessorPil(image_mean=[0.5] * 3),
    }
    processor = made[name]()
    several = PUBLISHED[name] is BESIDE_OTHERS

    def process(picture: Image.Image) -> list[Pixels]:
        images = [[picture, picture]] if several else [picture]
        found = processor(images=images, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"]
        pictures = np.asarray(found)[: 1 if several else None]
        return list(pictures.reshape(-1, *pictures.shape[-3:]).astype(np.uint8))

    return process


def photo(width: int, height: int) -> Image.Image:
    """Gradients with noise in one corner, so that no two tiles are alike."""
    down, right = np.mgrid[0:height, 0:width]
    pixels = np.stack((down * 255 // height, right * 255 // width, (down + 2 * right) % 256), axis=2).astype(np.uint8)
    corner = pixels[: height // 2, : width // 3]
    corner[...] = np.random.default_rng(1).integers(0, 256, corner.shape, np.uint8)
    return Image.fromarray(pixels)


def encoded(picture: Image.Image) -> bytes:
    data = io.BytesIO()
    picture.save(data, "PNG", compress_level=1)
    return data.getvalue()


def pictures_of(patches: Pixels, grid: image.Grid, spec: ImageSpec) -> list[Pixels]:
    """The tiles (3, height, width), put together from their patches."""
    merge, patch = spec.merge, spec.patch
    cells = patches.reshape(grid.tiles, grid.height // merge, grid.width // merge, merge, merge, 3, patch, patch)
    tiles = cells.transpose(0, 5, 1, 3, 6, 2, 4, 7).reshape(grid.tiles, 3, grid.height * patch, grid.width * patch)
    return list(tiles)


@pytest.mark.parametrize("name", list(PUBLISHED))
@pytest.mark.parametrize("size", [*SIZES, *(pytest.param(size, marks=pytest.mark.slow) for size in MORE_SIZES)])
def test_pixels_are_those_of_the_published_processor(name: str, size: tuple[int, int]) -> None:
    spec, picture = PUBLISHED[name], photo(*size)
    patches, grid = image.decode(encoded(picture), spec)
    assert grid == image.probe(encoded(picture), spec)
    expected = theirs(name)(picture)
    ours = pictures_of(patches, grid, spec)
    assert len(ours) == len(expected)
    for tile, other in zip(ours, expected, strict=True):
        _, height, width = tile.shape
        assert all(0 <= whole - part < spec.patch for whole, part in zip(other.shape[1:], (height, width), strict=True))
        np.testing.assert_array_equal(tile, other[:, :height, :width])


@given(width=SIDES, height=SIDES)
@with_examples(300)
def test_tiles_are_arranged_as_in_internvl(width: int, height: int) -> None:
    module = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    columns, rows = module.get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
    fit = fit_of(width, height, INTERN)
    assert (fit.columns, fit.rows, fit.whole is not None) == (columns, rows, columns * rows > 1)
    assert fit.grid(14).tokens(2) == 256 * (columns * rows + (columns * rows > 1))


@given(width=SIDES, height=SIDES)
@with_examples(300)
def test_sizes_are_those_of_pixtral_and_smolvlm(width: int, height: int) -> None:
    pixtral = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    smol = pytest.importorskip("transformers.models.smolvlm.image_processing_pil_smolvlm")
    blank = np.zeros((3, height, width), np.uint8)
    high, wide = pixtral.get_resize_output_image_size(blank, (1540, 1540), (28, 28), "channels_first")
    if min(high, wide) > 0:  # theirs is empty for an image of one row, hundreds of columns wide
        assert fit_of(width, height, MISTRAL_SMALL).sizes == ((wide, high),)
    high, wide = smol.get_resize_output_image_size(blank, 2048)
    assert fit_of(width, height, SMOL).sizes[0] == (wide, high)


@given(width=SIDES, height=SIDES, smallest=st.integers(16, 400), most=st.integers(1, 16), ratio=st.floats(1, 4))
@with_examples(100)
def test_crops_are_those_of_gemma(width: int, height: int, smallest: int, most: int, ratio: float) -> None:
    module = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    spec = GEMMA_CROPS.model_copy(update={"min_crop_side": smallest, "max_tiles": most, "crop_ratio": ratio})
    places = np.empty((1, height, width), np.uint8)
    theirs = module.Gemma3ImageProcessorPil().pan_and_scan(places, smallest, most, ratio)
    crops = [(*_corner(part, places), part.shape[2], part.shape[1]) for part in theirs]
    fit = fit_of(width, height, spec)
    assert list(fit.crops) == crops
    assert fit.grid(14).tokens(4) == 256 * (1 + len(crops))


@given(
    width=SIDES,
    height=SIDES,
    side=st.sampled_from((384, 224, 60)),
    most=st.integers(1, 6),
    scaled=st.integers(1, 16),
)
@with_examples(300)
def test_tokens_are_those_of_llava_onevision(width: int, height: int, side: int, most: int, scaled: int) -> None:
    module = pytest.importorskip("transformers.models.llava_onevision.processing_llava_onevision")
    pinpoints = [[side * rows, side * columns] for rows in range(1, most + 1) for columns in range(1, most + 1)]
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=pinpoints),
        num_image_tokens=(side // 14) ** 2,
        vision_aspect_ratio=f"anyres_max_{scaled}",
    )
    processor._get_unpadded_features = partial(module.LlavaOnevisionProcessor._get_unpadded_features, processor)
    theirs = module.LlavaOnevisionProcessor._get_number_of_features(processor, height, width, side, side)
    spec = ImageSpec(fit="anyres", side=side, patch=14, merge=1, max_tiles_per_side=most, anyres_max=scaled)
    assert fit_of(width, height, spec).grid(14).tokens(1) == theirs
    assert fit_of(width, height, image_of_sample(spec, 2)).grid(14).tokens(1) == (side // 14) ** 2 + 1


def _corner(part: Pixels, whole: Pixels) -> tuple[int, int]:
    """Where a view of (1, height, width) pixels of one byte begins: left, top."""
    offset = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return offset % whole.shape[2], offset // whole.shape[2]


@pytest.mark.parametrize(("published", "tiles"), [(GEMMA_CROPS, 4), (ONEVISION, 1 + 2 * 3), (BESIDE_OTHERS, 1)])
def test_tiles_of_a_reduced_jpeg_are_of_the_same_places(published: ImageSpec, tiles: int) -> None:
    """A square is made of all pixels, and then resized: it is not reduced."""
    width, height = 4001, 1501
    file = io.BytesIO()
    Image.fromarray(np.asarray(photo(64, 24).resize((width, height), Image.Resampling.BICUBIC))).save(file, "JPEG", quality=95)
    spec = published.model_copy(update={"side": 224, "merge": 1, "max_tiles_per_side": min(3, published.max_tiles_per_side)})
    full, grid = image.decode(file.getvalue(), spec)
    reduced, _ = image.decode(file.getvalue(), spec.model_copy(update={"reduced_scale": True}))
    assert grid.tiles == tiles
    assert np.array_equal(full, reduced) == (published is BESIDE_OTHERS)
    assert np.abs(full.astype(int) - reduced).max() < 12


@pytest.mark.parametrize(("spec", "tokens"), [(GEMMA, 256), (INTERN, 13 * 256), (SMOL, 13 * 64), (SIGLIP, 13 * 81)])
def test_a_landscape_has_the_published_number_of_tokens(spec: ImageSpec, tokens: int) -> None:
    size = (1600, 1200) if spec is not INTERN else (1200, 900)
    assert fit_of(*size, spec).grid(spec.patch).tokens(spec.merge) == tokens


def test_an_image_of_one_tile_is_not_there_twice() -> None:
    assert fit_of(448, 448, INTERN).grid(14) == image.Grid(height=32, width=32)
    single = SMOL.model_copy(update={"longest_side": 512})
    assert fit_of(300, 300, single).grid(16) == image.Grid(height=32, width=32)


@given(width=SIDES, height=SIDES, name=st.sampled_from(list(PUBLISHED)))
def test_memory_is_foreseen_for_all_that_is_resized(width: int, height: int, name: str) -> None:
    """At least what the last size and its patches take, and the image with a copy of the largest crop."""
    spec = PUBLISHED[name]
    fit = fit_of(width, height, spec)
    wide, high = fit.sizes[-1]
    copied = max((crop[2] * crop[3] for crop in fit.crops), default=0)
    if fit.canvas is not None:
        copied += wide * high
        wide, high = fit.canvas
    if fit.square:
        copied += max(width, height) ** 2
    taken = 4 * (width * height + copied + wide * high) + 3 * wide * high * 0.9
    assert decode_bytes(Header(width=width, height=height), spec) >= taken


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fit": "square", "side": 448, "patch": 14, "merge": 3}, "448. has 32 patches of 14 pixels, which is no multiple"),
        ({"fit": "tiles", "side": 10, "patch": 14}, "10. has 0 patches"),
        ({"fit": "tiles", "side": 4004, "patch": 14, "max_tiles": 12}, "12 tiles of side 4004 have more than"),
        ({"fit": "anyres", "side": 384, "patch": 14, "merge": 2}, "384. has 27 patches of 14 pixels, which is no multiple"),
        ({"fit": "anyres", "side": 896, "merge": 1, "max_tiles_per_side": 10}, "10 x 10 tiles of side 896 have more than"),
        ({"fit": "crops", "min_crop_side": 11, "max_tiles": 12}, "min_crop_side .11. is below max_tiles .12."),
    ],
)
def test_sides_that_make_no_tokens_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ImageSpec(**fields)
