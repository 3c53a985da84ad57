"""The fast codec for ordinary JPEGs: simplejpeg, where it is installed.

It uses the same library as Pillow (libjpeg-turbo) with the same settings and gives the same pixels. It is strict: a file that
the library only warns of (a missing end marker, damaged entropy-coded data) is left to the reference codec, which decides.

Thread-safe; the interpreter lock is released while it decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _installed() -> Callable[..., Any] | None:
    try:
        decoder: Callable[..., Any] = import_module("simplejpeg").decode_jpeg
    except ImportError:
        return None
    return decoder


_decode = _installed()
NAME = f"simplejpeg {version('simplejpeg')}" if _decode else None
"""Name and version of the codec; None if it is not installed."""


def decode(data: bytes, out: NDArray[np.uint8], scale: int = 1) -> bool:
    """Decode a JPEG into `out`, C-contiguous, not rotated: red, green, blue and a byte without meaning for each pixel.

    `out` has the shape (height, width, 4) of the header, its sides divided by a `scale` of 2, 4 or 8 and rounded up; with such a
    scale it must have 8 pixels or more a side, so that no other scale of the library gives that size.

    Return False if the reference codec must decide: not installed, damaged data, or a size other than the header's.
    """
    if _decode is None:
        return False
    smaller = {"min_height": out.shape[0], "min_width": out.shape[1]} if scale > 1 else {}
    try:
        pixels = _decode(data, colorspace="RGBX", buffer=out, strict=True, **smaller)
    except ValueError:
        return False
    return bool(pixels.shape == out.shape)
