"""Recordings whose length or beginning is not where libsndfile looks: MP3 without a Xing frame, Opus of other encoders."""

from __future__ import annotations

import io
import itertools
import struct
from typing import Any

import numpy as np
import pytest
import soundfile

from headrace.preprocessor import audio
from headrace.preprocessor.audio.mp3 import with_length
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import AudioSpec

SPEC = AudioSpec()
Sound = np.ndarray[Any, Any]


def sweep(seconds: float, rate: int) -> Sound:
    """Louder and higher towards the end, so that every part of it is told from every other."""
    time = np.arange(round(seconds * rate)) / rate
    return 0.5 * time / seconds * np.sin(2 * np.pi * (200 + 100 * time) * time)


def encoded(samples: Sound, rate: int, kind: str, subtype: str, **options: str) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype, **options)
    return buffer.getvalue()


def frames(data: bytes) -> list[bytes]:
    """Of an MP3 of 44,100 or 16,000 Hz."""
    kbps = {
        0xFB: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
        0xF3: (0, *range(8, 65, 8), *range(80, 161, 16)),
    }
    found, position = [], 0
    while position < len(data):
        assert data[position] == 0xFF
        rate, per_kbps = (44_100, 144_000) if data[position + 1] == 0xFB else (16_000, 72_000)
        padding = data[position + 2] >> 1 & 1
        length = per_kbps * kbps[data[position + 1]][data[position + 2] >> 4] // rate + padding
        found.append(data[position : position + length])
        position += length
    return found


def without_xing(samples: Sound, rate: int, mode: str = "VARIABLE") -> list[bytes]:
    first, *others = frames(encoded(samples, rate, "MP3", "MPEG_LAYER_III", bitrate_mode=mode))
    assert b"Xing" in first or b"Info" in first
    return others


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
@pytest.mark.parametrize(("rate", "of_a_frame"), [(44_100, 1152), (16_000, 576)])
@pytest.mark.parametrize("channels", [1, 2])
def test_mp3_without_a_xing_frame_has_the_frames_that_are_there(rate: int, of_a_frame: int, mode: str, channels: int) -> None:
    sound = sweep(3.1, rate)
    stream = without_xing(np.stack([sound] * channels, axis=1), rate, mode)
    mono = audio.read_mono(b"".join(stream), SPEC)
    assert len(sound) <= len(mono) <= of_a_frame * len(stream)
    assert of_a_frame * len(stream) - len(mono) < of_a_frame  # what a decoder needs to begin
    half = len(mono) // 2
    assert np.abs(mono[half:]).mean() > 2 * np.abs(mono[:half]).mean()  # all of it, to the loud end
    assert audio.probe(b"".join(stream), SPEC) == len(audio.decode(b"".join(stream), SPEC))


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda stream: b"ID3\x04\0\0\0\0\2\0" + bytes(256) + b"".join(stream),
        lambda stream: b"".join(stream) + b"TAG" + bytes(125),
        lambda stream: b"".join(stream) + b"APETAGEX" + bytes(5000),
        lambda stream: b"".join(stream) + stream[5][:-9],
    ],
    ids=["ID3v2 in front", "ID3v1 behind", "a long tag behind", "half a frame behind"],
)
def test_what_else_is_in_an_mp3_is_no_sound(wrapped: Any) -> None:
    stream = without_xing(sweep(3.1, 44_100), 44_100)
    np.testing.assert_array_equal(audio.read_mono(wrapped(stream), SPEC), audio.read_mono(b"".join(stream), SPEC))


def test_frames_behind_damage_count() -> None:
    stream = without_xing(sweep(3.1, 44_100), 44_100)
    damaged = b"".join(stream[:9]) + bytes(700) + b"".join(stream[9:])
    assert len(audio.read_mono(damaged, SPEC)) == len(audio.read_mono(b"".join(stream), SPEC))


def test_an_mp3_that_says_its_length_is_left_alone() -> None:
    data = encoded(sweep(1, 44_100), 44_100, "MP3", "MPEG_LAYER_III")
    assert with_length(data) is data
    assert len(audio.read_mono(data, SPEC)) == 44_100


def test_an_mp3_without_a_xing_frame_is_held_to_the_limit() -> None:
    data = b"".join(without_xing(sweep(3.1, 44_100), 44_100))
    with pytest.raises(BadSampleError) as caught:
        audio.probe(data, AudioSpec(max_seconds=3))
    assert caught.value.reason is Reason.TOO_LONG


@pytest.mark.parametrize(
    "data", [b"\xff" * 100_000, b"\xff\xfb" * 50_000, b"ID3", b"ID3" + b"\x7f" * 50], ids=lambda data: repr(data[:4])
)
def test_what_is_no_stream_is_not_counted(data: bytes) -> None:
    assert with_length(data) is data


def checksum(page: bytes) -> int:
    """Of an Ogg page whose own is zero (RFC 3533, section 6)."""
    register = 0
    for byte in page:
        register ^= byte << 24
        for _ in range(8):
            register = (register << 1 ^ (0x04C11DB7 if register >> 31 else 0)) & 0xFFFFFFFF
    return register


def late(data: bytes, samples: int) -> bytes:
    """The stream with so much added to the position of every page with sound, as FFmpeg adds the delay of the codec."""
    pages, offset = [], 0
    for number in itertools.count():
        if offset == len(data):
            return b"".join(pages)
        segments = data[offset + 26]
        size = 27 + segments + sum(data[offset + 27 : offset + 27 + segments])
        page = bytearray(data[offset : offset + size])
        if number >= 2:  # behind the two headers
            struct.pack_into("<q", page, 6, struct.unpack_from("<q", page, 6)[0] + samples)
        page[22:26] = bytes(4)
        struct.pack_into("<I", page, 22, checksum(bytes(page)))
        pages.append(bytes(page))
        offset += size
    raise AssertionError


def test_opus_begins_behind_the_delay_of_the_codec() -> None:
    data = encoded(sweep(2.3, 48_000), 48_000, "OGG", "OPUS")
    expected = audio.read_mono(data, SPEC)
    assert len(expected) == round(2.3 * 48_000)
    np.testing.assert_array_equal(audio.read_mono(late(data, 312), SPEC), expected)
