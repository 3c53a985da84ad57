"""Shards that promise, or unpack to, far more than they hold are refused before memory and disk are taken for it."""

from __future__ import annotations

import gc
import gzip
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import DatasetError
from headrace.preprocessor.sources import list_shards, open_shard, unpacked
from headrace.preprocessor.sources.blob import LocalBlob
from headrace.preprocessor.sources.mds_columns import decoder
from headrace.preprocessor.sources.parquet import ParquetShard
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec
from headrace.spec import parse_spec
from tests.unit.preprocessor.conftest import WriteTar

MIB = 2**20

# In a process of its own, that may take 256 MiB more than it has.
CHILD = """
import resource, sys
from pathlib import Path
import numpy, pyarrow
from headrace.errors import DatasetError
from headrace.quarantine import BadSampleError
from headrace.source_spec import SourceSpec
from headrace.preprocessor.sources import open_shard
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 256 * 2**20, resource.RLIM_INFINITY))
for path in sys.argv[1:]:
    with open_shard(path, SourceSpec(path=path)) as shard:
        for row in {0, shard.num_rows - 1}:
            try:
                print(Path(path).name, row, len(str(shard.read(row).fields)))
            except BadSampleError as error:
                print(Path(path).name, row, error.reason)
"""


def shared_values(path: Path, num_rows: int, value: bytes, **columns: Any) -> Path:
    """A Parquet file whose rows share one value, which is written once; read like any column of bytes."""
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array([value]))
    pq.write_table(pa.table({"image": shared, **columns}), path, store_schema=False)
    return path


def mds(path: Path, encoding: str, value: bytes) -> Path:
    """A shard of one row with one column."""
    header = json.dumps({"column_names": ["x"], "column_encodings": [encoding], "column_sizes": [None]}).encode()
    row = struct.pack("<I", len(value)) + value
    start = 12 + len(header)
    path.write_bytes(struct.pack("<3I", 1, start, start + len(row)) + header + row)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_bombs_are_read_or_refused_in_256_mib(tmp_path: Path) -> None:
    bombs = [
        shared_values(tmp_path / "value.parquet", 200_000, bytes(100_000)),  # 20 GB
        mds(tmp_path / "shape.mds", "ndarray:uint8:200000000,0", b""),  # 200 million lists
        mds(tmp_path / "picture.mds", "pil", struct.pack("<3I", 16_000, 16_000, 4) + b"RGBA"),  # a gigabyte
    ]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, bombs)],
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.stderr == ""
    assert child.stdout.splitlines() == [
        *(f"value.parquet {row} {len(str({'image': bytes(100_000)}))}" for row in (0, 199_999)),
        "shape.mds 0 too_large",
        "picture.mds 0 schema_error",
    ]


def test_a_row_of_references_to_one_value_is_measured_before_it_is_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"images": [[bytes(10_000)] * 500, [bytes(10_000)]]}), path)
    monkeypatch.setattr("headrace.preprocessor.sources.parquet_bounds.USUAL_BYTES", MIB)
    monkeypatch.setattr("headrace.preprocessor.sources.parquet.MAX_MEDIUM_BYTES", 4 * MIB)
    with ParquetShard(str(path)) as shard:
        assert shard.read(1).fields == {"images": [bytes(10_000)]}
        with pytest.raises(BadSampleError) as caught:
            shard.read(0)
    assert caught.value.reason is Reason.TOO_LARGE


def test_values_are_the_same_where_columns_are_read_with_their_dictionaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {
            "id": row,
            "image": {"bytes": bytes([row % 7]) * 200, "path": None if row % 3 else "p"},
            "turns": [{"from": name, "value": f"{row} {name}"} for name in ("human", "gpt")[: row % 3]],
        }
        for row in range(100)
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30)
    monkeypatch.setattr("headrace.preprocessor.sources.parquet_bounds.USUAL_BYTES", 200 * 30)
    monkeypatch.setattr("headrace.preprocessor.sources.parquet_bounds.MAX_RATIO", 2**20)
    monkeypatch.setattr("headrace.preprocessor.sources.parquet_bounds._MAX_EXPANSION", 0)
    with ParquetShard(str(path)) as shard:
        assert [shard.read(row).fields for row in range(100)] == rows


def test_a_column_of_zeros_is_refused_by_its_share_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "zeros.parquet"
    pq.write_table(pa.table({"x": pa.array([bytes(MIB)] * 4)}), path, use_dictionary=False, compression="zstd")
    monkeypatch.setattr("headrace.preprocessor.sources.parquet_bounds.USUAL_BYTES", 2 * MIB)
    with ParquetShard(str(path)) as shard, pytest.raises(BadSampleError) as caught:
        shard.read(0)
    assert caught.value.reason is Reason.TOO_LARGE


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("ndarray:uint8:4000000000,0", b""),
        ("ndarray:uint8:1,70000000,0,1", b""),
        ("ndarray:int16:8192,2048", bytes(2**25)),
    ],
)
def test_arrays_are_measured_as_the_lists_that_they_become(encoding: str, value: bytes) -> None:
    decode = decoder(encoding)
    assert decode is not None
    with pytest.raises(BadSampleError) as caught:
        decode(value)
    assert caught.value.reason is Reason.TOO_LARGE


