"""The reference codec: Pillow, for every format.

It takes JPEG (MPO included), PNG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000 and PNM (PBM, PGM, PPM, PFM), by content and not by name,
and the first frame of animations. CMYK and palettes become RGB, transparency is laid over `background`.

Grey of 16 bits is divided by 257. Integers of 32 bits count likewise, so that 65,535 is white, and floats from 0 to 1; where one
of them is beyond that, nothing says which values are black and white, and the picture is refused.

Pixels must be complete: a truncated file is corrupt_media, even if it lacks only its end marker, and so is a JPEG that was cut
and got an end marker again, or a PNG whose checksums disagree or whose rows
end early.

All functions are pure and thread-safe; Pillow releases the interpreter lock while it decodes, except for AVIF.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image, UnidentifiedImageError, features

from headrace.preprocessor.image import avif, jpeg2000, libtiff_errors, png, tiff
from headrace.preprocessor.image.decode_cost import check_cost
from headrace.preprocessor.image.header import PIXEL_BYTES, WEBP_BYTES, Header, count_scans, end_of_scans, orientation, with_scans
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import ImageSpec

# `check_limits` applies the job's own limit from the header; Pillow's would add warnings and errors of its own.
Image.MAX_IMAGE_PIXELS = None
# Pillow warns of damaged EXIF and MPO blocks, which the pixels do not depend on.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

# Images are decoded by many threads already, each within the memory that was foreseen for it.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1

LACKS = tuple(name for name in ("webp", "avif", "jpg_2000", "libtiff") if not features.check(name)) + (
    () if libtiff_errors.TAKEN else ("libtiff as a library of its own",)
)
"""What this Pillow was built without; its own wheels have all of it."""

_BAND_PIXELS = 2**18
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16", "I;16B", "F")
_PNM = (b"P4", b"P5", b"P6", b"Pf")  # Pillow knows more, of its own
_MORE_JPEG = b"".join(bytes((0xFF, restart)) + b"\x55\xaa\x0f\x96" * 16 for restart in range(0xD0, 0xD8))
_MORE_JPEG = _MORE_JPEG[2:] + 2 * _MORE_JPEG  # data, and then data behind each restart marker, twice
_OTHER_KINDS = {
    "a TIFF of this layout": (0, (b"II", b"MM")),
    "JPEG XL": (0, (b"\xff\x0a", b"\0\0\0\x0cJXL ")),
    "Photoshop": (0, (b"8BPS",)),
    "SVG": (0, (b"<svg",)),
    "PDF": (0, (b"%PDF",)),
    "icon": (0, (b"\0\0\1\0",)),
}


def read_header(data: bytes, spec: ImageSpec) -> Header:
    """Read a header with Pillow and check the limits of its size. Raises BadSampleError with the reasons of `image.probe`."""
    with _open(data, spec) as image:
        turned, pixel_bytes = _orientation_and_cost(image, data)
        header = Header(
            width=image.width,
            height=image.height,
            orientation=turned,
            plain_jpeg=image.format == "JPEG" and image.mode in ("L", "RGB"),
            pixel_bytes=pixel_bytes,
        )
        return with_scans(header, count_scans(data), len(image.getbands())) if image.format in ("JPEG", "MPO") else header


def decode(data: bytes, spec: ImageSpec, scale: int = 1) -> NDArray[np.uint8]:
    """Decode an image file, not rotated: (height, width, 4), uint8, red, green, blue and a byte without meaning.

    A `scale` of 2, 4 or 8, for JPEGs only, divides both sides, rounded up. Raises BadSampleError with the reasons of
    `headrace.preprocessor.image.probe`.
    """
    with _open(data, spec) as image:
        if image.format == "PNG":
            png.check_checksums(data)
        _load(image, scale)
        if image.format == "PNG" and ("interlace" in image.info or _ends_empty(image)):
            png.check_rows(data)
        pixels, kind = _pixels(image, spec.background), image.format
    del image  # freed before a JPEG is decoded again
    if kind in ("JPEG", "MPO"):
        _check_jpeg(data, pixels, spec, scale)
    return pixels


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
    if avif.is_iso_media(data):
        avif.check_kind(data)
    try:
        image = Image.open(io.BytesIO(tiff.read(data).data if tiff.is_tiff(data) else data), formats=_FORMATS)
    except (MemoryError, BadSampleError):
        raise
    except UnidentifiedImageError as err:
        raise _unknown(data) from err
    except Exception as err:  # as in `decode`, Pillow raises nearly every kind
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"the image's header is damaged: {err}") from err
    check_limits(*image.size, spec)
    if image.mode not in _MODES:
        raise BadSampleError(Reason.UNSUPPORTED_MEDIA, f"{image.format} with pixels of the kind {image.mode} is not taken")
    if image.format == "PPM" and not (data.startswith(_PNM) and image.tile[0][0] == "raw"):
        raise BadSampleError(
            Reason.UNSUPPORTED_MEDIA, "PNM in plain text, or whose largest value is not 255 (or, in grey, 65535), is not taken"
        )
    return image


def _orientation_and_cost(image: Image.Image, data: bytes) -> tuple[int, int]:
    """Return `orientation` and `pixel_bytes` of an opened image's header."""
    exif = image.info.get("exif")
    turned = orientation(exif) if isinstance(exif, bytes) else 1
    match image.format:
        case "TIFF":
            checked = tiff.read(data)
            return checked.orientation, checked.pixel_bytes
        case "AVIF":
            return turned, avif.pixel_bytes(data, *image.size)
        case "JPEG2000":
            return 1, jpeg2000.pixel_bytes(data, *image.size)
        case _:
            return turned, WEBP_BYTES if image.format == "WEBP" else PIXEL_BYTES


