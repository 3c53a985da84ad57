"""Images: header probe, decoding to RGB, the patch grid, and patches.

JPEG (MPO included), PNG, WebP, GIF and BMP; the content decides, not the name; of animations the first frame. Probing
reads headers only and applies the same limits and the same rotation as decoding, so that both give the same grid.

Decoding: EXIF orientation is applied (from an EXIF block in front of the pixels), CMYK and palettes become RGB,
transparency is laid over `background`, 16-bit grey is scaled to 8 bits. Pixels must be whole: a truncated file, be it
only by its end marker, is corrupt_media. Resizing: bicubic with antialiasing.

All functions are pure and thread-safe; Pillow releases the interpreter lock while it decodes and resizes.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from headrace.quarantine import BadSampleError, Reason
from headrace.spec import ImageSpec

# `_open` applies the job's own limit from the header; Pillow's would add warnings and errors of its own.
Image.MAX_IMAGE_PIXELS = None
# Damaged EXIF and MPO blocks, which the pixels do not depend on.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_OTHER_KINDS = {
    "TIFF": (0, (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    "HEIF or AVIF": (4, (b"ftyp",)),
    "JPEG 2000": (0, (b"\0\0\0\x0cjP  ", b"\xffO\xffQ")),
    "JPEG XL": (0, (b"\xff\x0a", b"\0\0\0\x0cJXL ")),
    "Photoshop": (0, (b"8BPS",)),
    "SVG": (0, (b"<svg",)),
    "PDF": (0, (b"%PDF",)),
    "icon": (0, (b"\0\0\1\0",)),
    "PNM": (0, (b"P4\n", b"P5\n", b"P6\n")),
}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Patches of one image before merging."""

    height: int
    width: int

    @property
    def patches(self) -> int:
        """Patches before merging."""
        return self.height * self.width

    def tokens(self, merge: int) -> int:
        """Tokens of the LLM: one for each merge * merge patches."""
        return self.patches // merge**2


def probe(data: bytes, spec: ImageSpec) -> Grid:
    """The grid that `decode` will give, from the header alone.

    Raises BadSampleError with empty_media, corrupt_media, unsupported_media, too_large or bad_aspect_ratio.
    """
    width, height = read_size(data, spec)
    return _grid(width, height, spec)


def decode(data: bytes, spec: ImageSpec) -> tuple[NDArray[np.uint8], Grid]:
    """Patches of shape (grid.patches, 3 * patch * patch), uint8, and their grid. Raises as `probe` does."""
    rgb = read_rgb(data, spec)
    grid = _grid(rgb.width, rgb.height, spec)
    size = (grid.width * spec.patch, grid.height * spec.patch)
    resized = rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC)
    return to_patches(np.asarray(resized), spec), grid


def read_size(data: bytes, spec: ImageSpec) -> tuple[int, int]:
    """(width, height) in pixels as they will be seen, rotation applied, after all limits."""
    with _open(data, spec) as image:
        return _turned(image.size, _orientation(image))


def read_rgb(data: bytes, spec: ImageSpec) -> Image.Image:
    """The upright image in mode RGB, at its own size."""
    with _open(data, spec) as image:
        size, orientation = image.size, _orientation(image)
        try:
            image.load()
        except MemoryError:
            raise
        except Exception as err:  # Pillow's decoders raise nearly every kind on damaged data
            raise BadSampleError(Reason.CORRUPT_MEDIA, f"the {image.format} data does not decode: {err}") from err
        if image.size != size:
            raise BadSampleError(Reason.CORRUPT_MEDIA, f"the header says {size}, the data {image.size}")
        rgb = _to_rgb(image, spec.background)
    return rgb.transpose(_TURNS[orientation]) if orientation in _TURNS else rgb


