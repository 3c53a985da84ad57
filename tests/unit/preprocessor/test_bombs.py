"""Memory stays bounded on inputs that promise or unpack to far more than they hold."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from headrace.preprocessor import audio, image
from headrace.preprocessor.image.decode_cost import check_cost
from headrace.preprocessor.image.header import Header
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import AudioSpec, ImageSpec

# In a process of its own: the images are refused while hardly any more memory can be had than is in use.
CHILD = """
import resource, sys
from pathlib import Path
from headrace.quarantine import BadSampleError
from headrace.spec import ImageSpec
from headrace.preprocessor import image
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
    assert len(bombs) == 9
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, *map(str, bombs)], capture_output=True, text=True, timeout=60, check=False
    )
    assert child.stderr == ""
    assert child.stdout.split() == ["too_large"] * 18


def repeated_scan(data: bytes, times: int) -> bytes:
    """A progressive JPEG whose last scan is there so many times more."""
    last = data[data.rindex(b"\xff\xda") : data.rindex(b"\xff\xd9")]
    return data[: data.rindex(b"\xff\xd9")] + last * times + b"\xff\xd9"


@pytest.mark.parametrize("subsampling", [0, 2])
def test_a_jpeg_of_hundreds_of_scans_is_refused_from_its_header(subsampling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them costs a pass over all pixels: 64 s for half a megabyte. With or without the fast parser of headers."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", progressive=True, subsampling=subsampling)
    data = buffer.getvalue()
    patches = image.probe(data, ImageSpec()).patches
    for parse in (image.parse, lambda data: None):
        monkeypatch.setattr(image, "parse", parse)
        assert image._header(data, ImageSpec()).scans == 10
        assert image._header(repeated_scan(data, 80), ImageSpec()).scans == 90
        assert image.probe(repeated_scan(data, 80), ImageSpec()).patches == patches
        for read in (image.probe, image.decode):
            with pytest.raises(BadSampleError, match="in 101 scans or more") as caught:
                read(repeated_scan(data, 400), ImageSpec())
            assert caught.value.reason is Reason.TOO_LARGE


def test_scans_of_many_pixels_are_counted_by_the_pixel() -> None:
    check_cost(Header(width=10_000, height=10_000, scans=10), ImageSpec())
    with pytest.raises(BadSampleError) as caught:
        check_cost(Header(width=10_000, height=10_000, scans=20), ImageSpec())
    assert caught.value.reason is Reason.TOO_LARGE
    check_cost(Header(width=4000, height=4000, scans=20), ImageSpec())


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (Header(width=10_000, height=10_000), True),
        (Header(width=10_000, height=10_000, pixel_bytes=14), False),
        (Header(width=7000, height=7000, pixel_bytes=14), True),
        (Header(width=7000, height=7000, pixel_bytes=18), False),
    ],
)
def test_what_decoding_would_hold_is_bounded(header: Header, allowed: bool) -> None:
    if allowed:
        check_cost(header, ImageSpec())
    else:
        with pytest.raises(BadSampleError, match=r"takes \d+ MiB, more than image\.max_decode_mib \(768\)") as caught:
            check_cost(header, ImageSpec())
        assert caught.value.reason is Reason.TOO_LARGE


def test_a_grid_without_measure_is_refused() -> None:
    """What a job asks for takes memory too."""
    with pytest.raises(BadSampleError, match=r"image\.max_decode_mib"):
        check_cost(Header(width=100, height=100), ImageSpec(min_pixels=1 << 26, max_pixels=1 << 26, max_decode_mib=256))


