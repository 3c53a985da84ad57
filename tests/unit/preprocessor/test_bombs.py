"""Memory stays bounded on inputs that promise or unpack to far more than they hold."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import soundfile

from headrace.quarantine import BadSampleError, Reason
from headrace.spec import AudioSpec, ImageSpec
from preprocessor import audio, image

# In a process of its own: the images are refused while hardly any more memory can be had than is in use.
CHILD = """
import resource, sys
from pathlib import Path
from headrace.quarantine import BadSampleError
from headrace.spec import ImageSpec
from preprocessor import image
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 16 * 2**20, resource.RLIM_INFINITY))
for name in sys.argv[1:]:
    data = Path(name).read_bytes()
    for read in (image.probe, image.decode):
        try:
            read(data, ImageSpec())
        except BadSampleError as error:
            print(error.reason)
"""


def webp_of(width: int, height: int) -> bytes:
    """An extended WebP that declares a canvas and has no frame."""
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunk = b"VP8X" + struct.pack("<I", 10) + bytes(4) + canvas
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_image_bombs_are_refused_in_16_mb(hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "bomb.webp").write_bytes(webp_of(16_000, 16_000))
    bombs = [*sorted((hostile / "images").glob("bomb_*")), tmp_path / "bomb.webp"]
    assert len(bombs) == 4
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, *map(str, bombs)], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.stderr == ""
    assert child.stdout.split() == ["too_large"] * 8


def test_limit_is_the_specs_own(hostile: Path) -> None:
    data = (hostile / "images" / "good.jpg").read_bytes()
    assert image.probe(data, ImageSpec(max_source_pixels=400 * 300)).patches > 0
    with pytest.raises(BadSampleError) as caught:
        image.probe(data, ImageSpec(max_source_pixels=400 * 300 - 1))
    assert caught.value.reason is Reason.TOO_LARGE


def test_flac_that_promises_ten_minutes_costs_no_memory(hostile: Path) -> None:
    """STREAMINFO's 36 bits of total samples say 595 s at 16 kHz; there are 2 s."""
    data = bytearray((hostile / "audio" / "good.flac").read_bytes())
    data[22:26] = (9_520_000).to_bytes(4, "big")
    assert audio.read_header(bytes(data), AudioSpec()).frames == 9_520_000
    with pytest.raises(BadSampleError) as caught:
        audio.decode(bytes(data), AudioSpec())
    assert caught.value.reason is Reason.CORRUPT_MEDIA


def test_flac_without_a_length_is_unsupported(hostile: Path) -> None:
    data = bytearray((hostile / "audio" / "good.flac").read_bytes())
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    with pytest.raises(BadSampleError) as caught:
        audio.probe(bytes(data), AudioSpec())
    assert caught.value.reason is Reason.UNSUPPORTED_MEDIA


def test_odd_sample_rate_does_not_build_a_giant_filter() -> None:
    """44,101 and 16,000 have no common divisor: a filter for each phase would have 700 million taps."""
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(44_101) / 30), 44_101, format="WAV", subtype="FLOAT")
    mel = audio.decode(buffer.getvalue(), AudioSpec())
    assert mel.shape == (100, 128)


@pytest.mark.parametrize(("kind", "head"), [(b"iTXt", b"k\0\1\0\0\0"), (b"zTXt", b"k\0\0"), (b"iCCP", b"k\0\0")])
def test_png_with_a_bomb_in_a_compressed_text(kind: bytes, head: bytes) -> None:
    """20 MB of zeros in front of sound pixels; Pillow's limit for texts is 1 MB."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    bomb = chunk(kind, head + zlib.compress(bytes(20 * 2**20)))
    pixels = chunk(b"IDAT", zlib.compress(bytes(8 * 25)))
    with pytest.raises(BadSampleError) as caught:
        image.probe(b"\x89PNG\r\n\x1a\n" + header + bomb + pixels + chunk(b"IEND", b""), ImageSpec())
    assert caught.value.reason is Reason.CORRUPT_MEDIA
