"""Which bytes of another process count as a thumbnail: a small baseline JPEG and nothing else."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from headrace.message_codec import rejection_message, rejection_value
from headrace.quarantine import Reason, Rejected
from headrace.thumbnail_check import MOST_THUMBNAIL_BYTES, THUMBNAIL_SIDE, is_thumbnail
from headrace.v1.common_pb2 import Rejection

FRAME = b"\xff\xc0"
SMALL_FRAME = b"\xff\xc0\x00\x0b\x08\x00\x01\x00\x01\x01\x01\x11\x00"


def jpeg(width: int = THUMBNAIL_SIDE, height: int = 48, **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, "JPEG", **options)
    return file.getvalue()


def saying(data: bytes, height: int, width: int) -> bytes:
    """The JPEG with another size in its header."""
    at = data.index(FRAME) + 5
    return data[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[at + 4 :]


def test_a_small_jpeg_is_one() -> None:
    assert is_thumbnail(jpeg())
    assert is_thumbnail(jpeg(1, 1))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\xff\xd8\xff\xd9",
        jpeg()[:-2],
        jpeg()[:100] + b"\xff\xd9",
        jpeg(THUMBNAIL_SIDE + 1),
        jpeg(height=THUMBNAIL_SIDE + 1),
        saying(jpeg(), 65535, 65535),
        saying(jpeg(), 0, 64),
        jpeg(progressive=True),
        jpeg(comment=b"taken at home"),
        jpeg(exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"),
        jpeg().replace(FRAME, SMALL_FRAME + FRAME, 1),
        jpeg()[:-2] + b"\0" * MOST_THUMBNAIL_BYTES + b"\xff\xd9",
    ],
)
def test_nothing_else_is(data: bytes) -> None:
    assert not is_thumbnail(data)


def test_a_rejection_keeps_what_can_be_shown_on_its_way_and_drops_the_rest() -> None:
    shown = Rejected(name="s/a", reason=Reason.CORRUPT_MEDIA, detail="cut", sample_id=1, modality="image", thumbnail=jpeg())
    back = rejection_value(rejection_message(shown))
    assert (back, back.thumbnail, back.modality) == (shown, shown.thumbnail, "image")
    forged = rejection_value(Rejection(sample_id=1, name="s/a", reason="corrupt_media", modality="<b>", thumbnail=b"GIF89a"))
    assert (forged.thumbnail, forged.modality) == (b"", "")


def test_a_rejection_of_an_older_release_says_nothing_of_either() -> None:
    old = rejection_value(Rejection(sample_id=1, name="s/a", reason="corrupt_media", detail="cut"))
    assert (old.thumbnail, old.modality) == (b"", "")
