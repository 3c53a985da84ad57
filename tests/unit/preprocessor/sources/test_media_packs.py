"""Media on a server that rows name are kept in the shard cache, in packs, and within its bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.preprocessor.sources import media_packs, open_shard
from headrace.preprocessor.sources.cache import ShardCache
from headrace.preprocessor.sources.download import Retry
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec
from tests.http_site import Site
from tests.unit.preprocessor.sources.cache_world import held

MEDIA = 20


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_packs, "PACK_BYTES", 1000)


@pytest.fixture
def url(site: Site) -> str:
    """A JSONL file that names media beside it, of 300 bytes each."""
    site.files |= {f"{number}.jpg": bytes([number]) * 300 for number in range(MEDIA)}
    site.files["s.jsonl"] = b"".join(b'{"image": "%d.jpg", "text": "t"}\n' % number for number in range(MEDIA + 1))
    return f"{site.url}/s.jsonl"


def load(url: str, source: SourceSpec, cache: ShardCache) -> list[bytes]:
    with open_shard(url, source, cache) as shard:
        return [shard.read(row).load(f"{row}.jpg") for row in range(MEDIA)]


def test_they_are_read_once(site: Site, url: str, source: SourceSpec, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache")
    expected = [bytes([number]) * 300 for number in range(MEDIA)]
    assert load(url, source, cache) == expected
    assert held(tmp_path / "cache") == sorted([*[4 * 300] * (MEDIA // 4), len(site.files["s.jsonl"])])
    before = len(site.gets)
    assert load(url, source, cache) == expected
    assert len(site.gets) == before


def test_of_a_cache_that_is_too_small_they_are_read_again(site: Site, url: str, source: SourceSpec, tmp_path: Path) -> None:
    expected = [bytes([number]) * 300 for number in range(MEDIA)]
    cache = ShardCache(tmp_path / "cache", max_bytes=2500)
    for _ in range(3):
        assert load(url, source, cache) == expected
        assert sum(held(tmp_path / "cache")) <= 2500
    none = ShardCache(tmp_path / "none", max_bytes=10)
    assert load(url, source, none) == load(url, source, none) == expected


def test_what_is_not_there_is_told_each_time(site: Site, url: str, source: SourceSpec, tmp_path: Path, retry: Retry) -> None:
    with open_shard(url, source, ShardCache(tmp_path / "cache", retry=retry)) as shard:
        for _ in range(2):
            with pytest.raises(BadSampleError) as caught:
                shard.read(MEDIA).load(f"{MEDIA}.jpg")
            assert caught.value.reason is Reason.MISSING_MEDIA
        site.files[f"{MEDIA}.jpg"] = b"late"
        assert shard.read(MEDIA).load(f"{MEDIA}.jpg") == b"late"


def test_another_process_reads_them_from_their_server(site: Site, url: str, source: SourceSpec, tmp_path: Path) -> None:
    load(url, source, ShardCache(tmp_path / "cache"))
    site.files["3.jpg"] = b"other"
    assert load(url, source, ShardCache(tmp_path / "cache"))[3] == b"other"
