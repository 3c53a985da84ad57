"""Recordings: frame counts from the header, resampling, and features against a plain computation."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor import audio
from headrace.preprocessor.audio import features, flac
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import AudioSpec
from headrace.torchaudio_import import torchaudio
from tests.examples import with_examples

SPEC = AudioSpec()
needs_miniaudio = pytest.mark.skipif(flac.NAME is None, reason="miniaudio is not installed")


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
        ("CAF", "ALAC_16", 44_100),
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


@with_examples(60)
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


@pytest.mark.parametrize("rate", [15_993, 15_999, 16_001, 16_008])
def test_a_rate_that_is_nearly_the_jobs_is_taken_for_it(rate: int) -> None:
    sound = tone(440, 1.0, rate)
    mel = audio.decode(encoded(sound, rate, subtype="FLOAT"), SPEC)
    assert len(mel) == audio.probe(encoded(sound, rate, subtype="FLOAT"), SPEC) == 100
    np.testing.assert_array_equal(mel[:99], audio.decode(encoded(sound, 16_000, subtype="FLOAT"), SPEC)[:99])


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
    assert [spec.num_tokens(frames) for frames in (1, 4, 5, 50)] == [1, 1, 2, 13]


def test_limits() -> None:
    assert refusal(b"") is Reason.EMPTY_MEDIA
    assert refusal(encoded(np.zeros(399), 16_000)) is Reason.EMPTY_MEDIA
    assert audio.probe(encoded(np.zeros(400), 16_000), SPEC) == 2
    assert refusal(encoded(np.zeros(16_001), 16_000), AudioSpec(max_seconds=1)) is Reason.TOO_LONG
    assert audio.probe(encoded(np.zeros(16_000), 16_000), AudioSpec(max_seconds=1)) == 100
    assert refusal(encoded(np.zeros(15_999), 16_000), AudioSpec(min_seconds=1)) is Reason.TOO_SHORT
    assert audio.probe(encoded(np.zeros(16_000), 16_000), AudioSpec(min_seconds=1)) == 100
    assert refusal(encoded(np.zeros(400_000), 400_000)) is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize("rate", [8000, 11_025, 16_000, 44_100])
@pytest.mark.parametrize("spec", [AudioSpec(max_seconds=1.2345), AudioSpec(max_seconds=0.5, hop_s=0.013, sample_rate=24_000)])
def test_no_recording_has_more_frames_than_the_job_allows(rate: int, spec: AudioSpec) -> None:
    longest = int(spec.max_seconds * rate)
    assert spec.most_frames - 1 <= audio.probe(encoded(np.zeros(longest), rate), spec) <= spec.most_frames
    assert refusal(encoded(np.zeros(longest + 1), rate), spec) is Reason.TOO_LONG


@pytest.mark.parametrize("data", [b"#!AMR\n", b"\x30\x26\xb2\x75", encoded(np.zeros(800), 8000, "VOC")])
def test_other_kinds_are_unsupported(data: bytes) -> None:
    assert refusal(data) is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT"])
@pytest.mark.parametrize("kind", ["AIFF", "CAF", "AU", "W64", "RF64"])
def test_samples_as_they_are_do_not_depend_on_what_they_are_in(kind: str, subtype: str) -> None:
    sound = np.random.default_rng(0).uniform(-0.9, 0.9, 5000)
    expected = audio.read_mono(encoded(sound, 16_000, "WAV", subtype), SPEC)
    np.testing.assert_array_equal(audio.read_mono(encoded(sound, 16_000, kind, subtype), SPEC), expected)


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


def long_flac(channels: int, subtype: str) -> bytes:
    """Of as many samples as the fast codec takes."""
    sound = np.random.default_rng(3).normal(0, 0.2, (flac.LEAST_SAMPLES // channels + 1, channels))
    return encoded(sound, 44_100, "FLAC", subtype)


def outcome(data: bytes) -> Reason | list[float]:
    try:
        return list(audio.read_mono(data, SPEC))
    except BadSampleError as error:
        return error.reason


@needs_miniaudio
@pytest.mark.parametrize(("channels", "subtype"), [(1, "PCM_16"), (2, "PCM_16"), (2, "PCM_24"), (6, "PCM_16"), (1, "PCM_S8")])
def test_fast_samples_are_the_references(channels: int, subtype: str) -> None:
    data = long_flac(channels, subtype)
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    samples = flac.decode(data, *expected.shape)
    assert samples is not None
    np.testing.assert_array_equal(samples, expected)


@needs_miniaudio
def test_damaged_flac_ends_alike_with_and_without_the_fast_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata, frames, the header's count; cut at the end or in the middle."""
    sound, rng = long_flac(2, "PCM_16"), np.random.default_rng(2)
    files = [sound, sound[:-1], sound[:-5000], sound + bytes(100)]
    for end in (*(100,) * 30, *(9000,) * 10, *(len(sound),) * 20):
        data = bytearray(sound)
        data[rng.integers(4, end)] ^= 1 << int(rng.integers(0, 8))
        files.append(bytes(data))
    with_it = [outcome(data) for data in files]
    monkeypatch.setattr(flac, "_library", None)
    assert [outcome(data) for data in files] == with_it
    assert sum(isinstance(result, list) for result in with_it) >= 3
    assert Reason.CORRUPT_MEDIA in with_it


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_mono_is_the_mean(channels: int) -> None:
    sound = np.random.default_rng(0).uniform(-0.9, 0.9, (5000, channels)).astype(np.float32)
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, 16_000, format="WAV", subtype="FLOAT")
    np.testing.assert_allclose(audio.read_mono(buffer.getvalue(), AudioSpec()), sound.mean(axis=1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000, 384_000])
