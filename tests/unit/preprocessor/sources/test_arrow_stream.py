"""Arrow streams, as `save_to_disk` of Hugging Face datasets writes them: random access, damage, and what is not read."""

from __future__ import annotations

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.feather as feather
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor.sources import list_shards, open_shard
from headrace.preprocessor.sources.arrow_stream import ArrowShard
from headrace.preprocessor.sources.cache import ShardCache
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec
from headrace.spec import parse_spec
from tests.http_site import Site

RECORDS = [
    {
        "image": {"bytes": bytes([row]) * (row % 7), "path": f"{row}.jpg"},
        "images": [{"bytes": b"x" * row, "path": None}] * (row % 3),
        "conversations": [{"from": "human", "value": f"question {row} é"}, {"from": "gpt", "value": "answer"}],
        "score": None if row % 2 else row / 2,
    }
    for row in range(50)
]


def stream(records: list[dict[str, Any]], rows: int = 8, **options: Any) -> bytes:
    table = pa.Table.from_pylist(records)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return bytes(sink.getvalue())


def written(folder: Path, data: bytes) -> str:
    path = folder / "data-00000-of-00001.arrow"
    path.write_bytes(data)
    return str(path)


def test_rows_are_read_in_any_order(tmp_path: Path, source: SourceSpec) -> None:
    with open_shard(written(tmp_path, stream(RECORDS)), source) as shard, ThreadPoolExecutor(4) as pool:
        assert shard.num_rows == len(RECORDS)
        assert shard.rejected == ()
        order = random.Random(0).choices(range(len(RECORDS)), k=200)
        for row, record in zip(order, pool.map(shard.read, order), strict=True):
            assert record.key == shard.key(row) == str(row)
            assert record.fields == RECORDS[row]


def test_the_file_format_is_read_too(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    path = str(tmp_path / "a.arrow")
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)
    with ArrowShard(path) as shard:
        assert [shard.read(row).fields for row in range(shard.num_rows)] == RECORDS
        assert shard.rejected == ()


@pytest.mark.parametrize("compression", ["lz4", "zstd", "uncompressed"])
def test_feather_is_an_arrow_file(tmp_path: Path, source: SourceSpec, compression: str) -> None:
    path = tmp_path / "a.feather"
    feather.write_feather(pa.Table.from_pylist(RECORDS), str(path), compression=compression)
    (listed,) = list_shards(parse_spec({"name": "j", "sources": [{"path": str(tmp_path)}]}))
    assert listed.url == str(path)
    with open_shard(listed.url, source) as shard:
        assert [shard.read(row).fields for row in range(shard.num_rows)] == RECORDS


def test_feather_of_the_first_version_is_refused_by_name(tmp_path: Path, source: SourceSpec) -> None:
    (tmp_path / "a.feather").write_bytes(b"FEA1" + bytes(60) + b"FEA1")
    with open_shard(str(tmp_path / "a.feather"), source) as shard:
        (rejected,) = shard.rejected
    assert rejected.detail == "it is Feather of version 1, which is not Arrow: write it again with pandas, or as Parquet"


def test_a_remote_stream(site: Site, cache: ShardCache) -> None:
    data = stream(RECORDS[:20])
    with fsspec.open("memory://arrow/a.arrow", "wb") as file:
        file.write(data)
    site.files["a.arrow"] = data
    cache._max_bytes = 2 * len(data)
    for url, through in (("memory://arrow/a.arrow", None), (f"{site.url}/a.arrow", cache)):
        with ArrowShard(url, through) as shard:
            assert [shard.read(row).fields for row in (19, 0, 7, 8)] == [RECORDS[row] for row in (19, 0, 7, 8)]
    assert len(site.gets) == 1


def test_a_cut_stream_gives_its_whole_batches(tmp_path: Path) -> None:
    data = stream(RECORDS)
    starts = [message for message in range(len(data)) if data[message : message + 4] == b"\xff" * 4]
    for end in (starts[3] + 2, starts[3] + 40, starts[4] - 1, starts[4]):
        with ArrowShard(written(tmp_path, data[:end])) as shard:
            assert shard.num_rows == (24 if end == starts[4] else 16)
            assert [item.reason for item in shard.rejected] == [Reason.ARCHIVE_TRUNCATED]
            assert shard.read(15).fields == RECORDS[15]


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"x" * 100, b"\xff\xff\xff\xff\x00\x00\x00\x00", b"\xff\xff\xff\xff\xff\xff\xff\x7f"]
)
def test_what_is_no_stream_is_rejected(tmp_path: Path, data: bytes) -> None:
    with ArrowShard(written(tmp_path, data)) as shard:
        assert shard.num_rows == 0
        assert [item.reason in (Reason.ARCHIVE_CORRUPT, Reason.ARCHIVE_TRUNCATED) for item in shard.rejected] == [True]


def stored(path: Path, table: pa.Table, rows: int, **options: Any) -> str:
    """Write an Arrow stream with so many rows in a record batch."""
    with pa.ipc.new_stream(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return str(path)


def test_columns_with_dictionaries_are_not_read(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array(["x", "y"]).dictionary_encode()})
    with ArrowShard(stored(tmp_path / "a.arrow", table, 2)) as shard:
        assert shard.num_rows == 0
        assert "columns with dictionaries are not read" in shard.rejected[0].detail


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_small_packed_batches(tmp_path: Path, compression: str) -> None:
    table = pa.table({"a": [f"{row} " * 100 for row in range(1000)], "b": range(1000)})
    with ArrowShard(stored(tmp_path / "a.arrow", table, 300, compression=compression)) as shard:
        assert [dict(shard.read(row).fields) for row in (999, 0, 301, 300)] == table.take([999, 0, 301, 300]).to_pylist()


def test_large_packed_batches_are_refused(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.arrow", pa.table({"a": [bytes(2**25), b"x"]}), 1, compression="zstd")
    with ArrowShard(path) as shard:
        assert (
            "a record batch has 33554440 bytes unpacked, and at most 33554432 are unpacked for a row" in shard.rejected[0].detail
        )


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = Path(written(tmp_path, stream(RECORDS)))
    with ArrowShard(str(path)) as shard:
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(BadSampleError) as caught:
            shard.read(49)
        assert caught.value.reason is Reason.ARCHIVE_TRUNCATED


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_damage_or_other_values_but_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    data = bytearray(stream(RECORDS[:20]))
    for place, value in flips:
        data[place % len(data)] = value
    with ArrowShard(written(tmp_path_factory.mktemp("arrow"), bytes(data))) as shard:
        for row in range(min(shard.num_rows, 40)):
            with contextlib.suppress(BadSampleError):
                assert shard.read(row).key == str(row)
