"""The processor: probe and decode agree, the formats agree, and the batch holds what the rows hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import SpecError
from headrace.preprocessor.decoding import Row, SampleProcessor, SizedSample, probe_of
from headrace.preprocessor.sources import open_shard
from headrace.preprocessor.text import load_encoder
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import payload_schema
from headrace.source_spec import SourceSpec
from headrace.spec import ImageSpec, JobSpec, parse_spec
from tests.unit.preprocessor.image.test_fit import encoded, photo

ARRAYS = ("input_ids", "labels", "patches", "image_grids", "mel", "mel_frames")
TURNS = [{"user": "<image>hear <audio><image>", "assistant": "two and one"}]


def same(left: Row, right: Row) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in ARRAYS)


@pytest.fixture
def shards(tmp_path: Path, write_tar: Callable[..., Path], jpeg: bytes, flac: bytes, hostile: Path) -> list[Path]:
    """One sample with two images and a recording in all three formats."""
    png = (hostile / "images" / "rgba.png").read_bytes()
    tar = {"k.0.jpg": jpeg, "k.1.png": png, "k.flac": flac, "k.json": {"images": ["0.jpg", "1.png"], "texts": TURNS}}
    row = {"images": [[{"bytes": jpeg, "path": None}, {"bytes": png, "path": None}]], "audio": [{"bytes": flac, "path": None}]}
    pq.write_table(pa.table({**row, "texts": [TURNS]}), tmp_path / "s.parquet")
    for name, data in {"a.jpg": jpeg, "b.png": png, "c.flac": flac}.items():
        (tmp_path / name).write_bytes(data)
    line = {"image": ["a.jpg", "b.png"], "audios": "c.flac", "texts": TURNS}
    (tmp_path / "s.jsonl").write_text(json.dumps(line))
    return [write_tar(tar), tmp_path / "s.parquet", tmp_path / "s.jsonl"]


def test_all_formats_give_the_same_row(shards: list[Path], processor: SampleProcessor, source: SourceSpec) -> None:
    rows = []
    for path in shards:
        with open_shard(str(path), source) as shard:
            record = shard.read(0)
            probe, row = probe_of("sample", processor.size(processor.load(record, source))), processor.decode(record, source)
        rows.append(row)
        assert probe.num_tokens == len(row.input_ids)
        assert probe.num_targets == (row.labels != -100).sum()
        assert probe.image_patches == tuple(row.image_grids.prod(axis=1)) == (16, 64)
        assert probe.mel_frames == tuple(row.mel_frames) == (50,)
    assert same(rows[0], rows[1])
    assert same(rows[0], rows[2])
    assert rows[0].patches.shape == (80, 588)
    assert rows[0].mel.shape == (50, 128)
    assert rows[0].nbytes == 80 * 588 + 50 * 128 * 2 + rows[0].input_ids.nbytes * 2 + 2 * 12 + 4


def test_placeholders_are_as_many_as_the_encoders_give(
    shards: list[Path], processor: SampleProcessor, source: SourceSpec
) -> None:
    with open_shard(str(shards[0]), source) as shard:
        ids = processor.decode(shard.read(0), source).input_ids.tolist()
    control = load_encoder("").control
    assert ids.count(control["<|image_pad|>"]) == (16 + 64) // 4
    assert ids.count(control["<|audio_pad|>"]) == 7  # 50 frames, 8 a token
    assert max(ids) < processor.vocabulary.size


def test_batch_holds_the_rows(
    shards: list[Path], write_tar: Callable[..., Path], processor: SampleProcessor, source: SourceSpec
) -> None:
    rows = []
    for path in (shards[0], write_tar({"t.json": {"texts": ["only text"]}}, name="t.tar"), shards[1]):
        with open_shard(str(path), source) as shard:
            rows.append(processor.decode(shard.read(0), source))
    batch = processor.encode([7, 3, 5], rows)
    batch.validate(full=True)
    assert batch.schema == payload_schema(ImageSpec())
    assert batch.column("sample_id").to_pylist() == [7, 3, 5]
    for index, row in enumerate(rows):
        for name in ARRAYS:
            cell = np.array(batch.column(name)[index].as_py(), getattr(row, name).dtype).reshape(getattr(row, name).shape)
            np.testing.assert_array_equal(cell, getattr(row, name))
    assert batch.column("flags").to_pylist() == [0, 0, 0]


def test_empty_batch(processor: SampleProcessor) -> None:
    batch = processor.encode([], [])
    batch.validate(full=True)
    assert batch.num_rows == 0
    assert batch.schema == payload_schema(ImageSpec())


def test_payload_without_such_images_has_the_columns_that_it_always_had() -> None:
    """Trainers of release 0.1 refuse any other."""
    columns = ["sample_id", "input_ids", "labels", "patches", "image_grids", "mel", "mel_frames", "flags"]
    assert payload_schema(ImageSpec()).names == columns


def test_images_of_any_resolution_come_with_their_sizes_and_are_cut_where_they_are_alone(
    shards: list[Path], write_tar: Callable[..., Path], source: SourceSpec
) -> None:
    """A tile of 28 pixels has 2 x 2 tokens. An image that fills three of them has 2 rows of 6, each with a newline."""
    image = {"fit": "anyres", "side": 28, "merge": 1, "max_tiles_per_side": 3}
    spec = parse_spec({"name": "any", "sources": [{"path": "/a"}], "image": image})
    processor = SampleProcessor(spec)
    alone = write_tar({"t.png": encoded(photo(84, 28)), "t.json": {"texts": ["<image>wide"]}}, name="t.tar")
    rows = []
    for path in (alone, shards[0]):
        with open_shard(str(path), source) as shard:
            record = shard.read(0)
            rows.append(processor.decode(record, source))
            probe = probe_of("sample", processor.size(processor.load(record, source)))
        assert probe.image_patches == tuple(rows[-1].image_grids.prod(axis=1))
    batch = processor.encode([0, 1], rows)
    batch.validate(full=True)
    assert batch.schema == payload_schema(spec.image)
    assert "image_sizes" in batch.schema.names
    assert batch.column("image_sizes").to_pylist() == [[[28, 84], [0, 0], [0, 0], [0, 0]], [[48, 64], [120, 120]]]
    assert [len(row.image_grids) for row in rows] == [1 + 3, 2]
    placeholder = processor.vocabulary.image_token
    assert [row.input_ids.tolist().count(placeholder) for row in rows] == [4 + 2 * (6 + 1), 2 * (4 + 1)]


def test_single_row_is_not_copied(shards: list[Path], processor: SampleProcessor, source: SourceSpec) -> None:
    with open_shard(str(shards[0]), source) as shard:
        row = processor.decode(shard.read(0), source)
    values = processor.encode([0], [row]).column("patches").flatten()
    assert values.buffers()[1].address == row.patches.ctypes.data


def test_rows_that_share_a_room_are_not_copied(shards: list[Path], processor: SampleProcessor, source: SourceSpec) -> None:
    with open_shard(str(shards[0]), source) as shard:
        alone = processor.decode(shard.read(0), source)
        loaded = processor.load(shard.read(0), source)
    sizes = processor.size(loaded)
    arrays = patches, mel = processor.allocate([sizes, sizes])
    rows = [
        processor.decode_into(
            SizedSample(loaded=loaded, sizes=sizes), patches[at * 80 : (at + 1) * 80], mel[at * 50 : (at + 1) * 50]
        )
        for at in range(2)
    ]
    batch = processor.encode([0, 1], rows, arrays)
    batch.validate(full=True)
    assert batch.equals(processor.encode([0, 1], [alone, alone]))
    for name, array in (("patches", patches), ("mel", mel)):
        assert batch.column(name).flatten().buffers()[1].address == array.ctypes.data


def test_threads_give_the_same(shards: list[Path], processor: SampleProcessor, source: SourceSpec) -> None:
    with open_shard(str(shards[0]), source) as shard, ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda _: processor.decode(shard.read(0), source), range(24)))
    assert all(same(rows[0], row) for row in rows)


def with_spec(**parts: Any) -> JobSpec:
    return parse_spec({"name": "test", "sources": [{"path": "/data"}], **parts})


def test_numbers_of_another_model_family(shards: list[Path], source: SourceSpec) -> None:
    """Patches of 16 merged 4 x 4, 80 mel bins at 20 ms: data in the spec, no other code."""
    image = {"patch": 16, "merge": 4, "min_pixels": 64 * 64, "max_pixels": 64 * 64 * 4}
    processor = SampleProcessor(with_spec(image=image, audio={"mel_bins": 80, "hop_s": 0.02, "frames_per_token": 5}))
    with open_shard(str(shards[0]), source) as shard:
        probe, row = (
            probe_of("sample", processor.size(processor.load(shard.read(0), source))),
            processor.decode(shard.read(0), source),
        )
    assert row.patches.shape == (sum(probe.image_patches), 3 * 16 * 16)
    assert probe.image_patches == (16, 64)
    assert row.mel.shape == (25, 80)
    assert probe.num_tokens == len(row.input_ids)


def test_wrong_tokenizer_is_the_specs_fault() -> None:
    with pytest.raises(SpecError, match=r"text\.tokenizer"):
        SampleProcessor(with_spec(text={"tokenizer": "/no/such.json"}))


def test_a_sample_with_too_little_to_learn_is_refused(write_tar: Callable[..., Path], source: SourceSpec) -> None:
    with open_shard(str(write_tar({"k.txt": b"one two three"})), source) as shard:
        record = shard.read(0)

    def least(count: int) -> SampleProcessor:
        return SampleProcessor(parse_spec({"name": "j", "sources": [{"path": "/x"}], "text": {"min_targets": count}}))

    loaded = least(0).load(record, source)
    targets = least(0).size(loaded).sequence.num_targets
    assert least(targets).size(loaded).sequence.num_targets == targets
    with pytest.raises(BadSampleError, match=f"{targets} tokens to learn, fewer than {targets + 1}") as caught:
        least(targets + 1).size(loaded)
    assert caught.value.reason is Reason.TOO_SHORT
