"""WebDataset shards: grouping, annotations, media, gzip, and random access."""

from __future__ import annotations

import gc
import gzip
import io
import random
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from headrace.errors import DatasetError
from headrace.preprocessor.sources import open_shard
from headrace.preprocessor.sources.webdataset import WebDatasetShard
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec

WriteTar = Callable[..., Path]


def test_key_and_extension(write_tar: WriteTar) -> None:
    path = write_tar({"./train/01.2.WebP": b"w", "train/01.json": {"texts": []}})
    with WebDatasetShard(str(path)) as shard:
        record = shard.read(0)
        assert shard.key(0) == record.key == "train/01"
        assert record.members == ("2.webp",)
        assert record.load("2.webp") == record.load("2.WEBP") == b"w"
        assert shard.rejected == ()


def test_members_are_in_natural_order(write_tar: WriteTar) -> None:
    names = ["a.10.jpg", "a.2.jpg", "a.1.png", "a.jpg"]
    with WebDatasetShard(str(write_tar({**dict.fromkeys(names, b"x"), "a.json": {}}))) as shard:
        assert shard.read(0).members == ("jpg", "1.png", "2.jpg", "10.jpg")


def test_caption_beside_json(write_tar: WriteTar) -> None:
    with WebDatasetShard(str(write_tar({"a.txt": "é".encode(), "a.json": {"width": 3}, "b.txt": b"only"}))) as shard:
        assert shard.read(0).fields == {"txt": "é", "width": 3}
        assert shard.read(1).fields == {"txt": "only"}


def test_other_names_of_a_text(write_tar: WriteTar) -> None:
    members = {"a.transcript": b"said", "a.wav": b"x", "b.text": b"read", "b.json": {}, "c.txt": b"t", "c.text": b"other"}
    with WebDatasetShard(str(write_tar(members))) as shard:
        assert [shard.read(row).fields for row in range(3)] == [{"txt": "said"}, {"txt": "read"}, {"txt": "t"}]
        assert [shard.read(row).members for row in range(3)] == [("wav",), (), ("text",)]


def test_what_is_no_part_of_a_sample_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "shard.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in {"train": tarfile.DIRTYPE, "README": tarfile.REGTYPE, "._a.json": tarfile.REGTYPE}.items():
            info = tarfile.TarInfo(name)
            info.type = kind
            archive.addfile(info)
        info = tarfile.TarInfo("a.txt")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"ok"))
    with WebDatasetShard(str(path)) as shard:
        assert [shard.key(row) for row in range(shard.num_rows)] == ["a"]
        assert shard.rejected == ()


def test_damaged_annotations_leave_the_neighbours(write_tar: WriteTar) -> None:
    with WebDatasetShard(str(write_tar({"a.json": {}, "b.json": b"\xff", "c.json": b"{", "d.txt": b"\xff"}))) as shard:
        assert shard.read(0).fields == {}
        for row, reason in {1: Reason.ENCODING_ERROR, 2: Reason.SCHEMA_ERROR, 3: Reason.ENCODING_ERROR}.items():
            with pytest.raises(BadSampleError) as caught:
                shard.read(row)
            assert caught.value.reason is reason


@pytest.mark.parametrize("name", ["s.tar.gz", "s.tgz"])
def test_gzipped_archive_is_unpacked(write_tar: WriteTar, name: str) -> None:
    with WebDatasetShard(str(write_tar({"a.txt": b"1", "b.txt": b"2"}, name=name))) as shard:
        assert [shard.read(row).fields["txt"] for row in range(2)] == ["1", "2"]


