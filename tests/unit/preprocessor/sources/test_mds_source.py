"""MDS shards as mosaicml-streaming writes them: columns, compression, hashes, and what is done about damage."""

from __future__ import annotations

import io
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headrace.errors import DatasetError
from headrace.mapping import MappingSpec
from headrace.preprocessor import image
from headrace.preprocessor.decoding import SampleProcessor
from headrace.preprocessor.records.record_to_sample import Image as ImageSegment
from headrace.preprocessor.records.record_to_sample import to_sample
from headrace.preprocessor.sources import list_shards, open_shard
from headrace.preprocessor.sources.mds import MdsShard
from headrace.preprocessor.sources.mds_columns import decoder
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec
from headrace.spec import ImageSpec, parse_spec
from tests.examples import with_examples

MDS = Path(__file__).parents[3] / "data" / "mds"
CAPTIONS = MDS / "captions"
PACKINGS = ["zstd", "gz", "br", "bz2", "snappy"]


def listed(path: Path | str) -> list[str]:
    spec = parse_spec({"name": "test", "sources": [{"path": str(path), "name": "s"}]})
    return [shard.name for shard in list_shards(spec)]


def write_shard(path: Path, rows: list[bytes], columns: dict[str, tuple[str, int | None]], **changes: Any) -> Path:
    """A shard built from the description of the format."""
    header = {
        "column_names": list(columns),
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_sizes": [size for _, size in columns.values()],
        **changes,
    }
    described = json.dumps(header).encode()
    ends = [4 * (len(rows) + 2) + len(described)]
    for row in rows:
        ends.append(ends[-1] + len(row))
    path.write_bytes(struct.pack(f"<{len(rows) + 2}I", len(rows), *ends) + described + b"".join(rows))
    return path


def reason_of(shard: MdsShard, row: int) -> Reason:
    with pytest.raises(BadSampleError) as caught:
        shard.read(row)
    return caught.value.reason


def test_a_data_set_of_captions(source: SourceSpec, processor: SampleProcessor) -> None:
    assert listed(CAPTIONS) == ["s/shard.00000.mds", "s/shard.00001.mds"]
    captions = []
    for name in ("shard.00000.mds", "shard.00001.mds"):
        with open_shard(str(CAPTIONS / name), source) as shard:
            assert shard.rejected == ()
            assert [shard.key(row) for row in range(shard.num_rows)] == [str(row) for row in range(shard.num_rows)]
            for row in range(shard.num_rows):
                record = shard.read(row)
                captions.append(record.fields["caption"])
                assert record.fields["id"] == len(captions) - 1
                assert processor.decode(record, source).image_grids.shape == (1, 3)
    assert captions == [f"An ellipse, number {number}: größer" for number in range(5)]


@pytest.mark.parametrize("packing", PACKINGS)
def test_compressed_shards(packing: str, source: SourceSpec) -> None:
    folder = MDS / f"chat-{packing}"
    assert listed(folder) == [f"s/shard.00000.mds.{packing}"]
    with open_shard(str(folder / f"shard.00000.mds.{packing}"), source) as shard:
        assert shard.num_rows == 2
        assert shard.rejected == ()
        sample = to_sample(shard.read(1), source.mapping)
    assert [turn.role for turn in sample.turns] == ["user", "assistant"]
    assert isinstance(sample.turns[0].segments[0], ImageSegment)
    assert sample.turns[1].segments[0].text == "Ellipse 1."  # type: ignore[union-attr]


