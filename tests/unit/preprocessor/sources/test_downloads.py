"""Shards come down whole in spite of throttling, broken connections, and servers that know no ranges or sizes."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import DatasetError
from headrace.preprocessor.sources import download
from headrace.preprocessor.sources.cache import ShardCache
from headrace.preprocessor.sources.download import is_retryable, retry_after_s
from headrace.preprocessor.sources.parquet import ParquetShard
from tests.http_site import Site
from tests.unit.preprocessor.sources.cache_world import Moved, held, put


def test_throttling_waits_as_long_as_the_server_asks(site: Site, cache: ShardCache, pauses: list[float]) -> None:
    throttled, failed = (Moved("download_retries", reason=reason) for reason in ("throttled", "failed"))
    paused = Moved("download_pause_seconds")
    site.files["a.tar"] = b"data"
    site.failures = [(503, {"Retry-After": "7"}), (429, {}), (500, {"Retry-After": "9999"})]
    assert cache.open(f"{site.url}/a.tar").pread(0, 4) == b"data"
    assert pauses == [7.0, 1.0, 60.0]
    assert (throttled(), failed(), paused()) == (2, 1, 68)


def test_a_broken_transfer_goes_on_where_it_broke(
    site: Site, cache: ShardCache, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 500)
    site.files["a.tar"] = data = bytes(range(256)) * 8
    site.cuts = [500, 500, 100]
    assert cache.open(f"{site.url}/a.tar").pread(0, 3000) == data
    assert pauses == [0.5]
    assert site.gets == [
        "bytes=0-499",
        "bytes=500-999",
        "bytes=1000-1499",
        "bytes=1000-1499",
        "bytes=1500-1999",
        "bytes=2000-2047",
    ]


def test_a_server_without_ranges_is_asked_for_the_whole(site: Site, cache: ShardCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 500)
    site.ranges = False
    site.files["a.tar"] = data = bytes(range(256)) * 8
    assert cache.open(f"{site.url}/a.tar").pread(0, 3000) == data
    site.files["b.tar"] = data
    site.cuts = [2048, 700]  # the try for a range, then the whole file
    assert cache.open(f"{site.url}/b.tar").pread(2000, 48) == data[2000:]


@pytest.mark.parametrize("size", [2000, 3000])
def test_a_server_that_tells_no_size_is_taken_at_its_word_up_to_the_limit(site: Site, cache: ShardCache, size: int) -> None:
    site.files["a.tar"] = data = bytes(range(250)) * (size // 250)
    site.sizes = False
    url = f"{site.url}/a.tar"
    if size > 2500:
        with pytest.raises(DatasetError, match=f"cannot read the shard {url}: Cannot seek"):
            cache.open(url)
        assert os.listdir(cache._directory) == []
    else:
        assert cache.open(url).pread(0, 3000) == data
        assert held(cache._directory) == [2000]


def test_a_server_that_keeps_failing_is_named(site: Site, cache: ShardCache, pauses: list[float]) -> None:
    url = f"{site.url}/a.tar"
    site.files["a.tar"] = b"data"
    site.failures = [(503, {})] * 4
    with pytest.raises(DatasetError, match=f"cannot read the shard {url}: 503"):
        cache.open(url)
    assert pauses == [0.5, 1.0, 2.0]
    assert os.listdir(cache._directory) == ["lock"]


def test_what_is_not_there_is_not_asked_for_twice(site: Site, cache: ShardCache, pauses: list[float]) -> None:
    with pytest.raises(DatasetError, match=f"cannot read the shard {site.url}/none.tar"):
        cache.open(f"{site.url}/none.tar")
    with pytest.raises(DatasetError, match=r"cannot read the shard memory://shards/none\.tar"):
        cache.open("memory://shards/none.tar")
    assert pauses == []


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), ("Wed, 21 Oct 2015 07:28:10 GMT", 10.0), ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0), ("soon", None)],
)
def test_retry_after_is_a_number_or_a_date(value: str, seconds: float | None) -> None:
    error = OSError("slow down")
    error.__cause__ = client_error(503, {"retry-after": value})
    assert retry_after_s(error, now_s=1445412480.0) == seconds


class ClientError(Exception):
    """Looks like botocore's."""

    response: dict[str, object]


def client_error(status: int, headers: dict[str, str]) -> ClientError:
    error = ClientError()
    error.response = {"ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers}}
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (client_error(503, {}), True),
        (client_error(429, {}), True),
        (client_error(403, {}), False),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (ValueError(), False),
        (DatasetError("damaged"), False),
    ],
)
def test_what_may_pass(error: Exception, passes: bool) -> None:
    assert is_retryable(error) is passes


def test_an_outage_is_no_damage_of_the_samples(site: Site, cache: ShardCache, tmp_path: Path) -> None:
    """A row group that cannot be read for now must not be quarantined."""
    pq.write_table(pa.table({"caption": ["c"]}), tmp_path / "s.parquet")
    site.files["s.parquet"] = (tmp_path / "s.parquet").read_bytes()
    with ParquetShard(f"{site.url}/s.parquet", cache) as shard:
        cache.open(put("pushes-it-out.tar", bytes(2400)))
        site.failures = [(503, {})] * 4
        with pytest.raises(DatasetError, match=f"cannot read the shard {site.url}/s.parquet: 503"):
            shard.read(0)
        assert shard.read(0).fields == {"caption": "c"}