# In a process of its own: what each file's decoding takes at its most, beside what is foreseen.
DECODING = """
import sys
from pathlib import Path
import torch
from headrace.spec import AudioSpec, ImageSpec
from headrace.preprocessor import audio, image
from headrace.preprocessor.image.decode_cost import decode_bytes
torch.set_num_threads(1)
def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
for name in sys.argv[1:]:
    data = Path(name).read_bytes()
    if name.endswith((".flac", ".wav")):
        foreseen, decode, spec = audio.decode_bytes(audio.read_header(data, AudioSpec()), AudioSpec()), audio.decode, AudioSpec()
    else:
        foreseen, decode, spec = decode_bytes(image._header(data, ImageSpec()), ImageSpec()), image.decode, ImageSpec()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    decode(data, spec)
    print(Path(name).name, foreseen >> 20, memory("VmHWM") - before >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_decoding_holds_no_more_than_is_foreseen(tmp_path: Path) -> None:
    """The first of each kind loads what it needs; the slack is for allocators."""
    small, picture = Image.new("RGB", (64, 64)), Image.linear_gradient("L").resize((3000, 2000)).convert("RGB")
    small.save(tmp_path / "0.png")
    small.save(tmp_path / "0.jpg")
    picture.convert("RGBA").save(tmp_path / "rgba.png", compress_level=1)
    picture.convert("CMYK").save(tmp_path / "cmyk.jpg")
    picture.save(tmp_path / "progressive.jpg", progressive=True)
    picture.save(tmp_path / "picture.webp", method=0)
    picture.save(tmp_path / "picture.avif", speed=10)
    picture.save(tmp_path / "picture.tif", compression="tiff_lzw", strip_size=1 << 26)
    picture.save(tmp_path / "picture.jp2", codeblock_size=(16, 16), precinct_size=(64, 64))
    (tmp_path / "0.flac").write_bytes(recording(22_050, 1.0))
    (tmp_path / "high.flac").write_bytes(recording(192_000, 60.0))
    (tmp_path / "many.flac").write_bytes(recording(16_000, 60.0, 8))
    (tmp_path / "most.wav").write_bytes(recording(8000, 10.0, 400, "WAV"))
    names = sorted(map(str, tmp_path.iterdir()), key=lambda name: not Path(name).name.startswith("0"))
    child = subprocess.run(
        [sys.executable, "-c", DECODING, *names],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.stderr == ""
    lines = [line.split() for line in child.stdout.splitlines()]
    assert len(lines) == len(names)
    for name, foreseen, taken in lines[3:]:
        assert int(taken) <= int(foreseen) + 24, name


def test_limit_is_the_specs_own(hostile: Path) -> None:
    data = (hostile / "images" / "good.jpg").read_bytes()
    assert image.probe(data, ImageSpec(max_source_pixels=400 * 300)).patches > 0
    with pytest.raises(BadSampleError) as caught:
        image.probe(data, ImageSpec(max_source_pixels=400 * 300 - 1))
    assert caught.value.reason is Reason.TOO_LARGE


def recording(rate: int, seconds: float, channels: int = 1, kind: str = "FLAC") -> bytes:
    """Of silence."""
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros((round(rate * seconds), channels), np.int16), rate, format=kind)
    return buffer.getvalue()


def test_a_recording_that_would_take_gigabytes_is_refused_from_its_header() -> None:
    """Ten minutes of silence at 384 kHz, as STREAMINFO has it: 20 bits of rate, 36 of frames."""
    data = bytearray(recording(96_000, 1.0))
    data[18:21] = ((384_000 << 4) | (int.from_bytes(data[18:21], "big") & 0xF)).to_bytes(3, "big")
    data[22:26] = (384_000 * 600).to_bytes(4, "big")
    for read in (audio.probe, audio.decode):
        with pytest.raises(BadSampleError, match=r"takes \d+ MiB, more than audio\.max_decode_mib \(768\)") as caught:
            read(bytes(data), AudioSpec())
        assert caught.value.reason is Reason.TOO_LARGE


@pytest.mark.parametrize(
    "spec", [AudioSpec(hop_s=0.001, window_s=1.0), AudioSpec(sample_rate=384_000, hop_s=0.001), AudioSpec(max_decode_mib=5)]
)
def test_features_without_measure_are_refused(spec: AudioSpec) -> None:
    """What a job asks for takes memory too."""
    with pytest.raises(BadSampleError, match=r"audio\.max_decode_mib"):
        audio.probe(recording(16_000, 30.0), spec)


def test_the_longest_recordings_that_are_usual_are_taken() -> None:
    audio._check_cost(audio.Header(sample_rate=96_000, channels=2, frames=96_000 * 600), AudioSpec())
    with pytest.raises(BadSampleError):
        audio._check_cost(audio.Header(sample_rate=192_000, channels=2, frames=192_000 * 600), AudioSpec())


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
