"""Rows of a manifest that mean a part of a recording are refused, the first part of a file as well as the others."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from headrace.preprocessor.decoding import SampleProcessor
from headrace.preprocessor.sources import open_shard
from headrace.quarantine import BadSampleError
from headrace.spec import parse_spec


def refusal(folder: Path, row: dict[str, Any], **mapping: Any) -> str:
    """Of a row that names a recording of two seconds; empty if it is taken."""
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(32_000) / 20), 16_000, format="WAV")
    (folder / "a.wav").write_bytes(buffer.getvalue())
    manifest = folder / "manifest.jsonl"
    manifest.write_text(json.dumps({"audio_filepath": "a.wav", "text": "hum", **row}))
    spec = parse_spec({"name": "j", "sources": [{"path": str(manifest), "mapping": mapping}]})
    processor, source = SampleProcessor(spec), spec.sources[0]
    try:
        processor.size(processor.load(open_shard(str(manifest), source).read(0), source))
    except BadSampleError as err:
        return str(err)
    return ""


@pytest.mark.parametrize(
    "row",
    [
        {"duration": 2.0},
        {"duration": 2.0, "offset": 0},
        {"duration": 1.6, "offset": 0.0},
        {"duration": 5, "offset": 0},
        {"duration": 1.9},
    ],
)
def test_a_recording_that_is_meant_as_a_whole_is_taken(row: dict[str, Any], tmp_path: Path) -> None:
    assert refusal(tmp_path, row) == ""


def test_a_part_is_refused_with_what_to_do(tmp_path: Path) -> None:
    first = refusal(tmp_path, {"duration": 1.0, "offset": 0})
    assert first == (
        "schema_error: a duration of 1 s is said of a recording of 2.0 s, and parts of recordings are not read: cut it, or list "
        "'duration' under the mapping's ignore where all of it is meant"
    )
    assert refusal(tmp_path, {"duration": 1.0}) == first  # as NeMo reads it, from 0 on
    assert "from its offset 1 on" in refusal(tmp_path, {"duration": 1.0, "offset": 1})
    assert refusal(tmp_path, {"duration": 1.0, "offset": 0}, ignore=["duration"]) == ""
