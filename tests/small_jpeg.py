"""A JPEG that may be a thumbnail."""

from __future__ import annotations

import io

from PIL import Image


def small_jpeg(shade: int = 0) -> bytes:
    """The file of 8 times 8 pixels of one grey."""
    file = io.BytesIO()
    Image.new("L", (8, 8), shade).save(file, "JPEG")
    return file.getvalue()
