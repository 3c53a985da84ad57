"""Recordings: frame counts from the header, resampling, and features against a plain computation."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.quarantine import BadSampleError, Reason
from headrace.spec import AudioSpec
from preprocessor import audio
from preprocessor.torchaudio_import import torchaudio

SPEC = AudioSpec()


def encoded(samples: np.ndarray[Any, Any], rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def tone(hertz: float, seconds: float, rate: int = 16_000) -> np.ndarray[Any, Any]:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def refusal(data: bytes, spec: AudioSpec = SPEC) -> Reason:
    with pytest.raises(BadSampleError) as caught:
        audio.probe(data, spec)
    return caught.value.reason


@pytest.mark.parametrize(
    ("kind", "subtype", "rate"),
    [
        ("WAV", "PCM_16", 44_100),
        ("WAV", "ULAW", 8000),
        ("WAVEX", "PCM_24", 48_000),
        ("FLAC", "PCM_16", 22_050),
        ("OGG", "VORBIS", 44_100),
        ("OGG", "OPUS", 48_000),
        ("MP3", "MPEG_LAYER_III", 44_100),
        ("MP3", "MPEG_LAYER_III", 16_000),
        ("AIFF", "PCM_16", 11_025),
    ],
)
def test_kinds_keep_their_length_and_pitch(kind: str, subtype: str, rate: int) -> None:
    data = encoded(tone(1000, 1.237, rate), rate, kind, subtype)
    mel = audio.decode(data, SPEC)
    assert mel.shape == (audio.probe(data, SPEC), 128)
    assert mel.dtype == np.float16
    assert abs(len(mel) - 123) <= 1
    # mel band of 1 kHz: Slaney's scale has 15 mel at 1 kHz and 45.2 at 8 kHz, for 130 edges
    assert abs(int(np.median(mel[20:100].argmax(axis=1))) - 42) <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(401, 9000), st.sampled_from([8000, 11_025, 12_345, 16_000, 22_050, 44_099, 44_100, 48_000, 96_000, 384_000]))
def test_probe_counts_what_decode_gives(frames: int, rate: int) -> None:
    data = encoded(np.linspace(-0.5, 0.5, frames), rate)
    samples = -(-frames * 16_000 // rate)
    if samples < 400:
        assert refusal(data) is Reason.EMPTY_MEDIA
        return
    assert audio.probe(data, SPEC) == samples // 160 == len(audio.decode(data, SPEC))


@pytest.mark.parametrize("rate", [15_999, 16_001])
def test_approximate_ratio_keeps_the_exact_count(rate: int) -> None:
    """Both rates are resampled by 1:16; over 250 s that is 16 samples, more than one frame, too few or too many."""
    spec = AudioSpec(sample_rate=1000, mel_bins=4)
    data = encoded(np.zeros(250 * rate, np.int16), rate)
    assert audio.probe(data, spec) == 25_000 == len(audio.decode(data, spec))


def slow_log_mel(samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Whisper's features in plain numpy, filters written out from Slaney's scale."""
    padded = np.pad(samples, 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = np.stack([padded[start : start + 400] * window for start in range(0, 160 * (len(samples) // 160), 160)])
    power = np.abs(np.fft.rfft(frames)) ** 2
    mels = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), 130)
    hertz = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
    bins = np.arange(201) * 40.0
    rise = (bins[:, None] - hertz[:-2]) / (hertz[1:-1] - hertz[:-2])
    fall = (hertz[2:] - bins[:, None]) / (hertz[2:] - hertz[1:-1])
    filters = np.maximum(0, np.minimum(rise, fall)) * 2 / (hertz[2:] - hertz[:-2])
    log = np.log10(np.maximum(power @ filters, 1e-10))
    return np.asarray((np.maximum(log, log.max() - 8) + 4) / 4)


def test_features_are_whispers() -> None:
    samples = tone(440, 0.5) + np.random.default_rng(0).normal(0, 0.05, 8000)
    data = encoded(samples, 16_000, subtype="FLOAT")
    np.testing.assert_allclose(audio.decode(data, SPEC), slow_log_mel(samples), atol=5e-3)


def test_other_specs() -> None:
    spec = AudioSpec(sample_rate=8000, mel_bins=20, hop_s=0.02, window_s=0.0501, frames_per_token=4)
    data = encoded(tone(300, 1.0), 16_000)
    assert audio.decode(data, spec).shape == (50, 20)
    assert audio.probe(data, spec) == 50
    assert [audio.num_tokens(frames, spec) for frames in (1, 4, 5, 50)] == [1, 1, 2, 13]


def test_limits() -> None:
    assert refusal(b"") is Reason.EMPTY_MEDIA
    assert refusal(encoded(np.zeros(399), 16_000)) is Reason.EMPTY_MEDIA
    assert audio.probe(encoded(np.zeros(400), 16_000), SPEC) == 2
    assert refusal(encoded(np.zeros(16_001), 16_000), AudioSpec(max_seconds=1)) is Reason.TOO_LONG
    assert audio.probe(encoded(np.zeros(16_000), 16_000), AudioSpec(max_seconds=1)) == 100
    assert refusal(encoded(np.zeros(400_000), 400_000)) is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize("data", [b"\0\0\0\x20ftypM4A ", b"\xff\xf1\x50\x80", b"#!AMR\n", encoded(np.zeros(800), 8000, "VOC")])
def test_other_kinds_are_unsupported(data: bytes) -> None:
    assert refusal(data) is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e30])
def test_samples_without_a_spectrum(value: float) -> None:
    samples = tone(100, 0.1).astype(np.float32)
    samples[50] = value
    with pytest.raises(BadSampleError) as caught:
        audio.decode(encoded(samples, 16_000, subtype="FLOAT"), SPEC)
    assert caught.value.reason is Reason.CORRUPT_MEDIA


def test_digital_silence_is_a_recording() -> None:
    mel = audio.decode(encoded(np.zeros(16_000), 16_000), SPEC)
    np.testing.assert_allclose(mel, (-10 + 4) / 4)


def test_damaged_bytes_are_refused_or_agree(flac: bytes) -> None:
    rng = np.random.default_rng(1)
    for sound in (
        flac,
        encoded(tone(300, 0.3), 16_000),
        encoded(tone(300, 0.3), 16_000, "MP3"),
        encoded(tone(300, 0.3), 16_000, "OGG"),
    ):
        for _ in range(25):
            data = bytearray(sound)
            for position in rng.integers(0, min(len(sound), 400), 3):
                data[position] = rng.integers(0, 256)
            if rng.random() < 0.3:
                del data[rng.integers(1, len(data)) :]
            try:
                mel = audio.decode(bytes(data), SPEC)
            except BadSampleError:
                continue
            assert len(mel) == audio.probe(bytes(data), SPEC)


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_mono_is_the_mean(channels: int) -> None:
    sound = np.random.default_rng(0).uniform(-0.9, 0.9, (5000, channels)).astype(np.float32)
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, 16_000, format="WAV", subtype="FLOAT")
    np.testing.assert_allclose(audio.read_mono(buffer.getvalue(), AudioSpec()), sound.mean(axis=1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_kept_filters_are_those_of_the_plain_function(rate: int) -> None:
    """A filter is made once a ratio; the function of torchaudio makes one a call."""
    sound = torch.from_numpy(np.random.default_rng(1).normal(0, 0.1, 3 * rate).astype(np.float32))
    header = audio.Header(sample_rate=rate, channels=1, frames=len(sound))
    resampled = audio._resample(sound, header, AudioSpec())
    expected = torchaudio.functional.resample(sound, rate, 16_000)
    torch.testing.assert_close(resampled, expected[: len(resampled)], rtol=0, atol=0)
