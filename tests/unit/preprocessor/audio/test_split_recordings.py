"""Recordings longer than a model's window are split into pieces, each like a recording of its own."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.filter_spec import FilterSpec
from headrace.preprocessor import audio
from headrace.preprocessor.decoding import SampleProcessor, probe_of
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.text import load_encoder
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import AudioSpec, JobSpec, parse_spec
from tests.examples import with_examples

RATE = 16_000
SPLIT = AudioSpec(max_seconds=1, too_long="split")


def recording(num_samples: int, rate: int = RATE) -> bytes:
    noise = np.random.default_rng(num_samples).normal(0, 0.1, num_samples)
    buffer = io.BytesIO()
    soundfile.write(buffer, noise * np.linspace(0.1, 1, num_samples), rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def part(data: bytes, start: int, stop: int) -> bytes:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    buffer = io.BytesIO()
    soundfile.write(buffer, samples[start:stop], rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


@with_examples(30)
@given(st.integers(1, 60_000), st.sampled_from([0.4, 1.0, 1.2345]))
def test_each_piece_has_the_features_of_a_recording_of_its_own(num_samples: int, max_seconds: float) -> None:
    spec = AudioSpec(max_seconds=max_seconds, too_long="split")
    data = recording(num_samples)
    if num_samples < 400:
        with pytest.raises(BadSampleError, match="empty_media"):
            audio.probe(data, spec)
        return
    frames = audio.probe(data, spec)
    pieces, mel = audio.frames_of_pieces(frames, spec), audio.decode(data, spec)
    assert len(mel) == frames == sum(pieces)
    length = spec.most_frames * 160 if num_samples > max_seconds * RATE else num_samples
    begin = 0
    for number, count in enumerate(pieces):
        own = part(data, number * length, (number + 1) * length)
        np.testing.assert_array_equal(mel[begin : begin + count], audio.decode(own, AudioSpec()))
        begin += count
    rest = num_samples - len(pieces) * length
    assert rest < 400, "no more is left out than has no spectrum"


def test_a_recording_that_is_not_too_long_stays_as_it_is() -> None:
    for num_samples in (RATE - 1, RATE):
        data = recording(num_samples)
        np.testing.assert_array_equal(audio.decode(data, SPLIT), audio.decode(data, AudioSpec()))
    assert audio.frames_of_pieces(audio.probe(recording(RATE + 1), SPLIT), SPLIT) == (100,)


def test_pieces_are_of_the_resampled_recording() -> None:
    data = recording(44_100 * 3, 44_100)
    frames = audio.probe(data, SPLIT)
    assert audio.frames_of_pieces(frames, SPLIT) == (100, 100, 100)
    assert audio.decode(data, SPLIT).shape == (300, 128)


def test_splitting_takes_less_memory_than_one_spectrum_would() -> None:
    header = audio.Header(sample_rate=RATE, channels=1, frames=RATE * 3600)
    split = audio.decode_bytes(header, AudioSpec(max_seconds=30, too_long="split"))
    assert split < audio.decode_bytes(header, AudioSpec(max_seconds=3600)) / 3
    assert audio.read_header(recording(RATE * 100), AudioSpec(max_seconds=30, too_long="split")).frames == RATE * 100


def job(**text: Any) -> JobSpec:
    return parse_spec(
        {"name": "j", "sources": [{"path": "/data"}], "audio": {"max_seconds": 1, "too_long": "split"}, "text": text}
    )


def record(*recordings: bytes) -> Record:
    placeholders = " then ".join(["<audio>"] * len(recordings))
    texts = [{"user": f"{placeholders}?", "assistant": "a long silence " * 4}]
    return Record(key="0", fields={"texts": texts, "audios": list(recordings)}, load=lambda name: b"")


def test_each_piece_has_its_own_run_of_tokens_known_from_the_header() -> None:
    spec = job()
    processor, source = SampleProcessor(spec), spec.sources[0]
    sample = record(recording(RATE * 2 + 8000), recording(8000))
    probe = probe_of("s", processor.size(processor.load(sample, source)))
    row = processor.decode(sample, source)
    assert probe.mel_frames == tuple(row.mel_frames) == (100, 100, 50, 50)
    assert probe.num_tokens == len(row.input_ids)
    control = load_encoder("").control
    ids = row.input_ids.tolist()
    begins = [index for index, token in enumerate(ids) if token == control["<|audio_start|>"]]
    runs = [ids.index(control["<|audio_end|>"], begin) - begin - 1 for begin in begins]
    assert runs == [13, 13, 7, 7]
    assert ids.count(control["<|audio_pad|>"]) == sum(runs)


def test_a_cut_takes_pieces_away_with_their_features() -> None:
    source = job().sources[0]
    document = Record(
        key="0",
        fields={
            "texts": ["<audio>", "after that", "<audio>", "comes more"],
            "audios": [recording(RATE * 2), recording(RATE * 2)],
        },
        load=lambda name: b"",
    )
    whole = SampleProcessor(job()).decode(document, source)
    ids = whole.input_ids.tolist()
    begins = [index for index, token in enumerate(ids) if token == load_encoder("").control["<|audio_start|>"]]
    for rule, most, kept in (
        ("truncate_end", begins[3] + 5, slice(0, 300)),  # within the last piece
        ("truncate_start", len(ids) - begins[1], slice(100, 400)),  # right behind the first one
        ("truncate_start", len(ids) - begins[1] - 1, slice(200, 400)),
    ):
        cut = SampleProcessor(job(max_tokens=most, too_long=rule)).decode(document, source)
        np.testing.assert_array_equal(cut.mel, whole.mel[kept])
        assert cut.mel_frames.tolist() == [100] * (len(cut.mel) // 100)


def test_pieces_must_be_longer_than_an_analysis_window() -> None:
    with pytest.raises(SpecError, match=r"max_seconds \(0.02\) is the length of the pieces .* longer than window_s"):
        parse_spec({"name": "j", "sources": [{"path": "/d"}], "audio": {"max_seconds": 0.02, "too_long": "split"}})


def test_decoding_pieces_holds_the_features_of_all_of_them() -> None:
    header = audio.Header(sample_rate=RATE, channels=1, frames=RATE * 1200)
    spec = AudioSpec(max_seconds=30, too_long="split", mel_bins=1024, hop_s=0.001)
    assert audio.decode_bytes(header, spec) > 2 * 1024 * 1_200_000 + 4 * header.frames


def test_a_recording_or_last_piece_without_a_token_is_none() -> None:
    qwen = {"frames_per_token": 4, "last_token": "drop", "last_frame": "drop"}
    with pytest.raises(BadSampleError) as refused:
        audio.probe(recording(479), AudioSpec(**qwen))
    assert refused.value.reason is Reason.EMPTY_MEDIA
    assert AudioSpec(**qwen).num_tokens(audio.probe(recording(480), AudioSpec(**qwen))) == 1
    spec = AudioSpec(**qwen, max_seconds=1, too_long="split")
    assert [audio.probe(recording(RATE + rest), spec) for rest in (479, 480)] == [100, 103]
    with pytest.raises(SpecError, match="each must have a token"):
        parse_spec(
            {
                "name": "j",
                "sources": [{"path": "/d"}],
                "audio": {**qwen, "frames_per_token": 8, "max_seconds": 0.04, "too_long": "split"},
            }
        )


def test_seconds_are_as_many_samples_as_they_are_written() -> None:
    for hundredths in range(4, 60_001):
        spec = AudioSpec(max_seconds=hundredths / 100, too_long="split", last_frame="pad")
        assert spec.most_frames == hundredths
    assert audio.probe(recording(32_160), AudioSpec(max_seconds=2.01)) == 201


def test_a_filter_counts_the_recordings_that_a_cut_has_left() -> None:
    chat = [{"user": "q", "assistant": "a"}, {"user": "<audio>" + "word " * 30, "assistant": "b"}]
    fields = {"texts": chat, "audios": [recording(RATE)]}
    spec = job(max_tokens=30, too_long="truncate_end")
    source = spec.sources[0].model_copy(update={"filter": FilterSpec.model_validate({"sizes": {"recordings": {"min": 1}}})})
    with pytest.raises(BadSampleError, match="0 recordings") as refused:
        SampleProcessor(spec).decode(Record(key="0", fields=fields, load=str.encode), source)
    assert refused.value.reason is Reason.FILTERED
