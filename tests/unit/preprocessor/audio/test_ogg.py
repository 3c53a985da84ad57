"""Ogg: damaged pages and streams one after the other are refused; the decoder would pass over both."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import soundfile

from headrace.preprocessor import audio
from headrace.preprocessor.audio import ogg
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import AudioSpec

SPEC = AudioSpec()
KINDS = [("OPUS", 48_000), ("VORBIS", 44_100)]


def encoded(subtype: str, rate: int, hertz: float = 440, seconds: float = 1.5) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).normal(0, 0.05, round(seconds * rate))
    soundfile.write(buffer, 0.4 * np.sin(np.arange(len(noise)) * hertz / rate) + noise, rate, format="OGG", subtype=subtype)
    return buffer.getvalue()


def reason_of(data: bytes) -> Reason:
    with pytest.raises(BadSampleError) as caught:
        audio.probe(data, SPEC)
    return caught.value.reason


@pytest.mark.parametrize(("subtype", "rate"), KINDS)
def test_every_flipped_bit_is_noticed(subtype: str, rate: int) -> None:
    data, rng = encoded(subtype, rate), np.random.default_rng(1)
    ogg.check(data)
    for position in rng.integers(0, len(data), 60):
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(0, 8))
        assert reason_of(bytes(damaged)) in (Reason.CORRUPT_MEDIA, Reason.UNSUPPORTED_MEDIA)


@pytest.mark.parametrize(("subtype", "rate"), KINDS)
def test_a_file_that_ends_within_a_page_is_corrupt(subtype: str, rate: int) -> None:
    data = encoded(subtype, rate)
    for end in (len(data) - 1, len(data) - 300, len(data) // 2):
        assert reason_of(data[:end]) is Reason.CORRUPT_MEDIA


@pytest.mark.parametrize(("subtype", "rate"), KINDS)
def test_streams_one_after_the_other_are_refused_by_name(subtype: str, rate: int) -> None:
    first, second = encoded(subtype, rate), encoded(subtype, rate, hertz=900)
    assert reason_of(first + second) is Reason.UNSUPPORTED_MEDIA
    assert reason_of(first + first) is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize(("subtype", "rate"), KINDS)
def test_what_lies_behind_the_last_page_is_no_sound(subtype: str, rate: int) -> None:
    data = encoded(subtype, rate)
    np.testing.assert_array_equal(audio.read_mono(data + b"TAG" + bytes(125), SPEC), audio.read_mono(data, SPEC))


def test_what_lies_between_pages_is_damage() -> None:
    data = encoded("VORBIS", 44_100)
    last = data.rindex(b"OggS")
    assert reason_of(data[:last] + bytes(9) + data[last:]) is Reason.CORRUPT_MEDIA


def test_checksums_are_those_of_the_format() -> None:
    """Computed bit by bit, as RFC 3533 says it."""
    page = bytearray(encoded("OPUS", 48_000)[:47])
    (expected,) = struct.unpack_from("<I", page, 22)
    page[22:26] = bytes(4)
    register = 0
    for byte in page:
        register ^= byte << 24
        for _ in range(8):
            register = (register << 1 ^ (0x04C11DB7 if register >> 31 else 0)) & 0xFFFFFFFF
    assert register == expected == ogg._checksum(page)


def test_other_formats_are_left_alone() -> None:
    for data in (b"", b"RIFF", b"fLaC" + b"OggS" * 9):
        ogg.check(data)
