"""Buffers for temporary arrays of image decoding, kept from one image to the next.

Fresh pages cost more than the work done in them: without these buffers, a third of an image's time goes to page faults.
"""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

KEEP_BYTES = 16 * 2**20
"""Size of the largest buffer that a thread keeps: 4 megapixels. Larger ones are allocated and freed with their image; for them
numpy asks for huge pages, whose first touch is cheap."""


class Scratch(threading.local):
    """Named buffers, separate for each thread. An array from `take` is valid until the same thread takes that name again."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, *shape: int) -> NDArray[np.uint8]:
        """Return a C-contiguous array of that shape with undefined contents."""
        size = math.prod(shape)
        if size > KEEP_BYTES:
            return np.empty(shape, np.uint8)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].reshape(shape)
