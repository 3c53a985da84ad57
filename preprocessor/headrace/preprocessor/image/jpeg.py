"""The fast codec for ordinary JPEGs: simplejpeg, where it is installed.

It uses the same library as Pillow (libjpeg-turbo) with the same settings and gives the same pixels. It is strict: what
the library only warns of (a missing end marker, damaged entropy-coded data) is left to the reference codec, whose word
counts.

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
"""The codec with its version; None where it is not installed."""


def decode(data: bytes, out: NDArray[np.uint8], scale: int = 1) -> bool:
    """Fill `out` with pixels as they are stored, C-contiguous; red, green, blue and a byte without meaning.

    `out` is (height, width, 4) of the header, or at `scale` 2, 4 or 8 so many times smaller, rounded up; then it has 8 pixels
    or more a side, so that no other scale of the library gives that size.

    False where the reference codec is to decide: not installed, damaged data, or a size other than the header's.
    """
    if _decode is None:
        return False
    smaller = {"min_height": out.shape[0], "min_width": out.shape[1]} if scale > 1 else {}
    try:
        pixels = _decode(data, colorspace="RGBX", buffer=out, strict=True, **smaller)
    except ValueError:
        return False
    return bool(pixels.shape == out.shape)