@pytest.mark.parametrize(("spoil", "reason"), [("cut", Reason.ARCHIVE_TRUNCATED), ("flip", Reason.ARCHIVE_CORRUPT)])
def test_damaged_gzip_gives_what_comes_before(tmp_path: Path, write_tar: WriteTar, spoil: str, reason: Reason) -> None:
    noise = random.Random(0).randbytes(3 * 2**20)
    plain = write_tar({"a.txt": b"1", "b.bin": noise, "b.txt": b"2"}).read_bytes()
    packed = bytearray(gzip.compress(plain, mtime=0))
    if spoil == "cut":
        del packed[len(packed) // 2 :]
    else:
        packed[-5] ^= 1  # the length at the end
    path = tmp_path / "s.tar.gz"
    path.write_bytes(packed)
    with WebDatasetShard(str(path)) as shard:
        assert shard.read(0).fields == {"txt": "1"}
        assert reason in [item.reason for item in shard.rejected]


def test_archive_that_shrinks_after_indexing(write_tar: WriteTar) -> None:
    path = write_tar({"a.txt": b"1" * 2000, "b.jpg": b"2" * 2000, "b.txt": b"3"})
    with WebDatasetShard(str(path)) as shard:
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(BadSampleError) as caught:
            shard.read(0)
        assert caught.value.reason is Reason.ARCHIVE_TRUNCATED


def test_every_bad_header_is_reported(tmp_path: Path, write_tar: WriteTar) -> None:
    """Two damaged headers in a row: nothing that the archive held goes missing without a word."""
    data = bytearray(write_tar({f"{key}.txt": b"x" for key in "abcd"}, tar_format=tarfile.USTAR_FORMAT).read_bytes())
    data[1024 + 150] ^= 1
    data[2048 + 150] ^= 1
    path = tmp_path / "bad.tar"
    path.write_bytes(data)
    with WebDatasetShard(str(path)) as shard:
        assert [shard.key(row) for row in range(shard.num_rows)] == ["a", "d"]
        assert [(item.name, item.reason) for item in shard.rejected] == [("", Reason.ARCHIVE_CORRUPT)]


def test_remote_and_threads_give_the_same(write_tar: WriteTar, source: SourceSpec) -> None:
    members = {f"{i:03}.{kind}": f"{i}{kind}".encode() * 50 for i in range(100) for kind in ("bin", "txt")}
    path = write_tar(members)
    with fsspec.open("memory://bucket/shard.tar", "wb") as file:
        file.write(path.read_bytes())
    for url in (str(path), path.as_uri(), "memory://bucket/shard.tar"):
        with open_shard(url, source) as shard, ThreadPoolExecutor(4) as pool:
            rows = [random.Random(1).randrange(100) for _ in range(200)]
            for row, record in zip(rows, pool.map(shard.read, rows), strict=True):
                assert record.load("bin") == members[f"{row:03}.bin"]
                assert record.fields["txt"].encode() == members[f"{row:03}.txt"]


def test_dropped_shard_lives_as_long_as_its_records(write_tar: WriteTar, source: SourceSpec) -> None:
    """Without a ResourceWarning, which the suite makes an error."""
    record = open_shard(str(write_tar({"a.bin": b"data", "a.txt": b"t"})), source).read(0)
    gc.collect()
    assert record.load("bin") == b"data"
    del record
    gc.collect()


@pytest.mark.parametrize("url", ["/nowhere/s.tar", "memory://nowhere/s.tar", "/nowhere/s.parquet", "memory://nowhere/s.jsonl"])
def test_missing_file(url: str, source: SourceSpec) -> None:
    with pytest.raises(DatasetError, match="cannot read the shard"):
        open_shard(url, source)


def test_other_suffix(source: SourceSpec) -> None:
    with pytest.raises(DatasetError, match="is not a shard"):
        open_shard("/data/x.zip", source)


@pytest.mark.parametrize("codec", ["zst", "bz2"])
def test_other_packings(tmp_path: Path, write_tar: WriteTar, codec: str) -> None:
    plain = write_tar({"a.txt": b"1", "b.txt": b"2"}).read_bytes()
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, {"zst": "zstd"}.get(codec, codec)) as stream:
        stream.write(plain)
    packed = bytes(sink.getvalue())
    for name, size in {f"s.tar.{codec}": len(packed), f"cut.tar.{codec}": len(packed) - 8}.items():
        (tmp_path / name).write_bytes(packed[:size])
    with WebDatasetShard(str(tmp_path / f"s.tar.{codec}")) as shard:
        assert [shard.read(row).fields["txt"] for row in range(2)] == ["1", "2"]
        assert shard.rejected == ()
    with WebDatasetShard(str(tmp_path / f"cut.tar.{codec}")) as shard:
        assert shard.rejected
    (tmp_path / "s.tar").write_bytes(packed)
    with WebDatasetShard(str(tmp_path / "s.tar")) as shard:
        assert [item.reason for item in shard.rejected] == [Reason.ARCHIVE_CORRUPT]
        assert f"name it .tar.{codec}" in shard.rejected[0].detail


def test_a_member_whose_name_begins_like_packed_data(write_tar: WriteTar) -> None:
    with WebDatasetShard(str(write_tar({"BZh91/a.txt": b"1"}))) as shard:
        assert shard.read(0).fields == {"txt": "1"}


@pytest.mark.parametrize(
    ("turns", "field"),
    [
        ([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "conversations"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}], "messages"),
        ([], None),
        ([{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}], None),
        (["a caption", "another"], None),
    ],
)
def test_a_list_of_turns_is_the_conversation(write_tar: WriteTar, turns: list[Any], field: str | None) -> None:
    """What Megatron-LM's conversion of LLaVA writes."""
    with WebDatasetShard(str(write_tar({"a.json": turns}))) as shard:
        if field:
            assert shard.read(0).fields == {field: turns}
        else:
            with pytest.raises(BadSampleError, match="schema_error: the json member: expected an object, got list"):
                shard.read(0)
