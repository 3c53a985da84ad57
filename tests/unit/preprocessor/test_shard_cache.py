"""The shard cache: bounded, shared by processes, right in spite of evictions, full disks and bad servers."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import metrics
from headrace.errors import DatasetError, UserError
from headrace.spec import SourceSpec
from preprocessor.sources import download, open_shard
from preprocessor.sources.cache import ShardCache
from preprocessor.sources.download import Retry, may_pass, retry_after_s
from preprocessor.sources.parquet import ParquetShard

PATIENCE_S = 30


@dataclass
class Site:
    """What a test server has, how it behaves, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    sizes: bool = True
    failures: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Answers to the next GETs: status and headers."""
    cuts: list[int] = field(default_factory=list)
    """The next GETs break off after so many bytes."""
    gate: threading.Event | None = None
    """GETs wait for it."""
    gets: list[str] = field(default_factory=list)
    """The Range of each GET."""
    heads: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Counts the answers to HEAD."""
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Counts the GETs that have come in."""
    url: str = ""


@pytest.fixture
def site() -> Iterator[Site]:
    """An HTTP server of the standard library, which knows nothing of ranges by itself."""
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)
            site.heads.release()

        def do_GET(self) -> None:
            site.gets.append(self.headers.get("Range", ""))
            site.asked.release()
            if site.gate is not None:
                site.gate.wait(PATIENCE_S)
            if site.failures:
                status, headers = site.failures.pop(0)
                self.send_response(status)
                for name, value in {"Content-Length": "0", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
            else:
                self._answer(body=True)

        def _answer(self, body: bool) -> None:
            data = site.files.get(self.path)
            if data is None:
                self.send_error(404)
                return
            asked = self.headers.get("Range", "") if site.ranges else ""
            etag = f'"{hash(data)}"'
            if asked:
                first, last = asked.removeprefix("bytes=").split("-")
                total, data = len(data), data[int(first) : int(last) + 1]
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(data) - 1}/{total}")
            if site.sizes:
                self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("ETag", etag)
            self.end_headers()
            if body:
                self.wfile.write(data[: site.cuts.pop(0)] if site.cuts else data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def retry(pauses: list[float]) -> Retry:
    """Notes the pauses instead of making them."""
    return Retry(attempts=4, sleep=pauses.append)


@pytest.fixture
def cache(tmp_path: Path, retry: Retry) -> ShardCache:
    return ShardCache(tmp_path / "cache", max_bytes=2500, retry=retry)


def put(name: str, data: bytes) -> str:
    """A remote file that needs no server; the file system notes when it was written."""
    url = f"memory://shards/{name}"
    with fsspec.open(url, "wb") as file:
        file.write(data)
    return url


def held(cache_folder: Path) -> list[int]:
    """Sizes of the shards in the cache."""
    return sorted(path.stat().st_size for path in cache_folder.glob("*.shard"))


class Moved:
    """How far a metric has moved since."""

    def __init__(self, name: str, **labels: str) -> None:
        self._name, self._labels = f"headrace_preprocessor_{name}_total", labels
        self._before = self._value()

    def _value(self) -> float:
        return metrics.PREPROCESSOR.get_sample_value(self._name, self._labels) or 0.0

    def __call__(self) -> float:
        return self._value() - self._before


def test_a_shard_is_fetched_once(site: Site, cache: ShardCache) -> None:
    hits, misses = (Moved("cache_requests", result=result) for result in ("hit", "miss"))
    downloaded = Moved("cache_downloaded_bytes")
    site.files["/a.tar"] = bytes(range(250))
    for _ in range(3):
        assert cache.open(f"{site.url}/a.tar").pread(100, 3) == bytes([100, 101, 102])
    assert len(site.gets) == 1
    assert (hits(), misses(), downloaded()) == (2, 1, 250)
    assert (cache.stats.hits, cache.stats.misses, cache.stats.downloaded_bytes) == (2, 1, 250)


def test_a_new_version_is_another_shard(site: Site, cache: ShardCache) -> None:
    url = f"{site.url}/a.tar"
    for data in (b"one", b"two"):
        site.files["/a.tar"] = data
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
    site.files |= {f"/{name}.tar": bytes(3000) + b"end" for name in "ab"}
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
    site.files |= {"/a.tar": b"a" * 2000, "/b.tar": b"b" * 2000}
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


def test_throttling_waits_as_long_as_the_server_asks(site: Site, cache: ShardCache, pauses: list[float]) -> None:
    throttled, failed = (Moved("download_retries", reason=reason) for reason in ("throttled", "failed"))
    paused = Moved("download_pause_seconds")
    site.files["/a.tar"] = b"data"
    site.failures = [(503, {"Retry-After": "7"}), (429, {}), (500, {"Retry-After": "9999"})]
    assert cache.open(f"{site.url}/a.tar").pread(0, 4) == b"data"
    assert pauses == [7.0, 1.0, 60.0]
    assert (throttled(), failed(), paused()) == (2, 1, 68)


def test_a_broken_transfer_goes_on_where_it_broke(
    site: Site, cache: ShardCache, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "CHUNK_BYTES", 500)
    site.files["/a.tar"] = data = bytes(range(256)) * 8
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
    site.files["/a.tar"] = data = bytes(range(256)) * 8
    assert cache.open(f"{site.url}/a.tar").pread(0, 3000) == data
    site.files["/b.tar"] = data
    site.cuts = [2048, 700]  # the try for a range, then the whole file
    assert cache.open(f"{site.url}/b.tar").pread(2000, 48) == data[2000:]


@pytest.mark.parametrize("size", [2000, 3000])
def test_a_server_that_tells_no_size_is_taken_at_its_word_up_to_the_limit(site: Site, cache: ShardCache, size: int) -> None:
    site.files["/a.tar"] = data = bytes(range(250)) * (size // 250)
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
    site.files["/a.tar"] = b"data"
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


def test_many_threads_fetch_a_shard_once(site: Site, cache: ShardCache) -> None:
    site.files["/a.tar"] = b"data"
    site.gate = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(lambda: cache.open(f"{site.url}/a.tar").pread(0, 4)) for _ in range(8)]
        for _ in range(8):
            assert site.heads.acquire(timeout=PATIENCE_S)
        site.gate.set()
        assert [read.result() for read in reads] == [b"data"] * 8
    assert len(site.gets) == 1


_OPEN = """
import sys
from pathlib import Path
from preprocessor.sources.cache import ShardCache
blob = ShardCache(Path(sys.argv[1]), max_bytes=2500).open(sys.argv[2])
print(blob.pread(0, 4).decode())
"""


@pytest.fixture
def other(cache: ShardCache) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes to end with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(cache: ShardCache, url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _OPEN, str(cache._directory), url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_fetch_a_shard_once(site: Site, cache: ShardCache, other: list[subprocess.Popen[str]]) -> None:
    site.files["/a.tar"] = b"data"
    site.gate = threading.Event()
    other += [start(cache, f"{site.url}/a.tar") for _ in range(2)]
    for _ in other:
        assert site.heads.acquire(timeout=PATIENCE_S)
    site.gate.set()
    assert [process.communicate(timeout=PATIENCE_S)[0] for process in other] == ["data\n"] * 2
    assert len(site.gets) == 1


def test_a_killed_process_leaves_nothing_behind(site: Site, cache: ShardCache, other: list[subprocess.Popen[str]]) -> None:
    site.files |= {"/a.tar": b"a" * 2000, "/b.tar": b"b" * 2000}
    site.gate = threading.Event()
    other.append(start(cache, f"{site.url}/a.tar"))
    assert site.asked.acquire(timeout=PATIENCE_S)
    assert [path.stat().st_size for path in cache._directory.glob("*.part")] == [2000]
    other[0].kill()
    other[0].wait()
    site.gate.set()
    assert cache.open(f"{site.url}/b.tar").pread(0, 1) == b"b"
    assert [path.suffix for path in cache._directory.iterdir() if path.name != "lock"] == [".shard"]
    assert cache.open(f"{site.url}/a.tar").pread(1999, 9) == b"a"


@settings(derandomize=True, deadline=None, max_examples=25)
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
    assert may_pass(error) is passes


def test_a_remote_parquet_file_reads_through_the_cache(site: Site, cache: ShardCache, tmp_path: Path) -> None:
    pq.write_table(pa.table({"caption": [f"c{row}" for row in range(20)]}), tmp_path / "s.parquet", row_group_size=5)
    site.files["/s.parquet"] = (tmp_path / "s.parquet").read_bytes()
    with ParquetShard(f"{site.url}/s.parquet", cache) as shard, ThreadPoolExecutor(4) as pool:
        rows = [19, 0, 7, 12] * 5
        assert [record.fields["caption"] for record in pool.map(shard.read, rows)] == [f"c{row}" for row in rows]
    assert len(site.gets) == 1


def test_an_outage_is_no_damage_of_the_samples(site: Site, cache: ShardCache, tmp_path: Path) -> None:
    """A row group that cannot be read for now must not be quarantined."""
    pq.write_table(pa.table({"caption": ["c"]}), tmp_path / "s.parquet")
    site.files["/s.parquet"] = (tmp_path / "s.parquet").read_bytes()
    with ParquetShard(f"{site.url}/s.parquet", cache) as shard:
        cache.open(put("pushes-it-out.tar", bytes(2400)))
        site.failures = [(503, {})] * 4
        with pytest.raises(DatasetError, match=f"cannot read the shard {site.url}/s.parquet: 503"):
            shard.read(0)
        assert shard.read(0).fields == {"caption": "c"}


def test_remote_shards_have_a_cache_without_being_asked(
    site: Site, source: SourceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from preprocessor.sources import cache as module

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    module.default_cache.cache_clear()
    site.files["/s.jsonl"] = b'{"text": "t"}\n'
    with open_shard(f"{site.url}/s.jsonl", source) as shard:
        assert shard.read(0).fields == {"text": "t"}
    assert held(tmp_path / f"headrace-shards-{os.getuid()}") == [14]
    module.default_cache.cache_clear()
    gc.collect()


def test_a_temporary_directory_that_leads_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from preprocessor.sources import cache as module

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"headrace-shards-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    module.default_cache.cache_clear()
    with pytest.raises(UserError, match="was made by another user; give a shard cache of your own"):
        module.default_cache()
