"""Remote shards are read by ranges, to the same samples as whole ones, and are fetched whole once much of them was read."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import DatasetError
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.sources import list_shards, open_shard, partial_blob, ranges
from headrace.preprocessor.sources.cache import WHOLE_BYTES, ShardCache
from headrace.preprocessor.sources.download import Retry
from headrace.preprocessor.sources.range_requests import MOST_REQUESTS
from headrace.sample import SampleRef
from headrace.source_spec import SourceSpec
from headrace.spec import parse_spec
from tests.http_site import PATIENCE_S, Site
from tests.unit.preprocessor.sources.cache_world import Moved, held
from tests.unit.preprocessor.sources.remote_world import by_ranges_alone, everything, mds_of, read_both, serve, tar_of

DATA = Path(__file__).parents[3] / "data"
FILES = sorted(
    path
    for folder in ("mds/captions", "mds/encodings", "mds/chat-zstd", "energon", "hostile/tars", "hostile/parquet")
    for path in (DATA / folder).rglob("*")
    if path.name.endswith((".mds", ".mds.zstd", ".tar", ".parquet"))
)
ROWS, ROW_BYTES = 200, 10_000


@pytest.fixture
def cache(tmp_path: Path, retry: Retry) -> ShardCache:
    return ShardCache(tmp_path / "cache", retry=retry)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done in the background is done at once."""
    monkeypatch.setattr(partial_blob, "in_background", lambda work: work()())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_format_reads_alike(
    path: Path, site: Site, cache: ShardCache, source: SourceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged files too, with the same words."""
    by_ranges_alone(monkeypatch)
    local, remote = read_both(path, site, cache, source)
    assert remote == local


def test_of_mds_the_table_and_the_rows_are_read(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    site.files["s.mds"] = mds_of(ROWS, ROW_BYTES)
    requests, read = Moved("range_requests"), Moved("range_bytes")
    with open_shard(f"{site.url}/s.mds", source, cache) as shard:
        assert shard.num_rows == ROWS
        assert [shard.read(row).fields["txt"] for row in (7, 150)] == ["Caption 7.", "Caption 150."]
    assert len(site.gets) == requests() == 3
    assert site.sent["s.mds"] == read() < 16 * 1024 + 2 * (ROW_BYTES + 100)
    assert held(cache._directory) == []


def test_of_parquet_the_footer_and_a_row_group_are_read(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    table = pa.table({"text": [f"c{row}" for row in range(ROWS)], "image": [bytes([row]) * ROW_BYTES for row in range(ROWS)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=5, use_dictionary=False, compression="none")
    site.files["s.parquet"] = data = sink.getvalue().to_pybytes()
    with open_shard(f"{site.url}/s.parquet", source, cache) as shard:
        shard.prefetch([3, 4, 151])
        assert [shard.read(row).fields["text"] for row in (3, 4, 151)] == ["c3", "c4", "c151"]
    assert len(site.gets) == 3
    assert site.sent["s.parquet"] < 64 * 1024 + 2 * 5 * (ROW_BYTES + 100) < len(data) / 10


@pytest.mark.usefixtures("inline")
def test_row_groups_are_read_alone_until_half_of_the_file_was_read(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    """A few rows of a group say little of how much of the file is wanted."""
    sink = pa.BufferOutputStream()
    table = pa.table({"text": [f"c{row}" for row in range(ROWS)], "image": [bytes([row]) * ROW_BYTES for row in range(ROWS)]})
    pq.write_table(table, sink, row_group_size=5, use_dictionary=False, compression="none")
    site.files["s.parquet"] = data = sink.getvalue().to_pybytes()
    with open_shard(f"{site.url}/s.parquet", source, cache) as shard:
        for row in range(0, ROWS * 2 // 5, 5):
            shard.read(row)
        assert len(data) not in held(cache._directory)
        for row in range(ROWS):
            assert shard.read(row).fields["text"] == f"c{row}"
        assert len(data) in held(cache._directory)
    assert site.sent["s.parquet"] < 1.6 * len(data) + 64 * 1024


def test_a_large_row_group_is_read_from_the_whole_file(
    site: Site, cache: ShardCache, source: SourceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.preprocessor.sources.parquet.RANGED_GROUP_BYTES", 10_000)
    sink = pa.BufferOutputStream()
    table = pa.table({"text": [f"c{row}" for row in range(ROWS)], "image": [bytes([row]) * ROW_BYTES for row in range(ROWS)]})
    pq.write_table(table, sink, row_group_size=100, use_dictionary=False, compression="none")
    site.files["s.parquet"] = data = sink.getvalue().to_pybytes()
    with open_shard(f"{site.url}/s.parquet", source, cache) as shard:
        assert shard.read(150).fields["text"] == "c150"
    assert len(data) in held(cache._directory)


def test_a_small_shard_is_fetched_whole_at_once(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    site.files["s.mds"] = mds_of(4, 1000)
    with open_shard(f"{site.url}/s.mds", source, cache):
        assert held(cache._directory) == [len(site.files["s.mds"])]
        assert len(site.files["s.mds"]) < WHOLE_BYTES


@pytest.mark.usefixtures("inline")
def test_a_shard_that_is_read_much_is_fetched_whole(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    site.files["s.mds"] = data = mds_of(ROWS, ROW_BYTES)
    with open_shard(f"{site.url}/s.mds", source, cache) as shard:
        for row in range(ROWS):
            assert shard.read(row).fields["txt"] == f"Caption {row}."
        assert held(cache._directory) == [len(data)]
    assert site.sent["s.mds"] < len(data) * (1 + partial_blob.SHARE) + 16 * 1024 + 2 * ROW_BYTES
    with open_shard(f"{site.url}/s.mds", source, cache) as again:
        assert again.read(3).fields["txt"] == "Caption 3."
    assert cache.stats.hits == 1


@pytest.mark.usefixtures("inline")
def test_without_room_for_the_whole_ranges_go_on(site: Site, tmp_path: Path, retry: Retry, source: SourceSpec) -> None:
    site.files["s.mds"] = mds_of(ROWS, ROW_BYTES)
    small = ShardCache(tmp_path / "small", max_bytes=1000, retry=retry)
    with open_shard(f"{site.url}/s.mds", source, small) as shard:
        assert [shard.read(row).fields["txt"] for row in range(ROWS)] == [f"Caption {row}." for row in range(ROWS)]
    assert held(tmp_path / "small") == []


def test_a_server_without_ranges_is_asked_for_whole_shards(
    site: Site, cache: ShardCache, source: SourceSpec, tmp_path: Path
) -> None:
    site.ranges = False
    (tmp_path / "a.tar").write_bytes(tar_of(20, 20_000))
    local, remote = read_both(tmp_path / "a.tar", site, cache, source)
    assert remote == local
    assert not ranges.sends_ranges(site.url)
    site.files["b.mds"] = mds_of(ROWS, ROW_BYTES)
    before = len(site.gets)
    with open_shard(f"{site.url}/b.mds", source, cache) as shard:
        assert shard.read(1).fields["txt"] == "Caption 1."
    whole = site.gets[before:]
    assert len(held(cache._directory)) == 2
    assert len(whole) <= 2, "the try of a whole download for a range, and the whole"


@pytest.mark.parametrize("change", ["other content", "longer", "shorter"])
def test_a_shard_that_changes_meanwhile_is_told(site: Site, cache: ShardCache, source: SourceSpec, change: str) -> None:
    site.files["s.mds"] = data = mds_of(ROWS, ROW_BYTES)
    with open_shard(f"{site.url}/s.mds", source, cache) as shard:
        assert shard.read(1).fields["txt"] == "Caption 1."
        site.files["s.mds"] = {"other content": data[::-1], "longer": data + b"1", "shorter": data[:100_000]}[change]
        shard.prefetch([2])
        with pytest.raises(DatasetError, match=rf"the shard {site.url}/s.mds has changed since it was indexed; submit the job"):
            shard.read(2)
        with pytest.raises(DatasetError, match="has changed"):
            shard.read(150)


def test_throttled_ranges_are_asked_for_again(site: Site, cache: ShardCache, source: SourceSpec, pauses: list[float]) -> None:
    site.files["s.mds"] = mds_of(ROWS, ROW_BYTES)
    with open_shard(f"{site.url}/s.mds", source, cache) as shard:
        site.failures = [(503, {"Retry-After": "7"}), (429, {})]
        site.cuts = [5000]
        assert shard.read(1).fields["txt"] == "Caption 1."
        assert pauses == [7.0, 1.0, 2.0]
        site.failures = [(404, {})]
        with pytest.raises(DatasetError, match=f"cannot read the shard {site.url}/s.mds: 404"):
            shard.read(100)


def test_what_could_not_be_read_ahead_is_read_when_it_is_needed(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    site.files["s.mds"] = mds_of(ROWS, ROW_BYTES)
    with open_shard(f"{site.url}/s.mds", source, cache) as shard:
        site.failures = [(503, {})]
        shard.prefetch([5])
        assert shard.read(5).fields["txt"] == "Caption 5."


def test_so_many_requests_are_made_at_a_time_and_no_more(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    site.files["s.mds"] = mds_of(ROWS, ROW_BYTES)
    with open_shard(f"{site.url}/s.mds", source, cache) as shard:
        site.gate = gate = threading.Event()
        shard.prefetch(range(0, ROWS, 2))
        for _ in range(MOST_REQUESTS + 1):
            assert site.asked.acquire(timeout=PATIENCE_S)
        gate.set()
        assert [shard.read(row).fields["txt"] for row in range(0, ROWS, 2)] == [f"Caption {row}." for row in range(0, ROWS, 2)]
    assert site.most_at_a_time == MOST_REQUESTS


def test_a_job_probes_and_loads_remote_samples_like_local_ones(
    site: Site, cache: ShardCache, tmp_path: Path, jpeg: bytes, write_tar: object
) -> None:
    members = {f"{n:03}.{end}": content for n in range(300) for end, content in {"txt": b"A caption.", "jpg": jpeg}.items()}
    (tmp_path / "set").mkdir()
    path = write_tar(members, name="set/s.tar")  # type: ignore[operator]
    site.files |= {"set/s.tar": path.read_bytes(), "set/": b'<a href="s.tar">s.tar</a>'}
    refs = [SampleRef(sample_id=n, shard=0, row=row) for n, row in enumerate((5, 250, 40, 41))]
    results = []
    for where in (str(path), f"{site.url}/set/"):
        job = JobWork("job", parse_spec({"name": "test", "sources": [{"path": where, "name": "s"}]}), cache)
        job.shards = list_shards(job.spec)
        probes, rejected = job.probe(refs)
        results.append((job.index(0), probes, rejected, job.decode_batch(refs)[0].to_pylist()))
        job.close()
    assert results[0] == results[1]


def test_a_job_that_fetches_row_groups_for_single_samples_says_so_once(
    site: Site, cache: ShardCache, caplog: pytest.LogCaptureFixture
) -> None:
    sink, pictures = pa.BufferOutputStream(), [bytes([row]) * 20_000 for row in range(30)]
    pq.write_table(
        pa.table({"text": ["A caption."] * 30, "image": pictures}),
        sink,
        row_group_size=10,
        compression="none",
        use_dictionary=False,
    )
    data = sink.getvalue().to_pybytes()
    site.files |= {f"set/{name}.parquet": data for name in "ab"}
    site.files["set/"] = b'<a href="a.parquet">a</a><a href="b.parquet">b</a>'
    for shuffle_rows, times in ((1, 1), (10, 0)):
        spec = parse_spec({"name": "test", "sources": [{"path": f"{site.url}/set/"}], "shuffle_rows": shuffle_rows})
        job = JobWork("job", spec, cache)
        job.shards = list_shards(spec)
        caplog.clear()
        assert [job.index(shard)[0] for shard in range(2)] == [30, 30]
        job.close()
        said = [record.message for record in caplog.records if "row groups" in record.message]
        assert len(said) == times
        assert all("shuffle_rows: 10" in words for words in said)


def test_a_closed_shard_keeps_nothing_in_memory(site: Site, cache: ShardCache, source: SourceSpec) -> None:
    site.files["s.mds"] = mds_of(ROWS, ROW_BYTES)
    before = partial_blob.PIECES._held_bytes
    with open_shard(f"{site.url}/s.mds", source, cache) as shard:
        shard.prefetch(range(20))
        assert partial_blob.PIECES._held_bytes > before
        everything(shard)
    assert partial_blob.PIECES._held_bytes == before


def test_serving_what_lies_beside(site: Site, tmp_path: Path) -> None:
    """The helper of these tests: a shard's index is found beside it."""
    for name in ("index.json", "s.mds"):
        (tmp_path / name).write_bytes(b"x")
    assert serve(site, tmp_path / "s.mds") == f"{site.url}/data/s.mds"
    assert {"data/index.json", "data/s.mds"} <= site.files.keys()


def test_what_is_wanted_behind_a_header_is_learnt_from_headers_and_not_from_searches() -> None:
    window = partial_blob._Window()
    window.next_bytes(500_000)
    window.end = 520_000  # a search for a header, of 20 kB
    window.next_bytes(520_100)
    assert window.least_bytes == partial_blob.WINDOW_BYTES
    window.next_bytes(900_000)
    window.end = 902_048
    window.next_bytes(902_048)  # the next header was just behind
    assert window.least_bytes == 2_048 + 512
