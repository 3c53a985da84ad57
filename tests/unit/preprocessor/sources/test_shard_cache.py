"""The shard cache: bounded, and right in spite of evictions and full disks."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DatasetError, UserError
from headrace.preprocessor.sources import open_shard
from headrace.preprocessor.sources.cache import ShardCache, default_cache
from headrace.preprocessor.sources.parquet import ParquetShard
from headrace.source_spec import SourceSpec
from tests.examples import with_examples
from tests.http_site import Site
from tests.unit.preprocessor.sources.cache_world import Moved, held, put


def test_a_shard_is_fetched_once(site: Site, cache: ShardCache) -> None:
    hits, misses = (Moved("cache_requests", result=result) for result in ("hit", "miss"))
    downloaded = Moved("cache_downloaded_bytes")
    site.files["a.tar"] = bytes(range(250))
    for _ in range(3):
        assert cache.open(f"{site.url}/a.tar").pread(100, 3) == bytes([100, 101, 102])
    assert len(site.gets) == 1
    assert (hits(), misses(), downloaded()) == (2, 1, 250)
    assert (cache.stats.hits, cache.stats.misses, cache.stats.downloaded_bytes) == (2, 1, 250)


def test_a_new_version_is_another_shard(site: Site, cache: ShardCache) -> None:
    url = f"{site.url}/a.tar"
    for data in (b"one", b"two"):
        site.files["a.tar"] = data
        assert cache.open(url).pread(0, 3) == data
    assert held(cache._directory) == [3, 3]


def test_the_least_recently_used_goes_first(cache: ShardCache) -> None:
    evictions = Moved("cache_evictions")
    urls = [put(f"lru-{number}.tar", bytes([number]) * 1000) for number in range(3)]
    for number, url in enumerate(urls[:2]):
        cache.open(url)
        newest = max((cache._directory).glob("*.shard"), key=lambda path: path.stat().st_ctime_ns)
        os.utime(newest, (number, number))
    cache.open(urls[0])  # so that the second is the oldest
    cache.open(urls[2])
    assert cache.stats.evicted == evictions() == 1
    cache.open(urls[0])
    assert cache.stats.hits == 2
    cache.open(urls[1])
    assert cache.stats.misses == 4


def test_an_evicted_shard_is_brought_back_when_it_is_read(cache: ShardCache, tmp_path: Path) -> None:
    blobs = [cache.open(put(f"back-{number}.tar", bytes([number]) * 1000)) for number in range(4)]
    for _ in range(2):
        for number, blob in enumerate(blobs):
            assert blob.size == 1000
            assert blob.pread(990, 20) == bytes([number]) * 10
    assert sum(held(cache._directory)) <= 2500
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    assert [name for name in names if str(tmp_path) in name and name.endswith("(deleted)")] == []


def test_a_shard_that_changed_under_its_index_is_told(cache: ShardCache) -> None:
    blob = cache.open(put("changing.tar", b"1" * 2000))
    cache.open(put("other.tar", b"2" * 2000))
    put("changing.tar", b"3" * 2000)
    with pytest.raises(DatasetError, match=r"memory://shards/changing.tar has changed since it was indexed"):
        blob.pread(0, 1)


def test_a_closed_shard_is_not_read(cache: ShardCache) -> None:
    blob = cache.open(put("closed.tar", b"1"))
    blob.close()
    with pytest.raises(ValueError, match="closed"):
        blob.pread(0, 1)


def test_a_shard_larger_than_the_cache_is_read_without_it(
    cache: ShardCache, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    bypasses = Moved("cache_bypasses", reason="no_room")
    site.files |= {f"{name}.tar": bytes(3000) + b"end" for name in "ab"}
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            assert cache.open(f"{site.url}/{name}.tar").pread(2999, 100) == b"\0end"
    assert [record.message.split(" cache=")[0] for record in caplog.records] == ["reading without the shard cache"]
    assert cache.stats.uncached == bypasses() == 2
    assert held(cache._directory) == []


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write more than so many bytes into a file, like a disk that is full."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_disk_that_fails_does_not_fail_the_job(site: Site, cache: ShardCache, caplog: pytest.LogCaptureFixture) -> None:
    bypasses = Moved("cache_bypasses", reason="disk")
    site.files |= {"a.tar": b"a" * 2000, "b.tar": b"b" * 2000}
    with caplog.at_level(logging.WARNING), files_of_at_most(1000):
        assert cache.open(f"{site.url}/a.tar").pread(1999, 1) == b"a"
        assert cache.open(f"{site.url}/b.tar").pread(1999, 1) == b"b"
    assert len(caplog.records) == 1
    assert "File too large" in caplog.records[0].message
    assert bypasses() == 2
    assert list(cache._directory.glob("*.part")) == []
    assert cache.open(f"{site.url}/a.tar").pread(1999, 1) == b"a"
    assert held(cache._directory) == [2000]


def test_a_directory_that_goes_away_does_not_fail_the_job(cache: ShardCache) -> None:
    cache._directory.rmdir()
    assert cache.open(put("gone.tar", b"here")).pread(0, 4) == b"here"
    assert cache.stats.uncached == 1


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot use .*file/cache as the shard cache"):
        ShardCache(tmp_path / "file" / "cache")


@with_examples(25)
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=25))
def test_never_more_bytes_than_allowed_and_never_wrong_ones(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    caches = [ShardCache(folder, max_bytes=1000), ShardCache(folder, max_bytes=1000)]
    files = [bytes([number + 1]) * (170 * number) for number in range(8)]
    urls = [put(f"property-{number}.tar", data) for number, data in enumerate(files)]
    blobs = []
    for number, second in steps:
        blobs.append((number, caches[second].open(urls[number])))
        for earlier, blob in blobs[-4:]:
            assert blob.pread(0, 2000) == files[earlier]
            assert sum(path.stat().st_size for path in folder.iterdir()) <= 1000


def test_a_remote_parquet_file_reads_through_the_cache(site: Site, cache: ShardCache, tmp_path: Path) -> None:
    pq.write_table(pa.table({"caption": [f"c{row}" for row in range(20)]}), tmp_path / "s.parquet", row_group_size=5)
    site.files["s.parquet"] = (tmp_path / "s.parquet").read_bytes()
    with ParquetShard(f"{site.url}/s.parquet", cache) as shard, ThreadPoolExecutor(4) as pool:
        rows = [19, 0, 7, 12] * 5
        assert [record.fields["caption"] for record in pool.map(shard.read, rows)] == [f"c{row}" for row in rows]
    assert len(site.gets) == 1


def test_remote_shards_have_a_cache_without_being_asked(
    site: Site, source: SourceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    default_cache.cache_clear()
    site.files["s.jsonl"] = b'{"text": "t"}\n'
    with open_shard(f"{site.url}/s.jsonl", source) as shard:
        assert shard.read(0).fields == {"text": "t"}
    assert held(tmp_path / f"headrace-shards-{os.getuid()}") == [14]
    default_cache.cache_clear()
    gc.collect()


def test_a_temporary_directory_that_leads_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"headrace-shards-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    default_cache.cache_clear()
    with pytest.raises(UserError, match="was made by another user; give a shard cache of your own"):
        default_cache()
