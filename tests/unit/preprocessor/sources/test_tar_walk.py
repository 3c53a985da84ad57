"""A remote tar is walked from several places at once, to the samples that reading it from its start gives; and walked once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from headrace.preprocessor.sources import open_shard
from headrace.preprocessor.sources.cache import ShardCache
from headrace.preprocessor.sources.download import Retry
from headrace.source_spec import SourceSpec
from tests.examples import with_examples
from tests.http_site import Site, running_site
from tests.unit.preprocessor.sources.cache_world import held
from tests.unit.preprocessor.sources.remote_world import by_ranges_alone, everything, read_both, tar_of

SAMPLES, BYTES = 60, 100_000


@pytest.fixture
def cache(tmp_path: Path, retry: Retry) -> ShardCache:
    return ShardCache(tmp_path / "cache", retry=retry)


def test_a_walk_fetches_headers_and_few_bytes_beside_them(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    site.files["s.tar"] = data = tar_of(SAMPLES, BYTES)
    with open_shard(f"{site.url}/s.tar", source, cache) as shard:
        assert shard.num_rows == SAMPLES
        assert site.sent["s.tar"] < len(data) / 10
        before = len(site.gets), site.sent["s.tar"]
        shard.prefetch([17])
        assert shard.read(17).fields == {"txt": "Caption 17."}
        assert len(shard.read(17).load("jpg")) > BYTES / 2
        assert len(site.gets) == before[0] + 1, "all members of a sample together"
        assert site.sent["s.tar"] - before[1] < 2 * BYTES


def test_it_is_walked_once_for_all_processes(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    site.files["s.tar"] = tar_of(SAMPLES, BYTES)
    with open_shard(f"{site.url}/s.tar", source, cache) as shard:
        keys = [shard.key(row) for row in range(shard.num_rows)]
    (kept,) = held(cache._directory)
    assert kept < 300 * SAMPLES
    before = len(site.gets)
    with open_shard(f"{site.url}/s.tar", source, ShardCache(cache._directory)) as again:
        assert [again.key(row) for row in range(again.num_rows)] == keys
    assert len(site.gets) <= before + 1, "its first bytes tell whether it is packed"


def test_another_version_is_walked_anew(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    for num_samples in (SAMPLES, SAMPLES - 1):
        site.files["s.tar"] = tar_of(num_samples, BYTES)
        with open_shard(f"{site.url}/s.tar", source, cache) as shard:
            assert shard.num_rows == num_samples


def test_what_was_kept_and_is_damaged_is_walked_anew(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    site.files["s.tar"] = tar_of(SAMPLES, BYTES)
    with open_shard(f"{site.url}/s.tar", source, cache):
        (kept,) = cache._directory.glob("*.shard")
    kept.write_bytes(kept.read_bytes()[:-100] + bytes(100))
    with open_shard(f"{site.url}/s.tar", source, ShardCache(cache._directory)) as shard:
        assert shard.num_rows == SAMPLES


@pytest.mark.parametrize(("samples", "num_bytes"), [(400, 20_000), (300, 2_000)])
def test_many_members_or_small_ones_are_fetched_whole(
    site: Site, cache: ShardCache, source: SourceSpec, samples: int, num_bytes: int
) -> None:
    site.files["s.tar"] = data = tar_of(samples, num_bytes)
    with open_shard(f"{site.url}/s.tar", source, cache) as shard:
        assert shard.num_rows == samples
    assert held(cache._directory) == [len(data)]
    assert site.sent["s.tar"] < len(data) + 300_000


def test_a_tar_inside_of_a_tar_leads_nobody_astray(
    site: Site, cache: ShardCache, source: SourceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose headers look like those of the archive, where a walk begins in its middle."""
    by_ranges_alone(monkeypatch)
    outer = bytearray(tar_of(12, 60_000))
    inner = tar_of(30, 300)
    place = outer.index(b"ustar", len(outer) // 2) - 257 + 512
    outer[place + 1024 : place + 1024 + min(len(inner), 20_000)] = inner[:20_000]
    (tmp_path / "s.tar").write_bytes(outer)
    local, remote = read_both(tmp_path / "s.tar", site, cache, source)
    assert remote == local


@pytest.mark.slow
@with_examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.sampled_from([100, 700, 5_000]),
    flips=st.lists(st.floats(0, 0.999), max_size=4),
    zeros=st.lists(st.floats(0, 0.999), max_size=2),
    cut=st.floats(0.2, 1.0),
)
def test_damaged_archives_have_the_same_samples_and_the_same_damage(
    source: SourceSpec, monkeypatch: pytest.MonkeyPatch, size: int, flips: list[float], zeros: list[float], cut: float
) -> None:
    by_ranges_alone(monkeypatch)
    data = bytearray(tar_of(25, size))
    for place in flips:
        header = int(place * len(data)) // 512 * 512
        data[header + 150] ^= 0x55  # where a header's checksum is, if it is one
    for place in zeros:
        begin = int(place * len(data)) // 512 * 512
        data[begin : begin + 512] = bytes(min(512, len(data) - begin))
    with tempfile.TemporaryDirectory() as folder, running_site() as site:
        path = Path(folder) / "s.tar"
        path.write_bytes(data[: int(cut * len(data))])
        cache = ShardCache(Path(folder) / "cache")
        local, remote = read_both(path, site, cache, source)
        assert remote == local
        with open_shard(f"{site.url}/data/s.tar", source, ShardCache(Path(folder) / "cache")) as again:
            assert everything(again) == local