@pytest.mark.parametrize("seconds", [0.0251, 1.7])
def test_resampling_is_torchaudios(rate: int, seconds: float) -> None:
    """But for the order of the sums."""
    sound = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, round(seconds * rate)).astype(np.float32))
    header = audio.Header(sample_rate=rate, channels=1, frames=len(sound))
    resampled = features._resample(sound, header.sample_rate, audio._num_samples(header, AudioSpec()), AudioSpec())
    torch.testing.assert_close(resampled, torchaudio.functional.resample(sound, rate, 16_000), rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", [SPEC, AudioSpec(sample_rate=24_000, mel_bins=20, hop_s=0.02, window_s=0.0501)], ids=str)
def test_features_are_those_of_torchaudio(spec: AudioSpec) -> None:
    """Within two steps of float16."""
    sound = tone(440, 1.3, 44_100) + np.random.default_rng(0).normal(0, 0.01, round(1.3 * 44_100))
    mono = torch.from_numpy(sound.astype(np.float32))
    window = round(spec.window_s * spec.sample_rate)
    power = torchaudio.transforms.MelSpectrogram(
        sample_rate=spec.sample_rate,
        n_fft=window + window % 2,
        win_length=window,
        hop_length=round(spec.hop_s * spec.sample_rate),
        n_mels=spec.mel_bins,
        norm="slaney",
        mel_scale="slaney",
    )(torchaudio.functional.resample(mono, 44_100, spec.sample_rate))
    log = power.clamp(min=1e-10).log10()
    expected = ((torch.maximum(log, log.max() - 8) + 4) / 4).T.numpy()
    mel = audio.decode(encoded(sound, 44_100, subtype="FLOAT"), spec)
    np.testing.assert_allclose(mel, expected[: len(mel)], atol=2e-3)


def test_nothing_but_decoding_recordings_needs_torch() -> None:
    """It takes seconds and 200 MB, for which a preprocessor of images and text has no use; jobs' headers are read without it."""
    program = "\n".join(
        [
            "import os, sys",
            "import headrace.cli.run.preprocessor, headrace.preprocessor.server",
            "from headrace.preprocessor import audio",
            "from headrace.spec import AudioSpec",
            "data = sys.stdin.buffer.read()",
            "frames = audio.probe(data, AudioSpec())",
            "assert 'torch' not in sys.modules",
            "os.environ['OMP_NUM_THREADS'] = '1'",
            "assert len(audio.decode(data, AudioSpec())) == frames",
            "assert sys.modules['torch'].get_num_threads() == 1",
        ]
    )
    subprocess.run([sys.executable, "-c", program], input=encoded(tone(440, 1.0), 16_000), check=True)
