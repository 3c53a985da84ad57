"""TIFF: the same pixels as Pillow's own, one page only, and nothing that a directory of tags could ask for beyond the picture."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from headrace.preprocessor import image
from headrace.preprocessor.image import libtiff_errors, tiff
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import ImageSpec

SPEC = ImageSpec()
Y, X = np.mgrid[0:60, 0:90]
COLOUR = Image.fromarray(np.stack([X * 2, Y * 4, (X + Y) % 256], axis=-1).astype(np.uint8))
PAGE = Image.fromarray((np.random.default_rng(0).random((60, 90)) < 0.8).astype(np.uint8) * 255).convert("1")
Entries = dict[int, tuple[int, int, int]]


def encoded(picture: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "TIFF", **options)
    return buffer.getvalue()


def by_pillow(data: bytes) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(data)) as opened:
        return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))


def entries(data: bytes) -> Entries:
    """Kind, count and value (or where the values are) of each tag of a little-endian file."""
    (begin,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, begin)
    rows = [struct.unpack_from("<HHII", data, begin + 2 + 12 * number) for number in range(count)]
    return {tag: (kind, number, value) for tag, kind, number, value in rows}


def with_entries(data: bytes, tags: Entries, following: int = 0) -> bytes:
    """The file with another directory, behind all else."""
    rows = b"".join(struct.pack("<HHII", tag, *entry) for tag, entry in sorted(tags.items()))
    directory = struct.pack("<H", len(tags)) + rows + struct.pack("<I", following)
    return data[:4] + struct.pack("<I", len(data)) + data[8:] + directory


def changed(data: bytes, **tags: tuple[int, int, int]) -> bytes:
    """The file with other values of `t256` and so on."""
    return with_entries(data, entries(data) | {int(name[1:]): entry for name, entry in tags.items()})


def refusal(data: bytes) -> BadSampleError:
    with pytest.raises(BadSampleError) as caught:
        image.decode(data, SPEC)
    return caught.value


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits"])
@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "PA", "RGB", "RGBX", "CMYK"])
def test_pixels_are_pillows(mode: str, compression: str | None) -> None:
    data = encoded(COLOUR.convert(mode), compression=compression)
    if mode in ("LA", "PA"):
        with Image.open(io.BytesIO(data)) as opened:
            opaque = opened.convert("RGBA")
        np.testing.assert_array_equal(image.read_pixels(data, SPEC)[:, :, :3], np.asarray(opaque)[:, :, :3])
    else:
        np.testing.assert_array_equal(image.read_pixels(data, SPEC)[:, :, :3], by_pillow(data))


@pytest.mark.parametrize("compression", ["group3", "group4", "tiff_ccitt"])
@pytest.mark.parametrize("strip_size", [100, 1 << 20])
def test_fax_pages_are_exact(compression: str, strip_size: int) -> None:
    data = encoded(PAGE, compression=compression, strip_size=strip_size)
    np.testing.assert_array_equal(image.read_pixels(data, SPEC)[:, :, 0], np.asarray(PAGE.convert("L")))


def test_jpeg_in_tiff_is_pillows() -> None:
    data = encoded(COLOUR, compression="jpeg")
    np.testing.assert_array_equal(image.read_pixels(data, SPEC)[:, :, :3], by_pillow(data))


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_16_bit_grey_is_scaled(mode: str, compression: str | None) -> None:
    values = (X * 700 + Y).astype(np.uint16)
    grey = Image.frombytes(mode, (90, 60), values.astype("<u2" if mode == "I;16" else ">u2").tobytes())
    rgb = image.read_pixels(encoded(grey, compression=compression), SPEC)
    np.testing.assert_array_equal(rgb[:, :, 0], (values.astype(int) + 128) // 257)


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_followed(orientation: int, compression: str | None) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(COLOUR, exif=exif, compression=compression)
    rgb = image.read_pixels(data, SPEC)[:, :, :3]
    np.testing.assert_array_equal(rgb, by_pillow(data))
    assert image.read_size(data, SPEC) == rgb.shape[1::-1]


def test_tags_that_say_nothing_of_the_pixels_are_not_read() -> None:
    """Resolutions, names and further directories lead Pillow to read what they point at."""
    data = encoded(PAGE, compression="group4")
    strange = changed(data, t282=(5, 2**28, 8), t34665=(4, 1, 2**31), t330=(4, 2**30, 8), t700=(7, 2**31, 0))
    np.testing.assert_array_equal(image.read_pixels(strange, SPEC), image.read_pixels(data, SPEC))
    assert entries(tiff.read(strange).data).keys() < entries(strange).keys()


def test_further_pages_are_refused_but_not_reduced_copies() -> None:
    two = encoded(COLOUR, save_all=True, append_images=[PAGE])
    assert refusal(two).reason is Reason.UNSUPPORTED_MEDIA
    assert "several pages" in refusal(two).detail
    alone = encoded(COLOUR)
    preview = len(alone) + 2 + 12 * len(entries(alone)) + 4
    behind = struct.pack("<HHHIII", 1, 254, 4, 1, 1, 0)
    np.testing.assert_array_equal(
        image.read_pixels(with_entries(alone, entries(alone), preview) + behind, SPEC), image.read_pixels(alone, SPEC)
    )


def test_a_reduced_copy_is_not_taken_for_the_picture() -> None:
    assert refusal(changed(encoded(COLOUR), t254=(4, 1, 1))).reason is Reason.UNSUPPORTED_MEDIA


def test_an_endless_chain_of_directories_ends() -> None:
    data = with_entries(encoded(COLOUR), entries(encoded(COLOUR)) | {254: (4, 1, 0)})
    (begin,) = struct.unpack_from("<I", data, 4)
    assert refusal(data[:-4] + struct.pack("<I", begin)).reason is Reason.UNSUPPORTED_MEDIA
    preview = len(data)
    data = data[:-4] + struct.pack("<I", preview) + struct.pack("<HHHIII", 1, 254, 4, 1, 1, preview)
    assert refusal(data).reason is Reason.CORRUPT_MEDIA


@pytest.mark.parametrize(
    ("tags", "reason", "words"),
    [
        ({"t259": (3, 1, 6)}, Reason.UNSUPPORTED_MEDIA, "compression 6"),
        ({"t259": (3, 1, 34925)}, Reason.UNSUPPORTED_MEDIA, "compression 34925"),
        ({"t259": (3, 1, 4)}, Reason.CORRUPT_MEDIA, "packed as bits"),
        ({"t256": (4, 1, 60_000), "t257": (4, 1, 60_000)}, Reason.CORRUPT_MEDIA, "places"),
        ({"t256": (4, 1, 0)}, Reason.CORRUPT_MEDIA, "0x60 pixels"),
        ({"t256": (4, 1, 91)}, Reason.CORRUPT_MEDIA, "too few bytes"),
        ({"t256": (5, 1, 8)}, Reason.CORRUPT_MEDIA, "tag 256"),
        ({"t273": (4, 1, 2**31)}, Reason.CORRUPT_MEDIA, "in the middle of its pixels"),
        ({"t279": (4, 1, 2**31)}, Reason.CORRUPT_MEDIA, "in the middle of its pixels"),
        ({"t258": (3, 1, 12)}, Reason.UNSUPPORTED_MEDIA, "12 bits"),
        ({"t262": (3, 1, 8)}, Reason.UNSUPPORTED_MEDIA, "interpretation 8"),
        ({"t322": (4, 1, 64)}, Reason.CORRUPT_MEDIA, "both strips and tiles"),
        ({"t278": (4, 1, 1)}, Reason.CORRUPT_MEDIA, "for 60 strips"),
    ],
    ids=lambda value: str(value),
)
def test_what_is_damaged_or_not_bounded_is_refused(tags: dict[str, Any], reason: Reason, words: str) -> None:
    error = refusal(changed(encoded(COLOUR.convert("L")), **tags))
    assert error.reason is reason
    assert words in error.detail


@pytest.mark.parametrize("picture", [COLOUR, PAGE], ids=["colour", "page"])
def test_white_as_zero_of_16_bits_is_refused(picture: Image.Image) -> None:
    """Pillow takes its black for white."""
    grey = Image.fromarray((np.asarray(picture.convert("L")).astype(np.uint16)) * 257)
    assert refusal(changed(encoded(grey), t262=(3, 1, 0))).reason is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize("cut", [lambda size: size - 1, lambda size: size // 2, lambda size: 200, lambda size: 9])
@pytest.mark.parametrize("compression", [None, "group4", "packbits", "jpeg"])
def test_a_file_that_ends_early_is_corrupt(compression: str | None, cut: Callable[[int], int]) -> None:
    data = encoded(COLOUR if compression == "jpeg" else PAGE, compression=compression)
    assert refusal(data[: cut(len(data))]).reason is Reason.CORRUPT_MEDIA


@pytest.mark.skipif(not libtiff_errors.TAKEN, reason="Pillow has libtiff inside")
def test_damaged_fax_is_refused_without_a_word_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """libtiff fills up the lines, prints that, and reports success."""
    data = bytearray(encoded(PAGE, compression="group4"))
    sound = image.read_pixels(bytes(data), SPEC)
    reasons: list[Reason] = []
    _, _, begin = entries(bytes(data))[273]
    for position in range(begin + 10, begin + 400, 13):
        damaged = data.copy()
        damaged[position] ^= 0x5A
        try:
            image.decode(bytes(damaged), SPEC)
        except BadSampleError as error:
            reasons.append(error.reason)
    assert len(reasons) >= 25
    assert set(reasons) == {Reason.CORRUPT_MEDIA}
    assert capfd.readouterr() == ("", "")
    np.testing.assert_array_equal(image.read_pixels(bytes(data), SPEC), sound)


@pytest.mark.parametrize("head", [b"II+\0", b"MM\0+", b"MM*\0", b"II\0*"])
def test_variants_are_refused(head: bytes) -> None:
    assert refusal(head + encoded(COLOUR)[4:]).reason is Reason.UNSUPPORTED_MEDIA


def test_changed_tags_are_refused_or_agree() -> None:
    """Every change of the directory: either a BadSampleError, or a picture of the size that the probe told."""
    rng = np.random.default_rng(1)
    for sound in (encoded(PAGE, compression="group4"), encoded(COLOUR.convert("P")), encoded(COLOUR, compression="tiff_lzw")):
        (begin,) = struct.unpack_from("<I", sound, 4)
        end = begin + 2 + 12 * len(entries(sound))
        for _ in range(120):
            data = bytearray(sound)
            for position in rng.integers(begin, end, rng.integers(1, 4)):
                data[position] = rng.integers(0, 256)
            try:
                patches, grid = image.decode(bytes(data), SPEC)
            except BadSampleError:
                continue
            assert image.probe(bytes(data), SPEC) == grid
            assert len(patches) == grid.patches