def test_every_encoding() -> None:
    with MdsShard(str(MDS / "encodings" / "shard.00000.mds")) as shard:
        fields = dict(shard.read(0).fields)
    pictures = [fields.pop(name) for name in ("jpeg", "png", "pil")]
    for name in ("jpegs", "pngs", "pils", "array"):
        pictures += fields.pop(name)
    opened = [Image.open(io.BytesIO(data)) for data in pictures]
    assert [(image.format, image.size) for image in opened] == [
        ("JPEG", (32, 24)),
        ("PNG", (6, 5)),
        ("PNG", (6, 5)),
        *[("JPEG", (32, 24))] * 2,
        *[("PNG", (6, 5))] * 3,
        *[("JPEG", (32, 24))] * 2,
    ]
    assert opened[1].tobytes() == opened[2].tobytes() == opened[5].tobytes()
    assert opened[7].tobytes() == opened[1].convert("L").tobytes()
    assert fields == {
        "bytes": b"\x00\xff",
        "str": "größer",
        "int": -7,
        "nd": [[0, 1], [2, 3], [4, 5]],
        "nd16": [0.5, -2.0],
        "nds": [[0, 1, 2], [3, 4, 5]],
        **{"u8": 2**8 - 1, "u16": 2**16 - 1, "u32": 2**32 - 1, "u64": 2**64 - 1},
        **{"i8": -(2**7), "i16": -(2**15), "i32": -(2**31), "i64": -(2**63)},
        **{"f16": 1.5, "f32": 0.25, "f64": 1e-300},
        **{"si": 10**30, "sf": 2.5, "sd": 3.25},
        "json": {"a": [1, None, "x"]},
    }


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_pictures_of_16_bits_are_those_of_a_png(mode: str) -> None:
    grey = np.linspace(0, 65_535, 56 * 56).astype(np.uint16).reshape(56, 56)
    stored = grey.astype({"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}[mode]).tobytes()
    value = struct.pack("<3I", 56, 56, len(mode)) + mode.encode() + stored
    png = io.BytesIO()
    Image.fromarray(grey).save(png, "PNG")
    read = decoder("pil")
    assert read is not None
    pixels, expected = (image.read_pixels(data, ImageSpec()) for data in (read(value), png.getvalue()))
    np.testing.assert_array_equal(pixels, expected)
    assert pixels[0, 0, 0] == 0
    assert pixels[-1, -1, 0] == 255
    assert abs(int(pixels[28, 0, 0]) - 128) <= 1


def test_pictures_of_32_bits_keep_their_values() -> None:
    """What they mean is decided where all pictures are decoded: floats from 0 to 1, integers as of 16 bits, others refused."""
    read = decoder("pil")
    assert read is not None
    for mode, dtype, value, level in (
        ("F", "<f4", 0.5, 128),
        ("I", "<i4", 65_535, 255),
        ("F", "<f4", 2, None),
        ("I", "<i4", -1, None),
    ):
        data = read(struct.pack("<3I", 56, 56, 1) + mode.encode() + np.full((56, 56), value, dtype).tobytes())
        if level is None:
            with pytest.raises(BadSampleError, match="0 for black"):
                image.read_pixels(data, ImageSpec())
        else:
            assert image.read_pixels(data, ImageSpec())[0, 0, 0] == level


def test_a_pickled_column_is_never_run_and_only_left_out_by_name(tmp_path: Path) -> None:
    bomb = b"cos\nsystem\n(S'touch " + str(tmp_path / "touched").encode() + b"'\ntR."
    row = struct.pack("<2I", 5, len(bomb)) + b"A cat" + bomb
    path = write_shard(tmp_path / "shard.00000.mds", [row], {"text": ("str", None), "extra": ("pkl", None)})
    with MdsShard(str(path)) as shard:
        with pytest.raises(BadSampleError, match=r"unused_media: nothing uses what extra holds: .*list 'extra' under"):
            to_sample(shard.read(0), MappingSpec())
        (turn,) = to_sample(shard.read(0), MappingSpec(ignore=("extra",))).turns
        with pytest.raises(BadSampleError, match="schema_error: extra: expected a string or a list, got bytes"):
            to_sample(shard.read(0), MappingSpec(text="extra"))
    assert [segment.text for segment in turn.segments] == ["A cat"]
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("encoding", ["nonsense", "str:3", "ndarray:complex64", "ndarray:int8:a"])
def test_an_unknown_encoding_has_no_decoder(encoding: str) -> None:
    assert decoder(encoding) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:40], Reason.ARCHIVE_CORRUPT),  # inside of the description
        (lambda data: data[:10], Reason.ARCHIVE_TRUNCATED),  # inside of the offsets
        (lambda data: b"", Reason.ARCHIVE_TRUNCATED),
        (lambda data: b"\xff" * 4 + data[4:], Reason.ARCHIVE_TRUNCATED),  # four billion rows
        (lambda data: data[:25] + b"\xff" * 9 + data[34:], Reason.ARCHIVE_CORRUPT),  # the description
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), Reason.ARCHIVE_CORRUPT),  # a picture: only the hash tells
    ],
)
def test_a_damaged_shard_is_quarantined_as_a_whole(tmp_path: Path, damage: Any, reason: Reason) -> None:
    shutil.copytree(CAPTIONS, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(damage(path.read_bytes()))
    with MdsShard(str(path)) as shard:
        assert shard.num_rows == 0
        assert [(item.name, item.reason) for item in shard.rejected] == [("", reason)]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("spoil", ["cut", "flip"])
def test_damaged_compression_is_quarantined(tmp_path: Path, packing: str, spoil: str) -> None:
    shutil.copytree(MDS / f"chat-{packing}", tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"shard.00000.mds.{packing}"
    data = bytearray(path.read_bytes())
    if spoil == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with MdsShard(str(path)) as shard:
        assert shard.num_rows == 0
        assert shard.rejected[0].reason in (Reason.ARCHIVE_CORRUPT, Reason.ARCHIVE_TRUNCATED)


def test_damaged_rows_leave_the_others(tmp_path: Path) -> None:
    columns: dict[str, tuple[str, int | None]] = {"text": ("str", None), "extra": ("json", None)}

    def row(text: bytes, extra: bytes, sizes: tuple[int, int] | None = None) -> bytes:
        return struct.pack("<2I", *(sizes or (len(text), len(extra)))) + text + extra

    good = row(b"good", b"{}")
    rows = [good, row(b"\xff", b"{}"), row(b"t", b"{"), row(b"t", b"{}", (900, 2)), b"\x01", good, good]
    path = write_shard(tmp_path / "shard.00000.mds", rows, columns)
    path.write_bytes(path.read_bytes()[:-1])
    with MdsShard(str(path)) as shard:
        assert shard.num_rows == 7
        assert shard.read(0).fields == shard.read(5).fields == {"text": "good", "extra": {}}
        assert reason_of(shard, 1) is Reason.ENCODING_ERROR
        assert reason_of(shard, 2) is Reason.SCHEMA_ERROR
        assert reason_of(shard, 3) is reason_of(shard, 4) is Reason.ARCHIVE_CORRUPT
        assert reason_of(shard, 6) is Reason.ARCHIVE_TRUNCATED
        with pytest.raises(IndexError):
            shard.read(7)


@with_examples(150)
@given(
    st.sampled_from(["encodings/shard.00000.mds", "captions/shard.00001.mds"]),
    st.integers(0, 1300),
    st.binary(min_size=1, max_size=4),
)
def test_no_damage_escapes_as_another_error(name: str, offset: int, noise: bytes) -> None:
    data = bytearray((MDS / name).read_bytes())
    data[offset : offset + len(noise)] = noise
    with fsspec.open(f"memory://fuzz/{name}", "wb") as file:
        file.write(data)
    with fsspec.open(f"memory://fuzz/{Path(name).parent}/index.json", "wb") as file:
        file.write((MDS / Path(name).parent / "index.json").read_bytes())
    try:
        with MdsShard(f"memory://fuzz/{name}") as shard:
            assert shard.num_rows or shard.rejected
            for row in range(shard.num_rows):
                shard.read(row)
    except (BadSampleError, DatasetError):
        return


def test_the_plain_file_comes_before_the_compressed_one(tmp_path: Path) -> None:
    shutil.copytree(MDS / "chat-gz", tmp_path, dirs_exist_ok=True)
    (tmp_path / "shard.00000.mds").write_bytes(b"x")
    (tmp_path / "shard.00007.mds").write_bytes(b"left over by an older version of the data set")
    assert listed(tmp_path) == ["s/shard.00000.mds"]


def test_splits_in_folders_and_single_shards() -> None:
    assert len(listed(MDS)) == 8
    assert listed(CAPTIONS / "shard.00001.mds") == ["s/shard.00001.mds"]
    assert listed(f"{CAPTIONS}/*1.mds") == ["s/shard.00001.mds"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: b"{", "is not a sound index of MDS shards"),
        (lambda index: b"[]", "is not a sound index of MDS shards"),
        (lambda index: index.replace(b'"format": "mds"', b'"format": "json"'), "not MDS version 2"),
        (lambda index: index.replace(b'"version": 2', b'"version": 3'), "not MDS version 2"),
        (lambda index: index.replace(b'"str"', b'"nonsense"'), "the encoding 'nonsense', which is not known"),
        (lambda index: index.replace(b"shard.00001", b"shard.00009"), "lists shard.00009.mds, which is not there"),
        (lambda index: index.replace(b"shard.00001", b"../outside"), "leads outside of the data set"),
        (lambda index: index.replace(b'"raw_data"', b'"data"'), "KeyError: 'raw_data'"),
        (None, r"there is no .*index\.json beside shard\.00000\.mds"),
    ],
)
def test_a_damaged_index_is_told_in_a_sentence(tmp_path: Path, change: Any, message: str) -> None:
    shutil.copytree(CAPTIONS, tmp_path, dirs_exist_ok=True)
    index = tmp_path / "index.json"
    if change is None:
        index.unlink()
    else:
        index.write_bytes(change(index.read_bytes()))
    with pytest.raises(DatasetError, match=message) as caught:
        listed(tmp_path)
    assert str(caught.value).startswith("source 's': ")
    assert str(tmp_path) in str(caught.value)
