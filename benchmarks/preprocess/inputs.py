"""What the preprocessing benchmarks read: media of the bundled example, and larger or longer ones made from them."""

from __future__ import annotations

import io
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

EXAMPLE = Path(__file__).parents[2] / "examples" / "data"
PHOTO_PIXELS = 610_000
"""Of the larger photographs: 0.6 megapixels, what web data sets are made of."""
CAMERA_PIXELS = 12_200_000
NUM_CAMERA_PHOTOS = 6


def members(*suffixes: str, shards: str = "*.tar") -> list[bytes]:
    """Files of the example with one of these endings, in the order of their shards."""
    found = []
    for path in sorted(EXAMPLE.glob(shards)):
        with tarfile.open(path) as archive:
            found += [archive.extractfile(member).read() for member in archive if member.name.endswith(suffixes)]  # type: ignore[union-attr]
    return found


@cache
def photos() -> list[bytes]:
    """The example's photographs, JPEGs of 0.2 to 0.3 megapixels."""
    return members(".jpg", shards="pictures-*.tar")


@cache
def large_photos() -> list[bytes]:
    """The same brought to PHOTO_PIXELS, JPEG of quality 90."""
    return [_enlarged(data, PHOTO_PIXELS) for data in photos()]


@cache
def camera_photos() -> list[bytes]:
    """Some of them at CAMERA_PIXELS, as a telephone takes them: larger than they are sharp."""
    return [_enlarged(data, CAMERA_PIXELS) for data in photos()[:NUM_CAMERA_PHOTOS]]


@cache
def camera_mosaics() -> list[bytes]:
    """All photographs side by side on CAMERA_PIXELS: sharp to the pixel, with an edge between any two."""
    tiles = [Image.open(io.BytesIO(data)).convert("RGB") for data in photos()]
    columns, width, height = 7, 640, 480
    mosaic = Image.new("RGB", (columns * width, -(-len(tiles) // columns) * height))
    for index, tile in enumerate(tiles):
        mosaic.paste(tile, (index % columns * width, index // columns * height))
    buffer = io.BytesIO()
    mosaic.save(buffer, "JPEG", quality=90)
    return [buffer.getvalue()]


def _enlarged(data: bytes, pixels: int) -> bytes:
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(data)) as photo:
        factor = (pixels / (photo.width * photo.height)) ** 0.5
        size = round(photo.width * factor), round(photo.height * factor)
        photo.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@cache
def recordings() -> list[bytes]:
    """The example's FLAC files: 16,000 and 22,050 Hz, mono, 1 to 5 seconds."""
    return members(".flac")


@cache
def clip(seconds: int, sample_rate: int, channels: int) -> bytes:
    """The example's recordings one behind the other as one FLAC file, resampled without a filter."""
    parts = []
    for data in recordings():
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
        places = np.arange(len(samples) * sample_rate // rate) * (rate / sample_rate)
        parts.append(np.interp(places, np.arange(len(samples)), samples))
    mono = np.resize(np.concatenate(parts), seconds * sample_rate)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([mono, *[np.roll(mono, 7)] * (channels - 1)], axis=1), sample_rate, format="FLAC")
    return buffer.getvalue()
