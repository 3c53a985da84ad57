"""Memory for what lives only while an image is decoded, kept from one image to the next.

Fresh pages cost more than the work done in them: without this a third of the time of an image goes to page faults.
"""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

KEEP_BYTES = 16 * 2**20
"""A thread keeps buffers up to this size each: 4 megapixels. Larger ones are made and freed with their image; there numpy asks
for huge pages, whose first touch is cheap."""


class Scratch(threading.local):
    """Named buffers of one thread. What `take` gives is valid until the same thread takes that name again."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, *shape: int) -> NDArray[np.uint8]:
        """A C-contiguous array with any contents."""
        size = math.prod(shape)
        if size > KEEP_BYTES:
            return np.empty(shape, np.uint8)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].reshape(shape)
