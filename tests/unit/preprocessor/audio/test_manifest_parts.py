"""Rows of a manifest that mean a part of a recording: it is read alone, as a recording of its own."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.testing import assert_array_equal

from headrace.preprocessor import audio
from headrace.preprocessor.decoding import SampleProcessor
from headrace.preprocessor.sources import open_shard
from headrace.quarantine import BadSampleError
from headrace.spec import JobSpec, parse_spec

RATE = 16_000
SOUND = np.random.default_rng(0).uniform(-0.5, 0.5, 2 * RATE).astype(np.float32)


def file_of(sound: np.ndarray[Any, Any], form: str = "WAV", subtype: str | None = "FLOAT") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, sound, RATE, format=form, subtype=subtype)
    return buffer.getvalue()


def mel_of(folder: Path, row: dict[str, Any], data: bytes | None = None, **mapping: Any) -> np.ndarray[Any, Any]:
    """Features of a row that names a recording of two seconds."""
    (folder / "a.wav").write_bytes(file_of(SOUND) if data is None else data)
    manifest = folder / "manifest.jsonl"
    manifest.write_text(json.dumps({"audio_filepath": "a.wav", "text": "hum", **row}))
    spec: JobSpec = parse_spec({"name": "j", "sources": [{"path": str(manifest), "mapping": mapping}]})
    processor, source = SampleProcessor(spec), spec.sources[0]
    return processor.decode(open_shard(str(manifest), source).read(0), source).mel


def features(sound: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return audio.decode(file_of(sound), parse_spec({"name": "j", "sources": [{"path": "/x"}]}).audio)


@pytest.mark.parametrize(
    "row",
    [{}, {"duration": 2.0}, {"duration": 2.0, "offset": 0}, {"duration": 1.96}, {"duration": 5, "offset": 0}, {"offset": 0}],
)
def test_a_recording_that_is_meant_as_a_whole(row: dict[str, Any], tmp_path: Path) -> None:
    assert_array_equal(mel_of(tmp_path, row), features(SOUND))


@pytest.mark.parametrize(
    ("row", "start", "stop"),
    [
        ({"duration": 1.0, "offset": 0}, 0, RATE),
        ({"duration": 1.0}, 0, RATE),  # as NeMo reads it, from 0 on
        ({"duration": 0.75, "offset": 0.5}, RATE // 2, RATE // 2 + 3 * RATE // 4),
        ({"duration": 0.5004, "offset": 1.5}, 3 * RATE // 2, 2 * RATE),  # the end is rounded
    ],
)
@pytest.mark.parametrize(
    ("form", "subtype"), [("WAV", "FLOAT"), ("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("MP3", None), ("OGG", "OPUS")]
)
def test_a_part_is_read_alone(row: dict[str, Any], start: int, stop: int, form: str, subtype: str | None, tmp_path: Path) -> None:
    data = file_of(SOUND, form, subtype)
    whole = audio.read_mono(data, parse_spec({"name": "j", "sources": [{"path": "/x"}]}).audio)
    assert_array_equal(mel_of(tmp_path, row, data), features(whole[start:stop]))


def test_the_channels_of_a_part_become_one_as_those_of_the_whole(tmp_path: Path) -> None:
    stereo = np.stack((SOUND, SOUND[::-1]), axis=1)
    part = features(stereo[RATE // 2 : RATE])
    assert_array_equal(mel_of(tmp_path, {"duration": 0.5, "offset": 0.5}, file_of(stereo)), part)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"duration": 1.0, "offset": 3.0}, "the part from 3 s on, of 1 s, is not in a recording of 2.0 s: list 'offset' and"),
        ({"duration": 1.6, "offset": 1.0}, "the part from 1 s on, of 1.6 s, is not in a recording of 2.0 s"),
        ({"offset": 1.0}, "meant from its offset 1 on, and parts are read by an offset and a duration alone"),
        ({"start": 1.0, "duration": 1.0}, "meant from its start 1 on, and parts are read by an offset and a duration alone"),
        ({"duration": 0.001, "offset": 1.0}, "empty_media"),
    ],
)
def test_a_part_that_is_not_there_is_refused_with_what_to_do(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadSampleError) as caught:
        mel_of(tmp_path, row)
    assert message in str(caught.value)


def test_what_the_mapping_ignores_says_nothing_of_parts(tmp_path: Path) -> None:
    assert_array_equal(mel_of(tmp_path, {"duration": 1.0, "offset": 9}, ignore=["duration", "offset"]), features(SOUND))