def _load(image: Image.Image, scale: int) -> None:
    """Decode an opened image's pixels."""
    if scale > 1:
        image.draft(None, (image.width // scale, image.height // scale))
    size = image.size
    try:
        with libtiff_errors.counted() as errors:
            image.load()
            if errors():
                raise OSError("libtiff has found damage")
    except MemoryError:
        raise
    except Exception as err:  # Pillow's decoders raise nearly every kind on damaged data
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"the {image.format} data does not decode: {err}") from err
    if image.size != size:
        raise BadSampleError(Reason.CORRUPT_MEDIA, f"the header says {size}, the data {image.size}")


def _ends_empty(image: Image.Image) -> bool:
    """Whether the last row of an image has nothing but zeros, as all rows have that were never written."""
    return image.crop((0, image.height - 1, image.width, image.height)).getbbox(alpha_only=False) is None


def _check_jpeg(data: bytes, pixels: NDArray[np.uint8], spec: ImageSpec, scale: int) -> None:
    """Check that a JPEG has all of its pixels, which libjpeg does not tell. Raises BadSampleError with corrupt_media.

    If bytes in front of the end marker change the picture, its own have been too few.
    """
    end = end_of_scans(data)
    with _open(data[:end] + _MORE_JPEG + data[end:], spec) as image:
        _load(image, scale)
        for top, rgb in _bands(image, spec.background):
            if not np.array_equal(rgb, pixels[top : top + len(rgb)]):
                raise BadSampleError(Reason.CORRUPT_MEDIA, "the JPEG ends before its picture does")


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
    pixels = np.empty((image.height, image.width, 4), np.uint8)
    for top, rgb in _bands(image, background):
        pixels[top : top + len(rgb)] = rgb
    return pixels


def _bands(image: Image.Image, background: tuple[int, int, int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield the number of the first row and the pixels (rows, width, 4) of each band of a decoded image."""
    width, height = image.size
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        band = image if rows >= height else image.crop((0, top, width, bottom))
        rgb = _to_rgb(band, background).tobytes("raw", "RGBX")
        yield top, np.frombuffer(rgb, np.uint8).reshape(bottom - top, width, 4)


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        rgb = Image.new("RGB", image.size, background)
        rgb.paste(rgba, mask=rgba.getchannel("A"))
        return rgb
    return image.convert("RGB")


def _eight_bits(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale integers from 0 to 65,535 or floats from 0 to 1 to 8 bits, rounded. Raises BadSampleError with unsupported_media."""
    white = 1 if values.dtype.kind == "f" else 65535
    least, most = values.min(), values.max()
    if not 0 <= least <= most <= white:
        detail = (
            f"values from {least:g} to {most:g}, beyond 0 for black and {white} for white; scale them, or convert them to 8 bits"
        )
        raise BadSampleError(Reason.UNSUPPORTED_MEDIA, detail)
    if white == 1:
        return np.rint(values * np.float32(255)).astype(np.uint8)
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
