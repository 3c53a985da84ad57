"""Row groups unpacked into the shard cache: the same records, whoever reads them and whatever becomes of the cache."""

from __future__ import annotations

import datetime
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor.sources import open_shard, parquet, parquet_rows
from headrace.preprocessor.sources.blob import Blob, Fill
from headrace.preprocessor.sources.cache import ShardCache, default_cache
from headrace.preprocessor.sources.parquet import ParquetShard
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec
from tests.examples import with_examples
from tests.http_site import PATIENCE_S
from tests.unit.preprocessor.sources.test_shard_cache import files_of_at_most

MIB = 2**20
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(autouse=True)
def small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of some kilobytes are unpacked as files of some megabytes are."""
    monkeypatch.setattr(parquet, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(parquet, "UNIT_BYTES", 4 << 10)
    monkeypatch.setattr(parquet_rows, "MESSAGE_BYTES", 1 << 10)


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "cache")


class Counting(ShardCache):
    """Counts how often something was made for it."""

    made = 0

    def make(self, key: str, url: str, fill: Fill) -> Blob | None:
        def counted(*arguments: Any) -> None:
            self.made += 1
            fill(*arguments)

        return super().make(key, url, counted)


def records(path: Path, cache: ShardCache | None, rows: Sequence[int] | None = None) -> list[Any]:
    with ParquetShard(str(path), cache) as shard:
        return [dict(shard.read(row).fields) for row in (range(shard.num_rows) if rows is None else rows)]


def pictures(path: Path, num_rows: int = 60, row_group_size: int = 10, **options: Any) -> list[Any]:
    """A file of pictures of different sizes, and its rows."""
    rows = [
        {"image": {"bytes": bytes([row]) * (37 * row), "path": f"{row}.jpg"}, "caption": f"c{row}"} for row in range(num_rows)
    ]
    schema = pa.schema([("image", IMAGE), ("caption", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=row_group_size, **options)
    return rows


def column(kind: pa.DataType, values: list[Any]) -> pa.Table:
    return pa.table({"x": pa.array(values * 20, kind), "row": range(len(values) * 20)})


LAYOUTS = {
    "struct": column(IMAGE, [{"bytes": b"a" * 500, "path": None}, None, {"bytes": None, "path": "p"}]),
    "list of structs": column(pa.list_(IMAGE), [[{"bytes": b"a", "path": "b"}] * 3, [], None, [None]]),
    "conversation": column(
        pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(pa.struct([("type", pa.string())])))])),
        [[{"role": "user", "content": [{"type": "image"}, {"type": None}]}, {"role": None, "content": None}]],
    ),
    "lists of lists": column(pa.list_(pa.list_(pa.int32())), [[[1, 2], [], None], None, [[3]]]),
    "large": column(pa.large_list(pa.large_string()), [["é" * 700, None], []]),
    "large binary": column(pa.large_binary(), [b"\xff" * 3000, b"", None]),
    "dictionary": column(pa.dictionary(pa.int32(), pa.string()), ["cat", "dog", None]),
    "dictionary in a list": column(pa.list_(pa.dictionary(pa.int32(), pa.string())), [["cat", "dog"], ["cat"], None]),
    "dictionary in a struct": column(pa.struct([("kind", pa.dictionary(pa.int8(), pa.string()))]), [{"kind": "cat"}, None]),
    "fixed size": column(pa.list_(pa.float32(), 3), [[1.5, 2.5, None], None]),
    "map": column(pa.map_(pa.string(), pa.int64()), [[("a", 1), ("b", None)], []]),
    "numbers": column(pa.decimal128(9, 2), [1, None]),
    "times": column(pa.timestamp("us", "UTC"), [datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), None]),
    "booleans and nothing": pa.table({"x": [True, None] * 30, "y": pa.nulls(60)}),
    "views": column(pa.string_view(), ["short", "a string that is too long to be inside of a view", None]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_are_those_that_decoding_in_memory_gives(layout: str, tmp_path: Path, cache: ShardCache) -> None:
    path = tmp_path / "s.parquet"
    for options in ({}, {"use_dictionary": False, "compression": "zstd"}, {"data_page_version": "2.0", "store_schema": False}):
        pq.write_table(LAYOUTS[layout], path, row_group_size=16, **options)
        assert records(path, cache) == records(path, None) == pq.read_table(path).to_pylist()
    assert list((tmp_path / "cache").glob("*.shard"))


_TEXT = st.none() | st.text(max_size=40)
_ROW = st.fixed_dictionaries(
    {
        "image": st.none() | st.fixed_dictionaries({"bytes": st.none() | st.binary(max_size=3000), "path": _TEXT}),
        "turns": st.none() | st.lists(st.none() | st.fixed_dictionaries({"from": _TEXT, "value": _TEXT}), max_size=3),
        "score": st.none() | st.integers(-(2**63), 2**63 - 1),
    }
)
_SCHEMA = pa.schema(
    [("image", IMAGE), ("turns", pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))), ("score", pa.int64())]
)


@with_examples(25)
@given(st.lists(_ROW, min_size=1, max_size=30), st.integers(1, 31), st.randoms(use_true_random=False))
def test_any_rows_come_back_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], group: int, order: random.Random
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), folder / "s.parquet", row_group_size=group)
    wanted = order.choices(range(len(rows)), k=2 * len(rows))
    assert records(folder / "s.parquet", ShardCache(folder / "cache"), wanted) == [rows[row] for row in wanted]


def test_many_threads_read_while_files_are_evicted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_warned", threading.Event())
    expected = pictures(tmp_path / "s.parquet")
    cache = Counting(tmp_path / "cache", max_bytes=40 << 10)  # of about 70 KiB
    rows = random.Random(0).choices(range(60), k=400)
    with ParquetShard(str(tmp_path / "s.parquet"), cache) as shard, ThreadPoolExecutor(8) as pool:
        assert [record.fields for record in pool.map(shard.read, rows)] == [expected[row] for row in rows]
    assert cache.stats.evicted > 0
    (warning,) = [message for message in caplog.messages if message.startswith("unpacking Parquet again")]
    assert "raise --cache-gib" in warning
    assert sum(file.stat().st_size for file in (tmp_path / "cache").iterdir()) <= 40 << 10


def test_a_group_is_unpacked_once_for_many_threads_and_a_restart(tmp_path: Path) -> None:
    expected = pictures(tmp_path / "s.parquet", row_group_size=60)
    first, second = Counting(tmp_path / "cache"), Counting(tmp_path / "cache")
    with ParquetShard(str(tmp_path / "s.parquet"), first) as shard, ThreadPoolExecutor(8) as pool:
        assert [record.fields for record in pool.map(shard.read, range(60))] == expected
    assert records(tmp_path / "s.parquet", second) == expected
    assert (first.made, second.made) == (1, 0)


_READ_ALL = """
import sys
from pathlib import Path
from headrace.preprocessor.sources import parquet
from tests.unit.preprocessor.sources.test_parquet_rows import Counting, records
parquet.IN_MEMORY_BYTES, parquet.UNIT_BYTES = 0, 4096
cache = Counting(Path(sys.argv[2]))
sys.stdin.readline()
print(hash(str(records(Path(sys.argv[1]), cache))), cache.made)
"""


def test_two_processes_unpack_a_group_once(tmp_path: Path, cache: ShardCache) -> None:
    expected = pictures(tmp_path / "s.parquet", num_rows=200, row_group_size=10)
    command = [sys.executable, "-c", _READ_ALL, str(tmp_path / "s.parquet"), str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)
    ]
    outputs = [process.communicate("go\n", timeout=PATIENCE_S)[0].split() for process in processes]
    assert outputs[0][0] == outputs[1][0]
    assert records(tmp_path / "s.parquet", cache) == expected
    assert sum(int(made) for _, made in outputs) == len(list((tmp_path / "cache").glob("*.shard")))


def test_damage_in_a_group_refuses_its_rows_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    expected = pictures(path, use_dictionary=False, compression="none", write_page_checksum=False)
    chunk = pq.ParquetFile(path).metadata.row_group(2).column(2)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset : chunk.data_page_offset + 30] = b"\xff" * 30
    path.write_bytes(data)
    for cache in (None, Counting(tmp_path / "cache"), Counting(tmp_path / "cache")):
        with ParquetShard(str(path), cache) as shard:
            for row in range(60):
                if 20 <= row < 30:
                    with pytest.raises(BadSampleError, match="row group 2 does not decode") as caught:
                        shard.read(row)
                    assert caught.value.reason is Reason.ARCHIVE_CORRUPT
                else:
                    assert shard.read(row).fields == expected[row]
    assert isinstance(cache, Counting)
    assert cache.made == 0, "the damage is written down as well"


def test_a_group_larger_than_the_cache_is_decoded_in_memory_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = pictures(tmp_path / "s.parquet", row_group_size=60)
    cache = Counting(tmp_path / "cache", max_bytes=16 << 10)
    (tmp_path / "cache" / "other.shard").write_bytes(bytes(1000))
    with caplog.at_level(logging.WARNING):
        assert records(tmp_path / "s.parquet", cache) == expected
    assert len(caplog.messages) == 1
    assert "s.parquet" in caplog.messages[0]
    assert "raise --cache-gib, or name a --cache on a disk with more room" in caplog.messages[0]
    assert cache.made == 1, "asked once, not for every row"
    assert [file.name for file in (tmp_path / "cache").glob("*.*")] == ["other.shard"], "nothing is evicted in vain"


def test_a_full_disk_does_not_fail_the_job(tmp_path: Path, cache: ShardCache, caplog: pytest.LogCaptureFixture) -> None:
    expected = pictures(tmp_path / "s.parquet", row_group_size=60)
    with caplog.at_level(logging.WARNING), files_of_at_most(8 << 10):
        assert records(tmp_path / "s.parquet", cache) == expected
    assert len(caplog.messages) == 1
    assert "File too large" in caplog.messages[0]
    assert list((tmp_path / "cache").glob("*.*")) == []


_ON_A_SMALL_DISK = """
import logging, sys
from pathlib import Path
from headrace.preprocessor.sources import parquet
from headrace.preprocessor.sources.cache import ShardCache
from tests.unit.preprocessor.sources.test_parquet_rows import pictures, records
parquet.IN_MEMORY_BYTES, parquet.UNIT_BYTES = 0, 4096
expected, cache = pictures(Path(sys.argv[1]) / "s.parquet"), ShardCache(Path(sys.argv[2]))
assert records(Path(sys.argv[1]) / "s.parquet", cache) == expected
print(cache.stats.evicted > 0)
"""


@pytest.mark.slow
def test_a_disk_smaller_than_the_cache_may_be_is_filled_again_and_again(tmp_path: Path) -> None:
    """The disk has 40 KiB, of about 70 that are unpacked; in a name space of its own, where everybody may mount."""
    (tmp_path / "disk").mkdir()
    command = 'mount -t tmpfs -o size=40k tmpfs "$2" || exit 77; exec "$0" -c "$3" "$1" "$2"'
    arguments = ["sh", "-c", command, sys.executable, str(tmp_path), str(tmp_path / "disk"), _ON_A_SMALL_DISK]
    try:
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"nothing may be mounted here: {done.stderr.strip()}")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_file_that_was_written_again_is_unpacked_again(tmp_path: Path, cache: ShardCache) -> None:
    path = tmp_path / "s.parquet"
    for caption in ("one", "two"):
        pq.write_table(pa.table({"caption": [caption] * 10}), path)
        assert records(path, cache)[0] == {"caption": caption}
        time.sleep(0.01)  # the clock of the file system ticks some hundred times a second


def test_local_parquet_has_a_cache_without_being_asked(
    tmp_path: Path, source: SourceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    default_cache.cache_clear()
    expected = pictures(tmp_path / "s.parquet")
    with open_shard(str(tmp_path / "s.parquet"), source) as shard:
        assert shard.read(7).fields == expected[7]
    assert list((tmp_path / f"headrace-shards-{os.getuid()}").glob("*.shard"))
    default_cache.cache_clear()


def test_a_value_that_very_many_rows_share_is_not_written_for_each(
    tmp_path: Path, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.preprocessor.sources.parquet_bounds.USUAL_BYTES", MIB)
    flat = pa.table({"image": pa.array([bytes(50_000)] * 400, pa.binary())})
    lists = pa.table({"images": pa.array([[bytes(50_000)] * 2] * 200, pa.list_(pa.binary()))})
    for name, table in (("flat", flat), ("lists", lists)):
        pq.write_table(table, tmp_path / f"{name}.parquet")
        assert records(tmp_path / f"{name}.parquet", cache) == table.to_pylist()
    assert all(file.stat().st_size < MIB for file in (tmp_path / "cache").iterdir())


_PEAK = """
import sys
from pathlib import Path
import pyarrow as pa
from headrace.preprocessor.sources.cache import ShardCache
from headrace.preprocessor.sources.parquet import ParquetShard
with ParquetShard(sys.argv[1], ShardCache(Path(sys.argv[2]))) as shard:
    assert len(shard.read(shard.num_rows - 1).fields["image"]) == 20_000
print(pa.default_memory_pool().max_memory())
"""


def test_memory_is_that_of_some_pages_not_of_the_row_group(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    noise = random.Random(0)
    table = pa.table({"image": [noise.randbytes(20_000) for _ in range(2000)]})  # 40 MB
    pq.write_table(table, path, use_content_defined_chunking=True)
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    command = [sys.executable, "-c", _PEAK, str(path), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert int(done.stdout) < 16 * MIB
