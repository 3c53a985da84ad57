"""Every hostile file gives what tests/data/hostile/expectations.json says, case by case, through the public path."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.preprocessor import audio, image
from headrace.preprocessor.decoding import Row, SampleProcessor, probe_of
from headrace.preprocessor.sources import open_shard
from headrace.preprocessor.text import CONTROL_TOKENS, load_encoder
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import Probe
from headrace.source_spec import SourceSpec
from headrace.spec import JobSpec

HOSTILE = Path(__file__).parents[2] / "data" / "hostile"
CASES = {case["case"]: case for case in json.loads((HOSTILE / "expectations.json").read_text())["cases"]}

# Where expectations allow both, this is what these readers do, so that it stays so.
CHOICES = {
    "jpeg_missing_eoi": "reject",
    "jpeg_bit_flip": "decode",
    "animated_gif": "decode",
    "animated_webp": "decode",
    "very_wide": "reject",
    "very_tall": "reject",
    "wav_float32_nan": "reject",
    "flac_truncated": "reject",
    "wav_size_field_lies": "decode",
    "silence_1_sample": "reject",
    "opus_chained": "reject",
    "flac_other_md5": "decode",
    "mp3_garbage_between_frames": "decode",
    "mp3_garbage_between_frames_of_known_length": "decode",
    "one_line_1mb": "reject",
    "lone_surrogate": "reject",
    "utf8_bom": "decode",
    "nan_literal": "decode",
    "duplicate_json_key": "decode",
    "tar_missing_json": "reject",
    "tar_empty": "reject",
    "tar_interleaved_keys": "decode",
    "tar_uppercase_extension": "decode",
    "tar_gzipped_without_suffix": "reject",
}

GOOD_SAMPLES = {
    "tar_bad_header_checksum": ["a", "c"],  # c is recovered behind the bad header
    "tar_gzipped_without_suffix": [],
    "tar_uppercase_extension": ["u", "b"],  # extensions are compared in lower case
}


@dataclass
class Outcome:
    """What a shard gave: samples by key, and reasons by key."""

    probes: dict[str, Probe] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    reasons: list[tuple[str, Reason]] = field(default_factory=list)
    num_rows: int = 0

    def reasons_of(self, key: str) -> list[Reason]:
        return [reason for name, reason in self.reasons if name == key]


def read_all(path: Path, processor: SampleProcessor, source: SourceSpec) -> Outcome:
    outcome = Outcome()
    with open_shard(str(path), source) as shard:
        outcome.num_rows = shard.num_rows
        outcome.reasons += [(item.name, item.reason) for item in shard.rejected]
        for index in range(shard.num_rows):
            key = shard.key(index)
            probed = decoded = None
            try:
                probed = probe_of("sample", processor.size(processor.load(shard.read(index), source)))
                decoded = processor.decode(shard.read(index), source)
            except BadSampleError as err:
                outcome.reasons.append((key, err.reason))
                continue
            assert_agree(probed, decoded)
            outcome.probes[key], outcome.rows[key] = probed, decoded
    batch = processor.encode(range(len(outcome.rows)), list(outcome.rows.values()))
    batch.validate(full=True)
    return outcome


def assert_agree(probe: Probe, row: Row) -> None:
    assert probe.num_tokens == len(row.input_ids) == len(row.labels)
    assert probe.num_targets == np.count_nonzero(row.labels != -100) > 0
    assert probe.image_patches == tuple(row.image_grids.prod(axis=1))
    assert sum(probe.image_patches) == len(row.patches)
    assert probe.mel_frames == tuple(row.mel_frames)
    assert sum(probe.mel_frames) == len(row.mel)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hostile_file(
    case: dict[str, Any],
    write_tar: Callable[..., Path],
    processor: SampleProcessor,
    spec: JobSpec,
    source: SourceSpec,
    jpeg: bytes,
) -> None:
    path = HOSTILE / case["path"]
    if case["modality"] in ("archive", "parquet"):
        outcome = read_all(path, processor, source)
        check_container(case, outcome)
        return
    data = path.read_bytes()
    neighbour = {"images": ["jpg"], "texts": ["<image>"]}
    outcome = read_all(
        write_tar(
            {
                "a.jpg": jpeg,
                "a.json": neighbour,
                **as_sample("x", case["modality"], data, path.suffix),
                "z.jpg": jpeg,
                "z.json": neighbour,
            }
        ),
        processor,
        source,
    )
    assert {"a", "z"} <= outcome.rows.keys(), "good neighbours come out"
    decoded = "x" in outcome.rows
    assert case["expect"] == "decode_or_reject" or decoded == (case["expect"] == "decode"), outcome.reasons
    if case["expect"] == "decode_or_reject":
        assert decoded == (CHOICES[case["case"]] == "decode"), outcome.reasons
    if decoded:
        assert outcome.reasons == []
        RESULT_CHECKS[case["modality"]](case.get("result", {}), data, outcome, spec)
    else:
        assert outcome.reasons == [("x", Reason(case["reason_class"]))]


def as_sample(key: str, modality: str, data: bytes, suffix: str) -> dict[str, Any]:
    if modality == "text":
        return {f"{key}.json": data}
    kind = {"image": "images", "audio": "audios"}[modality]
    return {f"{key}{suffix}": data, f"{key}.json": {kind: [suffix[1:]], "texts": [f"<{modality}>", "what it is"]}}


def check_image(result: dict[str, Any], data: bytes, outcome: Outcome, spec: JobSpec) -> None:
    rgb = image.read_pixels(data, spec.image)[:, :, :3]
    size = rgb.shape[1::-1]
    assert image.read_size(data, spec.image) == size
    if "width" in result:
        assert size == (result["width"], result["height"])
    if "mean" in result:
        assert rgb.mean() == pytest.approx(result["mean"], abs=0.5)
    assert len(outcome.probes["x"].image_patches) == 1, "an animation is one image"
    assert outcome.probes["x"].image_patches[0] >= 4


def check_audio(result: dict[str, Any], data: bytes, outcome: Outcome, spec: JobSpec) -> None:
    header = audio.read_header(data, spec.audio)
    for name in ("sample_rate", "channels", "frames"):
        assert getattr(header, name) == result.get(name, getattr(header, name))
    assert len(audio.read_mono(data, spec.audio)) == header.frames
    samples = result.get("frames_at_16k", -(-header.frames * 16_000 // header.sample_rate))
    assert outcome.probes["x"].mel_frames == (samples // 160,)
    assert np.isfinite(outcome.rows["x"].mel).all()


def check_text(result: dict[str, Any], data: bytes, outcome: Outcome, spec: JobSpec) -> None:
    encoder = load_encoder("")
    ids = outcome.rows["x"].input_ids.tolist()
    document = json.loads(data.decode("utf-8-sig"))
    turns = [turn["value"] for turn in document.get("conversations", [])]
    for text in turns or document["texts"]:
        assert text in encoder.decode(ids), "round trip"
    control = [token for token in CONTROL_TOKENS if encoder.control[token] in ids]
    assert control == (["<|im_start|>", "<|im_end|>"] if turns else ["<|endoftext|>"])
    for token in ("<|im_start|>", "<|im_end|>"):
        assert ids.count(encoder.control[token]) == len(turns)


RESULT_CHECKS = {"image": check_image, "audio": check_audio, "text": check_text}


def check_container(case: dict[str, Any], outcome: Outcome) -> None:
    result = case.get("result", {})
    good, bad = result.get("good_samples"), result.get("rejected_samples")
    choice = CHOICES.get(case["case"], case["expect"])
    if good is not None:
        assert list(outcome.rows) == GOOD_SAMPLES.get(case["case"], good)
        assert [name for name, _ in outcome.reasons if name] == bad
    if "rows" in result:
        assert outcome.num_rows == result["rows"]
        good_rows = result.get("good_rows", range(result["rows"]) if choice == "decode" else [])
        assert list(outcome.rows) == [str(row) for row in good_rows]
        assert [name for name, _ in outcome.reasons] == [str(r) for r in range(result["rows"]) if r not in good_rows]
    if choice == "decode":
        assert outcome.reasons == []
    else:
        assert outcome.reasons
        assert {reason for _, reason in outcome.reasons} == {Reason(case["reason_class"])}


def test_every_free_choice_is_fixed() -> None:
    assert CHOICES.keys() == {name for name, case in CASES.items() if case["expect"] == "decode_or_reject"}


def test_8_bit_silence_is_silent(spec: JobSpec, hostile: Path) -> None:
    mono = audio.read_mono((hostile / "audio" / "u8_8k_mono.wav").read_bytes(), spec.audio)
    assert abs(mono.mean()) < 0.01


def test_mono_is_the_mean_of_the_channels(spec: JobSpec, hostile: Path) -> None:
    """The right channel is the left one times -0.5, and the left one peaks at 0.69."""
    mono = audio.read_mono((hostile / "audio" / "96k_stereo.wav").read_bytes(), spec.audio)
    assert np.abs(mono).max() == pytest.approx(0.6946 / 4, abs=0.01)


def test_transparent_pixels_take_the_background(spec: JobSpec, hostile: Path) -> None:
    for name in ("palette_alpha.png", "rgba.png"):
        data = (hostile / "images" / name).read_bytes()
        white = image.read_pixels(data, spec.image)
        red = image.read_pixels(data, spec.image.model_copy(update={"background": (255, 0, 0)}))
        assert tuple(white[0, 0, :3]) == (255, 255, 255)
        assert tuple(red[0, 0, :3]) == (255, 0, 0)
