"""LitData chunks: what is damaged, hostile, or not read. tests/layouts has what LitData itself writes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.errors import DatasetError
from headrace.preprocessor.sources import Shard, list_shards, open_shard
from headrace.preprocessor.sources.litdata_leaves import decoded
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import JobSpec, parse_spec

LEAF = {"type": None, "context": None, "children_spec": []}


def tree(*keys: str) -> str:
    return json.dumps([1, {"type": "builtins.dict", "context": json.dumps(keys), "children_spec": [LEAF] * len(keys)}])


def indexed(folder: Path, chunks: dict[str, bytes], formats: list[str], spec: str | None = None, **config: Any) -> JobSpec:
    for name, data in chunks.items():
        (folder / name).write_bytes(data)
    described = {"data_format": formats, "data_spec": spec, "item_loader": "PyTreeLoader", **config}
    index = {"chunks": [{"filename": name} for name in chunks], "config": described}
    (folder / "index.json").write_text(json.dumps(index))
    return parse_spec({"name": "j", "sources": [{"path": str(folder)}]})


def row(*leaves: bytes) -> bytes:
    return b"".join([*(struct.pack("<I", len(leaf)) for leaf in leaves), *leaves])


def chunk(*rows: bytes) -> bytes:
    start = 4 * (len(rows) + 2)
    ends = [start + sum(map(len, rows[:number])) for number in range(len(rows) + 1)]
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *ends) + b"".join(rows)


def framed(rows: list[bytes], frames: list[bytes], said: int) -> bytes:
    ends = [sum(map(len, rows[:number])) for number in range(len(rows) + 1)]
    place = 24 + 4 * len(ends) + 24 * len(frames)
    head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, len(rows), 1, len(frames)) + struct.pack(f"<{len(ends)}I", *ends)
    table = b""
    for number, frame in enumerate(frames):
        table += struct.pack("<IIQII", number, 1, place, len(frame), said)
        place += len(frame)
    return head + table + b"".join(frames)


def only(spec: JobSpec) -> Shard:
    (info,) = list_shards(spec)
    return open_shard(info.url, spec.sources[0])


def packed(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def test_rows_and_their_shapes(tmp_path: Path) -> None:
    nested = json.dumps([1, {"type": "builtins.tuple", "context": None, "children_spec": [json.loads(tree("a"))[1], LEAF]}])
    spec = indexed(tmp_path, {"chunk-0-0.bin": chunk(row(b"x", b"y"), row(b"1", b""))}, ["str", "str"], nested)
    with only(spec) as shard:
        assert [shard.read(number).fields for number in range(shard.num_rows)] == [
            {"0": {"a": "x"}, "1": "y"},
            {"0": {"a": "1"}, "1": ""},
        ]


def test_a_row_that_is_one_leaf(tmp_path: Path) -> None:
    with only(indexed(tmp_path, {"chunk-0-0.bin": chunk(row(b"x"))}, ["str"])) as shard:
        assert shard.read(0).fields == {"0": "x"}


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"", "0 rows do not fit into 0 bytes"),
        (struct.pack("<2I", 9, 44), "9 rows do not fit into 8 bytes"),
        (struct.pack("<4I", 1, 4, 5, 6), "the first row is at byte 4, the offsets end at 12"),
        (b"LDFZ01\0\0" + struct.pack("<HHIII", 2, 0, 1, 1, 1), "frames of version 2"),
        (b"LDFZ01\0\0" + struct.pack("<HHIII", 1, 0, 2**31, 1, 2**31), "do not fit into"),
        (framed([b"abc"], [b"no zstd"], 3), "the zstd data is damaged"),
        (framed([b"abc"], [packed(b"abcdef")], 3), "zstd data, unpacked, has 4 bytes, more than 3"),
        (framed([b"abc"], [packed(b"ab")], 3), "the frames have 2 bytes, and the rows end at 3"),
        (framed([b"a"], [packed(bytes(2**30))], 2**31), "a frame, unpacked, has 2147483648 bytes"),
    ],
)
def test_a_damaged_chunk_is_rejected(tmp_path: Path, data: bytes, detail: str) -> None:
    with only(indexed(tmp_path, {"chunk-0-0.bin": data}, ["str"])) as shard:
        assert shard.num_rows == 0
        assert detail in shard.rejected[0].detail


def test_damaged_rows_are_refused_and_the_others_read(tmp_path: Path) -> None:
    rows = [row(b"good"), row(b"\xff"), row(b"long")[:-1], b"\xff\xff\xff\xff"]
    with only(indexed(tmp_path, {"chunk-0-0.bin": chunk(*rows)}, ["str"], tree("text"))) as shard:
        assert shard.read(0).fields == {"text": "good"}
        for number, reason in enumerate([Reason.ENCODING_ERROR, Reason.ARCHIVE_CORRUPT, Reason.ARCHIVE_CORRUPT], 1):
            with pytest.raises(BadSampleError) as caught:
                shard.read(number)
            assert caught.value.reason is reason


def test_a_packed_row_that_is_damaged(tmp_path: Path) -> None:
    data = chunk(packed(row(b"good")), b"no zstd")
    with only(indexed(tmp_path, {"chunk-0-0.bin": data}, ["str"], tree("t"), compression_level="sample")) as shard:
        assert shard.read(0).fields == {"t": "good"}
        with pytest.raises(BadSampleError, match="the zstd data is damaged"):
            shard.read(1)


@pytest.mark.parametrize(
    ("form", "data", "message"),
    [
        ("int", b"1", "no value of int"),
        ("no_header_tensor:10", b"\0\0", "values of the type 10 are not read"),
        ("no_header_numpy:x", b"", "no value of no_header_numpy:x"),
        ("tensor", struct.pack("<II3I", 0, 3, 1, 2, 3) + bytes(8), "no value of tensor"),
        ("json", b"\x01\xff\xff\xff\x7f", "bytes are needed"),
        ("json", b"\x06\xff\xff\xff\xff\xff\xff\xff\xff", "bytes are needed"),
        ("json", (b"\x05\x01\0\0\0" + b"\x01\0\0\0a") * 70, "nested more than 64 deep"),
        ("json", b"{", "no value of json"),
        ("json", b"\x1f", "no value has the tag 31"),
    ],
)
def test_a_damaged_leaf_is_refused(form: str, data: bytes, message: str) -> None:
    with pytest.raises(BadSampleError, match=message):
        decoded(form, data)


def test_objects_of_records_take_no_more_than_their_bytes() -> None:
    rows = struct.pack("<BII", 6, 2**31, 0)
    with pytest.raises(BadSampleError, match="bytes are needed"):
        decoded("json", rows)


def test_a_pickle_stays_bytes() -> None:
    assert decoded("pickle", b"cos\nsystem\n(S'true'\ntR.") == b"cos\nsystem\n(S'true'\ntR."
    assert decoded("video:mp4", b"film") == b"film"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"encryption": {"level": "chunk"}}, "the chunks are encrypted, which is not read"),
        ({"item_loader": "TokensLoader"}, "the chunks are for LitData's TokensLoader"),
        ({"data_spec": '[1, {"type": "my.Class", "context": null, "children_spec": []}]'}, "rows have a my.Class"),
        ({"data_spec": tree("a", "b", "c")}, "no sound index of LitData chunks"),
        ({"data_spec": tree()}, "it has more formats than leaves"),
        ({"data_format": None}, "no sound index of LitData chunks"),
    ],
)
def test_an_index_that_is_not_read_is_told(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        list_shards(indexed(tmp_path, {"chunk-0-0.bin": chunk()}, ["str"], **{"spec": tree("a"), **config}))


def test_chunks_that_the_index_does_not_list_are_left_out(tmp_path: Path) -> None:
    spec = indexed(tmp_path, {"chunk-0-0.bin": chunk(row(b"x"))}, ["str"], tree("text"))
    (tmp_path / "chunk-7-7.bin").write_bytes(b"old")
    assert [info.url for info in list_shards(spec)] == [str(tmp_path / "chunk-0-0.bin")]
    (tmp_path / "chunk-0-0.bin").unlink()
    with pytest.raises(DatasetError, match=r"lists chunk-0-0\.bin, which is not there"):
        list_shards(spec)
