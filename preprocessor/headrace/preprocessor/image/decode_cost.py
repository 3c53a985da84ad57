"""The cost of decoding an image, from its header: memory grows with pixels, time with pixels and scans.

A file of half a megabyte can ask for a minute and gigabytes. The cost is the same on every machine, whatever codecs are
installed, since a sample must be refused everywhere or nowhere.
"""

from __future__ import annotations

import math

from headrace.preprocessor.image.fit import fit_of
from headrace.preprocessor.image.grid import reduction
from headrace.preprocessor.image.header import MOST_SCANS, PIXEL_BYTES, Header
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import ImageSpec

_SCANS = 16
"""Limit of pixels times scans, as a multiple of `max_source_pixels`, so that a large image takes seconds at most."""


def check_cost(header: Header, spec: ImageSpec) -> None:
    """Raise BadSampleError (too_large) if decoding would take too many scans or too much memory."""
    size = f"{header.width}x{header.height} pixels"
    pixels = header.width * header.height
    if header.scans >= MOST_SCANS or pixels * header.scans > _SCANS * spec.max_source_pixels:
        raise BadSampleError(Reason.TOO_LARGE, f"{size} in {header.scans} scans or more; save the image with fewer")
    taken = -(-decode_bytes(header, spec) // 2**20)
    if taken > spec.max_decode_mib:
        detail = f"decoding {size} takes {taken} MiB, more than image.max_decode_mib ({spec.max_decode_mib})"
        raise BadSampleError(Reason.TOO_LARGE, detail)


def decode_bytes(header: Header, spec: ImageSpec) -> int:
    """Return the peak memory in bytes of decoding an image and then resizing it, first along one axis and then the other."""
    width, height = header.upright
    fit = fit_of(width, height, spec)
    scale = reduction(width, height, fit.sizes[0], spec) if header.plain_jpeg and not fit.square else 1
    pixels = width * height / scale**2
    decoding = PIXEL_BYTES * pixels + (header.pixel_bytes - PIXEL_BYTES) * width * height
    resizing, held, old_width, old_height = 0.0, pixels, width / scale, height / scale
    for new_width, new_height in (*fit.sizes, *([fit.tile] if fit.whole else [])):
        resizing = max(resizing, held + max(old_width * new_height, old_height * new_width) + new_width * new_height)
        held, old_width, old_height = pixels + new_width * new_height, new_width, new_height
    copied = max((crop_width * crop_height for _, _, crop_width, crop_height in fit.crops), default=0) / scale**2
    copied += math.prod(fit.canvas or (0,)) + (max(width, height) ** 2 if fit.square else 0)
    return round(max(decoding, 4 * (resizing + copied))) + 3 * spec.patch**2 * fit.grid(spec.patch).patches
