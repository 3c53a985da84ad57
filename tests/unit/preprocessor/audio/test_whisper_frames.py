"""Frames, features and tokens of recordings are those of Whisper's feature extractor and of Qwen2-Audio's processor."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.preprocessor import audio
from headrace.preprocessor.audio import decode_bytes, read_header
from headrace.spec import AudioSpec

transformers = pytest.importorskip("transformers")

SPEC = AudioSpec(frames_per_token=4, last_frame="pad", last_token="drop", max_seconds=30)
LENGTHS = (800, 1600, 16_000, 16_001, 16_159, 16_160, 16_161, 123_457, 479_801, 479_999, 480_000)
"""Numbers of samples at 16 kHz: whole frames and parts of them, and up to the 30 s that the extractor takes."""


def recording(num_samples: int) -> np.ndarray[Any, Any]:
    noise = np.random.default_rng(num_samples).normal(0, 0.05, num_samples)
    return (noise + 0.3 * np.sin(np.arange(num_samples) / 9)).astype(np.float32)


def encoded(samples: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 16_000, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


@pytest.mark.parametrize("num_samples", LENGTHS)
def test_frames_and_features_are_those_of_the_extractor(num_samples: int) -> None:
    samples = recording(num_samples)
    extract = transformers.WhisperFeatureExtractor(feature_size=128)
    theirs = extract(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
    frames = int(theirs["attention_mask"].sum())
    ours = audio.decode(encoded(samples), SPEC)
    assert len(ours) == audio.probe(encoded(samples), SPEC) == frames
    np.testing.assert_allclose(ours, theirs["input_features"][0, :, :frames].T, atol=5e-3)


@given(st.integers(3, 3000))
def test_tokens_are_those_of_qwen2_audio_and_qwen2_5_omni(mel_frames: int) -> None:
    omni = pytest.importorskip("transformers.models.qwen2_5_omni.processing_qwen2_5_omni")
    assert SPEC.num_tokens(mel_frames) == ((mel_frames - 1) // 2 + 1 - 2) // 2 + 1
    assert SPEC.num_tokens(mel_frames) == omni._get_feat_extract_output_lengths(mel_frames)


def test_an_incomplete_frame_and_token_are_dropped_or_padded() -> None:
    assert [AudioSpec().num_frames(samples) for samples in (1600, 1601, 1759, 1760)] == [10, 10, 10, 11]
    assert [SPEC.num_frames(samples) for samples in (1600, 1601, 1759, 1760)] == [10, 11, 11, 11]
    assert [AudioSpec(frames_per_token=4).num_tokens(frames) for frames in range(3, 10)] == [1, 1, 2, 2, 2, 2, 3]
    assert [SPEC.num_tokens(frames) for frames in range(3, 10)] == [1, 1, 1, 1, 2, 2, 2]
    assert SPEC.most_frames == 3000


def test_silence_behind_a_recording_counts_as_memory() -> None:
    data = encoded(recording(16_001))
    dropped = SPEC.model_copy(update={"last_frame": "drop"})
    header = read_header(data, SPEC)
    assert decode_bytes(header, SPEC) > decode_bytes(header, dropped)


def test_an_odd_number_of_frames_makes_no_whole_pairs() -> None:
    with pytest.raises(ValidationError, match=r"frames_per_token \(5\) is odd, and last_token drop"):
        AudioSpec(frames_per_token=5, last_token="drop")
