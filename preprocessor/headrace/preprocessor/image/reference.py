"""The reference codec: Pillow, for every format.

It takes JPEG (MPO included), PNG, WebP, GIF and BMP, by content and not by name, and the first frame of animations. CMYK and
palettes become RGB, transparency is laid over `background`, 16-bit grey is scaled to 8 bits. Pixels must be complete: a
truncated file is corrupt_media, even if it lacks only its end marker.

All functions are pure and thread-safe; Pillow releases the interpreter lock while it decodes.
"""

from __future__ import annotations

import io
import struct
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from headrace.preprocessor.image.decode_cost import check_cost
from headrace.preprocessor.image.header import WEBP_BYTES, Header, count_scans, orientation, with_scans
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import ImageSpec

# `check_limits` applies the job's own limit from the header; Pillow's would add warnings and errors of its own.
Image.MAX_IMAGE_PIXELS = None
# Pillow warns of damaged EXIF and MPO blocks, which the pixels do not depend on.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

_BAND_PIXELS = 2**18
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


def read_header(data: bytes, spec: ImageSpec) -> Header:
    """Read a header with Pillow and check the limits of its size. Raises BadSampleError with the reasons of `image.probe`."""
    with _open(data, spec) as image:
        exif = image.info.get("exif")
        header = Header(
            width=image.width,
            height=image.height,
            orientation=orientation(exif) if isinstance(exif, bytes) else 1,
            plain_jpeg=image.format == "JPEG" and image.mode in ("L", "RGB"),
            pixel_bytes=WEBP_BYTES if image.format == "WEBP" else 8,
        )
        return with_scans(header, count_scans(data), len(image.getbands())) if image.format in ("JPEG", "MPO") else header


def decode(data: bytes, spec: ImageSpec, scale: int = 1) -> NDArray[np.uint8]:
    """Decode an image file, not rotated: (height, width, 4), uint8, red, green, blue and a byte without meaning.

    A `scale` of 2, 4 or 8, for JPEGs only, divides both sides, rounded up. Raises BadSampleError with the reasons of
    `headrace.preprocessor.image.probe`.
    """
    with _open(data, spec) as image:
        if scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
        size = image.size
        try:
            image.load()
        except MemoryError:
            raise
        except Exception as err:  # Pillow's decoders raise nearly every kind on damaged data
            raise BadSampleError(Reason.CORRUPT_MEDIA, f"the {image.format} data does not decode: {err}") from err
        if image.size != size:
            raise BadSampleError(Reason.CORRUPT_MEDIA, f"the header says {size}, the data {image.size}")
        return _pixels(image, spec.background)


def check_limits(width: int, height: int, spec: ImageSpec) -> None:
    """Check an image's size against the spec.

    Raises BadSampleError with corrupt_media, too_large, too_small or bad_aspect_ratio.
    """
    if width < 1 or height < 1:
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"the header says {width}x{height} pixels")
    if width * height > spec.max_source_pixels:
        raise BadSampleError(Reason.TOO_LARGE, f"{width}x{height} pixels, more than {spec.max_source_pixels}")
    if min(width, height) < spec.min_source_side:
        raise BadSampleError(Reason.TOO_SMALL, f"{width}x{height} pixels, a side below {spec.min_source_side}")
    if max(width, height) > spec.max_aspect_ratio * min(width, height):
        raise BadSampleError(Reason.BAD_ASPECT_RATIO, f"{width}x{height} pixels, beyond {spec.max_aspect_ratio:g}:1")


def _open(data: bytes, spec: ImageSpec) -> Image.Image:
    """Open an image file, read its header and check the limits of its size; allocates no memory for pixels yet."""
    if not data:
        raise BadSampleError(Reason.EMPTY_MEDIA, "the image has 0 bytes")
    _check_webp_canvas(data, spec)
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except MemoryError:
        raise
    except UnidentifiedImageError as err:
        raise _unknown(data) from err
    except Exception as err:  # as in `decode`, Pillow raises nearly every kind
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"the image's header is damaged: {err}") from err
    check_limits(*image.size, spec)
    return image


def _check_webp_canvas(data: bytes, spec: ImageSpec) -> None:
    """Check the limits by WebP's own header (RFC 9649), since opening with Pillow already allocates two canvases."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return
    if data[12:16] == b"VP8X":
        width, height = 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    elif data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", data[26:30]))
    check_limits(width, height, spec)
    check_cost(Header(width=width, height=height, pixel_bytes=WEBP_BYTES), spec)


def _unknown(data: bytes) -> BadSampleError:
    for kind, (offset, magics) in _OTHER_KINDS.items():
        if data.startswith(magics, offset):
            return BadSampleError(Reason.UNSUPPORTED_MEDIA, f"{kind} is not taken; convert it to one of {', '.join(_FORMATS)}")
    return BadSampleError(Reason.CORRUPT_MEDIA, f"no image: the data begins with {data[:16]!r}")


def _pixels(image: Image.Image, background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Convert a decoded image to RGB band by band; in one piece, a large one would be in memory four times."""
    width, height = image.size
    pixels = np.empty((height, width, 4), np.uint8)
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        band = image if rows >= height else image.crop((0, top, width, bottom))
        rgb = _to_rgb(band, background).tobytes("raw", "RGBX")
        pixels[top:bottom] = np.frombuffer(rgb, np.uint8).reshape(bottom - top, width, 4)
    return pixels


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