def smart_resize(width: int, height: int, spec: ImageSpec) -> tuple[int, int]:
    """(width, height) as multiples of patch * merge with nearly the same aspect ratio and min_pixels <= area <= max_pixels.

    The rule of Qwen2-VL (arXiv:2409.12191, section 2.1, "naive dynamic resolution"; the published image processor's
    `smart_resize`): round each side half to even, then shrink or grow both by one factor if the area is out of bounds. A
    side never gets less than one unit, so very long images may pass max_pixels by the other side.
    """
    unit = spec.patch * spec.merge
    new_width, new_height = round(width / unit) * unit, round(height / unit) * unit
    if new_width * new_height > spec.max_pixels:
        factor = math.sqrt(width * height / spec.max_pixels)
        return max(unit, math.floor(width / factor / unit) * unit), max(unit, math.floor(height / factor / unit) * unit)
    if new_width * new_height < spec.min_pixels:
        factor = math.sqrt(spec.min_pixels / (width * height))
        return math.ceil(width * factor / unit) * unit, math.ceil(height * factor / unit) * unit
    return new_width, new_height


def to_patches(pixels: NDArray[np.uint8], spec: ImageSpec) -> NDArray[np.uint8]:
    """(height, width, 3) pixels, sides multiples of patch * merge, as (patches, 3 * patch * patch).

    Channel first inside of a patch. The merge * merge patches that become one token are contiguous, row by row; so are the
    groups (NaViT packing, arXiv:2307.06304, in Qwen2-VL's order).
    """
    patch, merge = spec.patch, spec.merge
    rows, columns = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
    # axes: group row, row in group, y, group column, column in group, x, channel
    cells = pixels.reshape(rows, merge, patch, columns, merge, patch, 3)
    return np.ascontiguousarray(cells.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3 * patch * patch)


def _grid(width: int, height: int, spec: ImageSpec) -> Grid:
    width, height = smart_resize(width, height, spec)
    return Grid(height=height // spec.patch, width=width // spec.patch)


def _open(data: bytes, spec: ImageSpec) -> Image.Image:
    """The image with its header read and all limits checked; no memory for pixels yet."""
    if not data:
        raise BadSampleError(Reason.EMPTY_MEDIA, "the image has 0 bytes")
    _check_webp_canvas(data, spec)
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except MemoryError:
        raise
    except UnidentifiedImageError as err:
        raise _unknown(data) from err
    except Exception as err:  # as in read_rgb
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"the image's header is damaged: {err}") from err
    _check_limits(*image.size, spec)
    return image


def _check_limits(width: int, height: int, spec: ImageSpec) -> None:
    if width < 1 or height < 1:
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"the header says {width}x{height} pixels")
    if width * height > spec.max_source_pixels:
        raise BadSampleError(Reason.TOO_LARGE, f"{width}x{height} pixels, more than {spec.max_source_pixels}")
    if max(width, height) > spec.max_aspect_ratio * min(width, height):
        raise BadSampleError(Reason.BAD_ASPECT_RATIO, f"{width}x{height} pixels, beyond {spec.max_aspect_ratio:g}:1")


def _check_webp_canvas(data: bytes, spec: ImageSpec) -> None:
    """The limits from WebP's own header (RFC 9649): opening with Pillow already allocates two canvases."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return
    if data[12:16] == b"VP8X":
        width, height = 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    elif data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", data[26:30]))
    _check_limits(width, height, spec)


def _unknown(data: bytes) -> BadSampleError:
    for kind, (offset, magics) in _OTHER_KINDS.items():
        if data.startswith(magics, offset):
            return BadSampleError(Reason.UNSUPPORTED_MEDIA, f"{kind} is not taken; convert it to one of {', '.join(_FORMATS)}")
    return BadSampleError(Reason.CORRUPT_MEDIA, f"no image: the data begins with {data[:16]!r}")


def _turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    return (size[1], size[0]) if orientation >= 5 else size


def _orientation(image: Image.Image) -> int:
    """1 to 8 as EXIF defines them; 1 where there is no sound EXIF block in front of the pixels.

    Read here and not by Pillow's getexif, which decodes all pixels of a PNG on the way and warns of damage.
    """
    block = image.info.get("exif")
    if not isinstance(block, bytes):
        return 1
    tiff = block.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 1
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(order + "H", tiff, start)
    for entry in range(start + 2, min(start + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
        if tag == 0x0112 and kind == 3:
            return value if 1 <= value <= 8 else 1
    return 1


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits: convert("RGB") would clip them to white
        grey = np.asarray(image).astype(np.uint32).clip(0, 65535)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        rgb = Image.new("RGB", image.size, background)
        rgb.paste(rgba, mask=rgba.getchannel("A"))
        return rgb
    return image.convert("RGB")
