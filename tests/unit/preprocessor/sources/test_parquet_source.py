"""Parquet shards: row groups, cells as Python values, the cache's bound."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.preprocessor.sources.parquet import ParquetShard
from headrace.preprocessor.sources.parquet_memory import RowGroupCache
from headrace.quarantine import BadSampleError, Reason


@pytest.fixture
def twenty_rows(tmp_path: Path) -> Path:
    images = [{"bytes": bytes([row]) * 100, "path": f"{row}.jpg"} for row in range(20)]
    path = tmp_path / "s.parquet"
    pq.write_table(pa.table({"image": images, "caption": [f"c{row}" for row in range(20)]}), path, row_group_size=6)
    return path


def test_rows_in_any_order_from_many_threads(twenty_rows: Path) -> None:
    with fsspec.open("memory://bucket/s.parquet", "wb") as file:
        file.write(twenty_rows.read_bytes())
    rows = [19, 0, 5, 6, 12, 17, 18, 11] * 5
    for url in (str(twenty_rows), "memory://bucket/s.parquet"):
        with ParquetShard(url) as shard, ThreadPoolExecutor(4) as pool:
            assert shard.num_rows == 20
            assert [shard.key(row) for row in (0, 19)] == ["0", "19"]
            for row, record in zip(rows, pool.map(shard.read, rows), strict=True):
                assert record.fields["caption"] == f"c{row}"
                assert record.fields["image"]["bytes"] == bytes([row]) * 100


def test_damaged_row_group_leaves_the_others(twenty_rows: Path, tmp_path: Path) -> None:
    group = pq.ParquetFile(twenty_rows).metadata.row_group(1)
    data = bytearray(twenty_rows.read_bytes())
    start = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
    data[start : start + 40] = b"\xff" * 40
    path = tmp_path / "bad.parquet"
    path.write_bytes(data)
    with ParquetShard(str(path)) as shard:
        assert shard.num_rows == 20
        assert shard.read(0).fields["caption"] == "c0"
        assert shard.read(19).fields["caption"] == "c19"
        with pytest.raises(BadSampleError) as caught:
            shard.read(7)
        assert caught.value.reason is Reason.ARCHIVE_CORRUPT


def test_damaged_footer(twenty_rows: Path, tmp_path: Path) -> None:
    data = bytearray(twenty_rows.read_bytes())
    data[-60:-8] = b"\xff" * 52
    path = tmp_path / "bad.parquet"
    path.write_bytes(data)
    with ParquetShard(str(path)) as shard:
        assert shard.num_rows == 0
        assert [(item.name, item.reason) for item in shard.rejected] == [("", Reason.ARCHIVE_CORRUPT)]


def test_string_that_is_not_utf8(tmp_path: Path) -> None:
    text = pa.StringArray.from_buffers(1, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe"))
    path = tmp_path / "s.parquet"
    pq.write_table(pa.table({"caption": text}), path)
    with ParquetShard(str(path)) as shard, pytest.raises(BadSampleError) as caught:
        shard.read(0)
    assert caught.value.reason is Reason.ENCODING_ERROR


def table_of(num_bytes: int) -> Callable[[], pa.Table]:
    return lambda: pa.table({"x": pa.array([bytes(num_bytes)])})


def never() -> pa.Table:
    raise AssertionError("decoded a table that the cache holds")


def test_cache_keeps_what_fits_and_drops_the_oldest() -> None:
    cache = RowGroupCache(max_bytes=2500)
    cache.get((0, 0), table_of(1000))
    cache.get((0, 1), table_of(1000))
    cache.get((0, 0), never)
    cache.get((0, 2), table_of(1000))
    cache.get((0, 0), never)
    cache.get((0, 2), never)
    with pytest.raises(AssertionError, match="decoded"):
        cache.get((0, 1), never)


def test_cache_holds_one_table_that_is_too_big_and_forgets_closed_shards() -> None:
    cache = RowGroupCache(max_bytes=10)
    cache.get((0, 0), table_of(1000))
    cache.get((0, 0), never)
    cache.drop(0)
    with pytest.raises(AssertionError, match="decoded"):
        cache.get((0, 0), never)