def test_brace_ranges_have_one_bound_together(tmp_path: Path) -> None:
    meta = tmp_path / ".nv-meta"
    meta.mkdir()
    (meta / ".info.json").write_text("{}")
    (meta / "split.yaml").write_text(json.dumps({"split_parts": {"train": ["a{0..40000}.tar"] * 30}}))
    with pytest.raises(DatasetError, match="more than 1000000 names"):
        list_shards(parse_spec({"name": "job", "sources": [{"path": str(tmp_path)}]}))
    (meta / "split.yaml").write_text(json.dumps({"split_parts": {"train": ["a" * 4000 + "{0..99999}"]}}))
    with pytest.raises(DatasetError, match="or too long ones"):
        list_shards(parse_spec({"name": "job", "sources": [{"path": str(tmp_path)}]}))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound for packed shards that a test can pass."""
    monkeypatch.setattr(unpacked, "MIN_BYTES", MIB)


def test_a_packed_tar_of_zeros_is_unpacked_to_its_share(small: None, write_tar: WriteTar, tmp_path: Path) -> None:
    good = write_tar({"a.txt": b"text"})
    path = tmp_path / "zeros.tar.gz"
    path.write_bytes(gzip.compress(good.read_bytes() + bytes(64 * MIB)))
    with open_shard(str(path), SourceSpec(path=str(path))) as shard:
        assert [shard.key(row) for row in range(shard.num_rows)] == ["a"]
        assert [(item.name, item.reason) for item in shard.rejected] == [("", Reason.TOO_LARGE)]
        assert shard._blob.size <= unpacked.MAX_RATIO * path.stat().st_size  # type: ignore[attr-defined]


@pytest.mark.parametrize("packing", ["gz", "zstd"])
def test_a_packed_mds_of_zeros_is_refused(small: None, tmp_path: Path, packing: str) -> None:
    before = unpacked._open_bytes()
    path = tmp_path / f"zeros.mds.{packing}"
    codec = {"gz": "gzip", "zstd": "zstd"}[packing]
    with pa.CompressedOutputStream(str(path), codec) as stream:
        stream.write(bytes(64 * MIB))
    with open_shard(str(path), SourceSpec(path=str(path))) as shard:
        assert [item.reason for item in shard.rejected] == [Reason.TOO_LARGE]
    assert unpacked._open_bytes() == before


def test_unpacked_shards_that_are_open_share_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what goes makes room."""
    before = unpacked._open_bytes()
    monkeypatch.setattr(unpacked, "MAX_TOTAL_BYTES", before + 4 * MIB)
    path = tmp_path / "noise.tar.gz"
    path.write_bytes(gzip.compress(os.urandom(3 * MIB)))
    shard = open_shard(str(path), SourceSpec(path=str(path)))
    with pytest.raises(DatasetError, match="the unpacked shards that are open have"):
        open_shard(str(path), SourceSpec(path=str(path)))
    del shard
    assert unpacked._open_bytes() == before
    open_shard(str(path), SourceSpec(path=str(path))).close()


def test_a_blob_may_be_collected_while_another_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finalizer gives back what the refused one wanted to take, in the same thread."""
    before = unpacked._open_bytes()

    class CollectedError(DatasetError):
        def __init__(self, message: str) -> None:
            gc.collect()
            super().__init__(message)

    def leave_in_a_cycle() -> None:
        writing = unpacked.Unpacking(packed, "packed")
        writing.write(bytes(MIB))
        blob = writing.finish()
        blob.itself = blob  # type: ignore[attr-defined]

    def refuse() -> None:
        with pytest.raises(CollectedError):
            unpacked._take(MIB, "packed")

    with tempfile.TemporaryFile() as file:
        packed = LocalBlob(file, "packed")
        monkeypatch.setattr(unpacked, "MAX_TOTAL_BYTES", before + MIB)
        monkeypatch.setattr(unpacked, "DatasetError", CollectedError)
        gc.disable()
        try:
            leave_in_a_cycle()
            assert unpacked._open_bytes() == before + MIB
            thread = threading.Thread(target=refuse, daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
        finally:
            gc.enable()
    assert unpacked._open_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_damaged_packed_shards_leave_nothing_in_memory(tmp_path: Path) -> None:
    """A job tries its shards again and again; pyarrow forgets a buffer for every read that raises."""
    path = tmp_path / "bad.mds.gz"
    path.write_bytes(gzip.compress(os.urandom(1000))[:-20] + bytes(40))

    def num_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0])

    def attempt() -> None:
        with open_shard(str(path), SourceSpec(path=str(path))) as shard:
            assert [item.reason for item in shard.rejected] == [Reason.ARCHIVE_CORRUPT]

    attempt()
    before = num_pages()
    for _ in range(100):
        attempt()
    assert (num_pages() - before) * os.sysconf("SC_PAGE_SIZE") < 32 * MIB
