"""One shard cache for many threads and processes: a shard comes once, and who is killed leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.preprocessor.sources.cache import ShardCache
from tests.http_site import PATIENCE_S, Site


def test_many_threads_fetch_a_shard_once(site: Site, cache: ShardCache) -> None:
    site.files["a.tar"] = b"data"
    site.gate = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(lambda: cache.open(f"{site.url}/a.tar").pread(0, 4)) for _ in range(8)]
        for _ in range(8):
            assert site.described.acquire(timeout=PATIENCE_S)
        site.gate.set()
        assert [read.result() for read in reads] == [b"data"] * 8
    assert len(site.gets) == 1


_OPEN = """
import sys
from pathlib import Path
from headrace.preprocessor.sources.cache import ShardCache
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
    site.files["a.tar"] = b"data"
    site.gate = threading.Event()
    other += [start(cache, f"{site.url}/a.tar") for _ in range(2)]
    for _ in other:
        assert site.described.acquire(timeout=PATIENCE_S)
    site.gate.set()
    assert [process.communicate(timeout=PATIENCE_S)[0] for process in other] == ["data\n"] * 2
    assert len(site.gets) == 1


def test_a_killed_process_leaves_nothing_behind(site: Site, cache: ShardCache, other: list[subprocess.Popen[str]]) -> None:
    site.files |= {"a.tar": b"a" * 2000, "b.tar": b"b" * 2000}
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
