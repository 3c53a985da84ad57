"""Images: header probe, decoding to upright pixels, the patch grid, and patches.

    header.py      size and rotation from the first bytes, ordinary headers only
    reference.py   Pillow, all kinds: what it says counts
    jpeg.py        simplejpeg, ordinary JPEGs: the same pixels sooner
    resample.py    Pillow's bicubic and the patches, compiled
    scratch.py     memory that is kept from one image to the next
    cost.py        what decoding would take, from the header
    grid.py        to which size an image is brought, and how much smaller a JPEG may be decoded before that

With `ImageSpec.reduced_scale` the frequency domain does a part of the shrinking of large JPEGs; both codecs do it alike, and
the grid stays that of the full size.

Probing reads headers only and applies the same limits and the same rotation (from an EXIF block in front of the pixels)
as decoding, so that both give the same grid. With or without the fast parts a file gives the same patches or the same
refusal, on every machine: JPEG and PNG decoding and the resizing are exact integer arithmetic. Only the libraries inside
of Pillow and simplejpeg could change that, so preprocessors of one job should have one version of each; `codecs` names
them.

All functions are pure and thread-safe, and the interpreter lock is released for nearly all of the time.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from headrace.observability.logs import pairs
from headrace.preprocessor.decode_memory import room_for
from headrace.preprocessor.image import jpeg, reference, resample
from headrace.preprocessor.image.decode_cost import check_cost, decode_bytes
from headrace.preprocessor.image.grid import Grid, grid_of, reduction, smart_resize
from headrace.preprocessor.image.header import Header, parse
from headrace.preprocessor.image.scratch import Scratch
from headrace.spec import ImageSpec

__all__ = ["Grid", "codecs", "decode", "log_codecs", "probe", "read_pixels", "read_size", "smart_resize", "to_patches"]

log = logging.getLogger(__name__)

_scratch = Scratch()
_UPSIDE_DOWN, _MIRRORED = (3, 4, 7, 8), (2, 3, 6, 7)  # orientations, after the sides of 5 to 8 are exchanged


def probe(data: bytes, spec: ImageSpec) -> Grid:
    """The grid that `decode` will give, from the header alone.

    Raises BadSampleError with empty_media, corrupt_media, unsupported_media, too_large or bad_aspect_ratio.
    """
    return grid_of(*read_size(data, spec), spec)


def decode(data: bytes, spec: ImageSpec, out: NDArray[np.uint8] | None = None) -> tuple[NDArray[np.uint8], Grid]:
    """Patches of shape (grid.patches, 3 * patch * patch), uint8, and their grid. Raises as `probe` does.

    Waits for memory where other threads decode (preprocessor.decode_memory). `out`: a C-contiguous array of that shape, to be
    filled and returned; its contents are undefined after an error.
    """
    header = _header(data, spec)
    grid = grid_of(*header.upright, spec)
    patches = _checked(out, grid.patches, spec)
    scale = reduction(*header.upright, grid, spec) if header.plain_jpeg else 1
    with room_for(decode_bytes(header, spec)):
        pixels = _read(data, header, spec, _scratch, scale)
        resized = resample.resize(pixels, grid.width * spec.patch, grid.height * spec.patch, _scratch, _box(header, scale))
        resample.to_patches(resized, spec.patch, spec.merge, patches)
        del pixels, resized  # before others have the room
    return patches, grid


def read_size(data: bytes, spec: ImageSpec) -> tuple[int, int]:
    """(width, height) in pixels as they will be seen, rotation applied, after all limits. Raises as `probe` does."""
    return _header(data, spec).upright


def read_pixels(data: bytes, spec: ImageSpec) -> NDArray[np.uint8]:
    """The upright image at its own size: (height, width, 4), uint8, red, green, blue and a byte without meaning.

    Raises as `probe` does.
    """
    return _read(data, _header(data, spec), spec, Scratch())


def to_patches(pixels: NDArray[np.uint8], spec: ImageSpec, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Pixels of shape (height, width, 3 or 4), uint8, sides multiples of patch * merge, as (patches, 3 * patch * patch).

    Channel first inside of a patch. The merge * merge patches that become one token are contiguous, row by row; so are the
    groups (NaViT packing, arXiv:2307.06304, in Qwen2-VL's order). `out` as in `decode`.
    """
    patches = _checked(out, pixels.shape[0] * pixels.shape[1] // spec.patch**2, spec)
    if pixels.shape[2] == 3:
        pixels = np.concatenate((pixels, pixels[:, :, :1]), axis=2)
    resample.to_patches(np.ascontiguousarray(pixels), spec.patch, spec.merge, patches)
    return patches


def codecs() -> dict[str, str]:
    """The libraries that decode, with their versions."""
    pillow = f"pillow {version('pillow')}"
    return {"jpeg": jpeg.NAME or pillow, "other": pillow}


@cache
def log_codecs() -> None:
    """One line a process about what decodes here."""
    log.info("image codecs %s", pairs(**codecs()))
    if jpeg.NAME is None:
        log.warning("simplejpeg is not installed: Pillow decodes JPEGs, with the same pixels; pip install simplejpeg is faster")


def _checked(out: NDArray[np.uint8] | None, patches: int, spec: ImageSpec) -> NDArray[np.uint8]:
    shape = (patches, 3 * spec.patch**2)
    if out is None:
        return np.empty(shape, np.uint8)
    if out.shape != shape or not out.flags.c_contiguous:
        raise ValueError(f"out must be contiguous and of shape {shape}, got {out.shape}")
    return out


def _read(data: bytes, header: Header, spec: ImageSpec, scratch: Scratch, scale: int = 1) -> NDArray[np.uint8]:
    """The upright image, `scale` times smaller; the result may lie in `scratch`."""
    height, width = -(-header.height // scale), -(-header.width // scale)
    if header.plain_jpeg:
        pixels = scratch.take("pixels", height, width, 4)
        if jpeg.decode(data, pixels, scale):
            return _upright(pixels, header.orientation)
        del pixels  # which may be large, before there are others
    return _upright(reference.decode(data, spec, scale), header.orientation)


def _header(data: bytes, spec: ImageSpec) -> Header:
    """The header, after all limits."""
    header = parse(data)
    if header is None:
        header = reference.read_header(data, spec)
    else:
        reference.check_limits(header.width, header.height, spec)
    check_cost(header, spec)
    return header


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turned as EXIF's orientations 1 to 8 say."""
    if orientation == 1:
        return pixels
    turned = pixels.transpose(1, 0, 2) if orientation >= 5 else pixels
    if orientation in _UPSIDE_DOWN:
        turned = turned[::-1]
    if orientation in _MIRRORED:
        turned = turned[:, ::-1]
    return np.ascontiguousarray(turned)


def _box(header: Header, scale: int) -> resample.Box:
    """Where the image lies in upright pixels of a reduced scale: 101 pixels are 50.5 of the 51, the half at the end or, turned,
    at the beginning."""
    width, height = header.upright
    left = -width % scale / scale if header.orientation in _MIRRORED else 0.0
    top = -height % scale / scale if header.orientation in _UPSIDE_DOWN else 0.0
    return resample.Box(left, top, width / scale, height / scale)
