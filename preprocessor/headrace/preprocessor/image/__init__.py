"""Images: header probe, decoding to upright pixels, the patch grid, and patches.

    header.py        size and rotation from the first bytes of a file, for ordinary headers only
    reference.py     decoding of all formats with Pillow, whose result counts
    tiff.py, avif.py, jpeg2000.py   what decoding such a file would hold, from what it says inside
    png.py           checksums and rows that Pillow does not look at
    libtiff_errors.py   damage that libtiff only prints
    jpeg.py          faster decoding of ordinary JPEGs with simplejpeg, to the same pixels
    resample.py      Pillow's bicubic resizing and the cutting into patches, compiled
    scratch.py       buffers that are reused from one image to the next
    decode_cost.py   the memory and time that decoding would take, from the header
    fit.py           the sizes that an image is resized to, and the tiles that it is cut into
    grid.py          the patch grid, and the scale at which a JPEG may be decoded before that

With `ImageSpec.reduced_scale`, large JPEGs are partly shrunk in the frequency domain; both codecs do this alike, and the grid
stays that of the full size.

Probing reads headers only, and applies the same limits and the same rotation (from an EXIF block in front of the pixels)
as decoding, so that both give the same grid. With or without the fast parts, a file gives the same patches or the same
refusal on every machine: JPEG and PNG decoding and the resizing are exact integer arithmetic. Only the libraries inside
Pillow and simplejpeg could change that, so all preprocessors of a job should have the same versions of them; `codecs` names
them.

All functions are pure and thread-safe, and the interpreter lock is released nearly all of the time.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from headrace.observability.logs import pairs
from headrace.preprocessor.decode_memory import room_for
from headrace.preprocessor.image import jpeg, reference, resample
from headrace.preprocessor.image.decode_cost import check_cost, decode_bytes
from headrace.preprocessor.image.fit import Crop, Fit, fit_of, smart_resize
from headrace.preprocessor.image.grid import Grid, reduction
from headrace.preprocessor.image.header import Header, parse
from headrace.preprocessor.image.scratch import Scratch
from headrace.spec import ImageSpec

__all__ = ["Grid", "codecs", "decode", "log_codecs", "probe", "read_pixels", "read_size", "smart_resize", "to_patches"]

log = logging.getLogger(__name__)

_scratch, _other_scratch = Scratch(), Scratch()
_GREY = 127  # what SigLIP's processor has around an image that is padded to a square
_UPSIDE_DOWN, _MIRRORED = (3, 4, 7, 8), (2, 3, 6, 7)  # orientations, after the sides of 5 to 8 are exchanged


def probe(data: bytes, spec: ImageSpec) -> Grid:
    """Return the patch grid that `decode` will give for an image file, from its header alone.

    Raises BadSampleError with empty_media, corrupt_media, unsupported_media, too_large or bad_aspect_ratio.
    """
    return fit_of(*read_size(data, spec), spec).grid(spec.patch)


def decode(data: bytes, spec: ImageSpec, out: NDArray[np.uint8] | None = None) -> tuple[NDArray[np.uint8], Grid]:
    """Decode an image file to patches of shape (grid.patches, 3 * patch * patch), uint8, and return them with their grid.

    Waits for memory while other threads decode (preprocessor.decode_memory). `out`: a C-contiguous array of that shape, to be
    filled and returned; its contents are undefined after an error. Raises BadSampleError with the reasons of `probe`.
    """
    header = _header(data, spec)
    fit = fit_of(*header.upright, spec)
    grid = fit.grid(spec.patch)
    patches = _checked(out, grid.patches, spec)
    scale = reduction(*header.upright, fit.sizes[0], spec) if header.plain_jpeg and not fit.square else 1
    with room_for(decode_bytes(header, spec)):
        pixels = _read(data, header, spec, _scratch, scale)
        tiles = patches.reshape(grid.tiles, -1, patches.shape[1])
        if fit.crops:
            _cut_crops(pixels, _box(header, scale), fit, spec, scale, tiles)
        elif fit.anyres is not None:
            _cut_anyres(pixels, _box(header, scale), fit, spec, tiles)
        else:
            _cut(pixels, _box(header, scale), fit, spec, tiles)
        del pixels  # freed before other threads get the room
    return patches, grid


def read_size(data: bytes, spec: ImageSpec) -> tuple[int, int]:
    """Return (width, height) of the upright image in pixels, from its header. Raises BadSampleError as `probe` does."""
    return _header(data, spec).upright


def read_pixels(data: bytes, spec: ImageSpec) -> NDArray[np.uint8]:
    """Decode an image file upright, at its own size: (height, width, 4), uint8, red, green, blue and a byte without meaning.

    Raises BadSampleError with the reasons of `probe`.
    """
    return _read(data, _header(data, spec), spec, Scratch())


def to_patches(pixels: NDArray[np.uint8], spec: ImageSpec, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Cut pixels (height, width, 3 or 4), uint8, sides multiples of patch * merge, into patches (n, 3 * patch * patch), uint8.

    Each patch is channel-first. The merge * merge patches that become one token are contiguous, row by row; so are these
    groups (NaViT packing, arXiv:2307.06304, in Qwen2-VL's order). `out`: a C-contiguous array to be filled and returned.
    """
    patches = _checked(out, pixels.shape[0] * pixels.shape[1] // spec.patch**2, spec)
    if pixels.shape[2] == 3:
        pixels = np.concatenate((pixels, pixels[:, :, :1]), axis=2)
    resample.to_patches(np.ascontiguousarray(pixels), spec.patch, spec.merge, patches)
    return patches


def codecs() -> dict[str, str]:
    """Return the libraries that decode "jpeg" and "other" formats in this process, with their versions."""
    pillow = f"pillow {version('pillow')}"
    return {"jpeg": jpeg.NAME or pillow, "other": pillow}


@cache
def log_codecs() -> None:
    """Log, once per process, the libraries that decode images here."""
    log.info("image codecs %s", pairs(**codecs()))
    if jpeg.NAME is None:
        log.warning("simplejpeg is not installed: Pillow decodes JPEGs, with the same pixels; pip install simplejpeg is faster")
    if reference.LACKS:
        log.warning(
            "Pillow was built without %s: other preprocessors may take images that this one refuses, or the other way round; "
            "install its own wheel",
            ", ".join(reference.LACKS),
        )


def _checked(out: NDArray[np.uint8] | None, patches: int, spec: ImageSpec) -> NDArray[np.uint8]:
    shape = (patches, 3 * spec.patch**2)
    if out is None:
        return np.empty(shape, np.uint8)
    if out.shape != shape or not out.flags.c_contiguous:
        raise ValueError(f"out must be contiguous and of shape {shape}, got {out.shape}")
    return out


def _cut(pixels: NDArray[np.uint8], box: resample.Box, fit: Fit, spec: ImageSpec, out: NDArray[np.uint8]) -> None:
    """Resize the `box` of an image's pixels as `fit` says, and cut the tiles into `out`: (tiles, patches, values)."""
    scratch, other = _scratch, _other_scratch  # pixels are resized from one into the other
    resized = resample.resize(pixels, *fit.sizes[0], scratch, box, spec.resample)
    for size in fit.sizes[1:]:
        scratch, other = other, scratch
        resized = resample.resize(resized, *size, scratch, None, spec.resample)
    width, height = fit.tile
    corners = [(row * height, column * width) for row in range(fit.rows) for column in range(fit.columns)]
    for (top, left), tile in zip(corners, out, strict=False):
        _to_patches(resized[top : top + height, left : left + width], spec, tile)
    if fit.whole is not None:
        source, part = (pixels, box) if fit.whole == "original" else (resized, None)
        _to_patches(resample.resize(source, width, height, other, part, spec.resample), spec, out[-1])


def _cut_crops(
    pixels: NDArray[np.uint8], box: resample.Box, fit: Fit, spec: ImageSpec, scale: int, out: NDArray[np.uint8]
) -> None:
    """Resize the `box` of an image's pixels, and then each crop of it, into `out`: (1 + crops, patches, values)."""
    _to_patches(resample.resize(pixels, *fit.tile, _other_scratch, box, spec.resample), spec, out[0])
    for crop, tile in zip(fit.crops, out[1:], strict=True):
        part, within = _part(pixels, box, crop, scale)
        _to_patches(resample.resize(part, *fit.tile, _other_scratch, within, spec.resample), spec, tile)


def _cut_anyres(pixels: NDArray[np.uint8], box: resample.Box, fit: Fit, spec: ImageSpec, out: NDArray[np.uint8]) -> None:
    """Resize the `box` of an image's pixels, whole and into the middle of the tiles, into `out`: (1 + tiles, patches, values)."""
    width, height = fit.tile
    if fit.canvas is None:
        squared = _centred(pixels, (max(pixels.shape[:2]),) * 2, _GREY)
        _to_patches(resample.resize(squared, width, height, _scratch, None, spec.resample), spec, out[0])
        return
    _to_patches(resample.resize(pixels, width, height, _scratch, box, spec.resample), spec, out[0])
    resized = _centred(resample.resize(pixels, *fit.sizes[0], _scratch, box, spec.resample), fit.canvas, 0)
    corners = [(row * height, column * width) for row in range(fit.rows) for column in range(fit.columns)]
    for (top, left), tile in zip(corners, out[1:], strict=True):
        _to_patches(resized[top : top + height, left : left + width], spec, tile)


def _centred(pixels: NDArray[np.uint8], size: tuple[int, int], value: int) -> NDArray[np.uint8]:
    """Return pixels in the middle of others of this (width, height) and one grey value; what cannot be halved is behind them."""
    height, width, _ = pixels.shape
    top, left = (size[1] - height) // 2, (size[0] - width) // 2
    whole = np.full((size[1], size[0], 4), value, np.uint8)
    whole[top : top + height, left : left + width] = pixels
    return whole


def _part(pixels: NDArray[np.uint8], box: resample.Box, crop: Crop, scale: int) -> tuple[NDArray[np.uint8], resample.Box]:
    """Return a copy of the pixels of a crop, and where it lies in them: its edges may cut through a pixel.

    The image lies in the `box` of `pixels`. Pixels beside the crop are left out, as a filter would mix them in.
    """
    left, top, width, height = (place + side / scale for place, side in zip((box.left, box.top, 0, 0), crop, strict=True))
    first_row, first_column = math.floor(top), math.floor(left)
    part = pixels[first_row : math.ceil(top + height), first_column : math.ceil(left + width)]
    return np.ascontiguousarray(part), resample.Box(left - first_column, top - first_row, width, height)


def _to_patches(pixels: NDArray[np.uint8], spec: ImageSpec, out: NDArray[np.uint8]) -> None:
    """Cut pixels into patches, without what is behind the last whole one."""
    height, width = (side // spec.patch * spec.patch for side in pixels.shape[:2])
    resample.to_patches(np.ascontiguousarray(pixels[:height, :width]), spec.patch, spec.merge, out)


def _read(data: bytes, header: Header, spec: ImageSpec, scratch: Scratch, scale: int = 1) -> NDArray[np.uint8]:
    """Decode the upright image, `scale` times smaller on each side; the result may lie in `scratch`."""
    height, width = -(-header.height // scale), -(-header.width // scale)
    if header.plain_jpeg:
        pixels = scratch.take("pixels", height, width, 4)
        if jpeg.decode(data, pixels, scale):
            return _upright(pixels, header.orientation)
        del pixels  # freed before the reference codec allocates its own, as it may be large
    return _upright(reference.decode(data, spec, scale), header.orientation)


def _header(data: bytes, spec: ImageSpec) -> Header:
    """Return the header of an image file after checking all limits."""
    header = parse(data)
    if header is None:
        header = reference.read_header(data, spec)
    else:
        reference.check_limits(header.width, header.height, spec)
    check_cost(header, spec)
    return header


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Rotate and mirror stored pixels as an EXIF orientation, 1 to 8, says."""
    if orientation == 1:
        return pixels
    turned = pixels.transpose(1, 0, 2) if orientation >= 5 else pixels
    if orientation in _UPSIDE_DOWN:
        turned = turned[::-1]
    if orientation in _MIRRORED:
        turned = turned[:, ::-1]
    return np.ascontiguousarray(turned)


def _box(header: Header, scale: int) -> resample.Box:
    """Return where the image lies in its upright pixels at a reduced scale: at scale 2, 101 pixels are 50.5 of 51 decoded ones,
    and the spare half is at the end or, if the orientation reverses that axis, at the beginning."""
    width, height = header.upright
    left = -width % scale / scale if header.orientation in _MIRRORED else 0.0
    top = -height % scale / scale if header.orientation in _UPSIDE_DOWN else 0.0
    return resample.Box(left, top, width / scale, height / scale)
