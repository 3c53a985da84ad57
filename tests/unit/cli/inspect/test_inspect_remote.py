"""A limit on a remote data set: few shards are read, and of these little more than the samples, as the server counts it."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from headrace.cli.costs import remote_beginnings
from headrace.cli.costs.remote_beginnings import Beginnings
from headrace.cli.costs.survey import MeasuredSample, MeasuringJob
from headrace.cli.main import main
from headrace.errors import DatasetError
from headrace.preprocessor.sources import cache as shard_cache
from headrace.preprocessor.sources.cache import ShardCache
from headrace.quarantine import Rejected
from headrace.sample import SampleRef
from headrace.spec import parse_spec
from tests.http_site import Site, running_site

SHARDS, ROWS = 16, 40
FIRST = 64 * 2**10

Inspect = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def picture() -> bytes:
    """A picture of about 25 kB."""
    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (112, 84, 3), np.uint8)).save(data, "PNG")
    return data.getvalue()


def tar_of(members: dict[str, bytes], mode: str = "w") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def samples(picture: bytes, rows: int) -> dict[str, bytes]:
    members = {}
    for row in range(rows):
        members |= {f"{row:04}.jpg": picture, f"{row:04}.txt": f"Caption {row}.".encode()}
    return members


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    cache = ShardCache(tmp_path / "cache")
    for module in (shard_cache, remote_beginnings):
        monkeypatch.setattr(module, "default_cache", lambda: cache)
    monkeypatch.setattr(remote_beginnings, "FIRST_BYTES", FIRST)
    monkeypatch.setattr(remote_beginnings, "READ_AHEAD_BYTES", FIRST)
    with running_site() as site:
        yield site


def publish(site: Site, files: dict[str, bytes]) -> str:
    """Put files into a folder of the site; return its URL."""
    page = "".join(f'<a href="{name}">{name}</a>' for name in files)
    site.files |= {f"set/{name}": data for name, data in files.items()} | {"set/": page.encode()}
    return f"{site.url}/set/"


@pytest.fixture
def inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Inspect:
    def call(*options: str) -> dict[str, Any]:
        assert main(["inspect", "--out", str(tmp_path / "out"), "--format", "json", *options]) == 0
        report = json.loads(capsys.readouterr().out)
        assert isinstance(report, dict)
        return report

    return call


def sent(site: Site) -> int:
    return sum(count for name, count in site.sent.items() if name != "set/")


def test_of_archives_the_beginnings_of_four_are_read(site: Site, picture: bytes, inspect: Inspect) -> None:
    archive = tar_of(samples(picture, ROWS))
    url = publish(site, {f"{n:02}.tar": archive for n in range(SHARDS)})
    report = inspect(url, "--limit", "20", "--preview", "6")
    assert (report["samples"], report["images"], report["refused"]) == (20, 20, [])
    assert (report["shards"], report["shards_read"], report["not_probed"]) == (SHARDS, 4, None)
    read = [name for name, count in site.sent.items() if name.endswith(".tar") and count]
    assert sorted(read) == ["set/00.tar", "set/04.tar", "set/08.tar", "set/12.tar"]
    wanted = 20 * len(picture)
    assert report["bytes_read"] == sent(site)
    assert wanted < sent(site) < 2 * wanted + 4 * FIRST < SHARDS * len(archive) / 10
    assert report["fields"][1] == {
        "source": "set", "name": "jpg", "samples": 20, "types": {"member": 20}, "used_as": {"images": 20}
    }  # fmt: skip
    assert report["preview"] is not None


def test_the_table_says_what_was_looked_at(
    site: Site, picture: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    url = publish(site, {f"{n:02}.tar": tar_of(samples(picture, 10)) for n in range(SHARDS)})
    assert main(["inspect", url, "--limit", "8", "--out", str(tmp_path)]) == 0
    words = capsys.readouterr().out
    assert f"8 samples of 4 of 16 shards, {sent(site) / 1e6:.1f} MB read, 8 images, 0 recordings" in words


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_small_shards_are_read_until_there_are_enough_samples(site: Site, picture: bytes, inspect: Inspect, rows: int) -> None:
    url = publish(site, {f"{n:02}.tar": tar_of(samples(picture, rows)) for n in range(SHARDS)})
    report = inspect(url, "--limit", "15")
    assert report["samples"] == 15
    assert report["shards_read"] == max(4, -(-15 // rows))


def test_a_limit_above_all_there_is_reads_all(site: Site, picture: bytes, inspect: Inspect) -> None:
    url = publish(site, {f"{n}.tar": tar_of(samples(picture, n)) for n in range(1, 6)})
    report = inspect(url, "--limit", "500")
    assert (report["samples"], report["shards_read"], report["refused"]) == (15, 5, [])


@pytest.mark.parametrize(("name", "mode"), [("x.tar", "w"), ("x.tar.gz", "w:gz")])
def test_samples_that_the_end_of_a_beginning_cuts_are_not_taken(site: Site, picture: bytes, name: str, mode: str) -> None:
    """Wherever it ends: within a member, behind one, within a header."""
    data = tar_of(samples(picture, 4), mode)
    url = publish(site, {name: data}) + name
    spec = parse_spec({"name": "test", "sources": [{"path": url}]})
    first = remote_beginnings.FIRST_BYTES
    for length in (*range(0, 3 * 512, 100), *range(len(picture), len(picture) + 6 * 512, 100), len(data) // 2, len(data) - 1):
        remote_beginnings.FIRST_BYTES = length + 1
        job = MeasuringJob(spec, 1)
        rows, damage = job.rows_of_beginning(0, 1)
        assert 1 <= rows <= 4
        looks = job.look([SampleRef(sample_id=0, shard=0, row=row) for row in range(rows)])
        assert [look.result for look in looks if isinstance(look.result, Rejected)] == damage == []
        assert all(isinstance(look.result, MeasuredSample) and look.result.image_patches for look in looks)
        job.close()
    remote_beginnings.FIRST_BYTES = first


def test_damage_is_told_where_it_is_the_files_own(site: Site, picture: bytes, inspect: Inspect) -> None:
    archive = tar_of(samples(picture, 3))
    url = publish(site, {"0.tar": archive[: -len(picture) - 4 * 1024 - 10 * 1024]})
    report = inspect(url, "--limit", "20")
    assert [item["reason"] for item in report["refused"]] == ["archive_truncated"]


def test_members_that_do_not_lie_together_are_said_to_be_a_possible_reason(
    site: Site, picture: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {f"{n}.json": json.dumps({"caption": "<image>"}).encode() for n in range(ROWS)}
    url = publish(site, {"0.tar": tar_of({**texts, **{f"{n}.png": picture for n in range(ROWS)}})}) + "0.tar"
    assert main(["inspect", url, "--limit", "5", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "refused as placeholder_mismatch: " in out
    assert "some are missing here that are found without --limit" in out
    assert main(["inspect", url, "--out", str(tmp_path)]) == 0
    assert "refused as" not in capsys.readouterr().out


def test_lines_of_jsonl_are_read_from_its_beginning_and_their_media_alone(site: Site, picture: bytes, inspect: Inspect) -> None:
    lines = b"".join(json.dumps({"caption": "c" * 500, "image": f"{n}.png"}).encode() + b"\n" for n in range(4000))
    url = publish(site, {"all.jsonl": lines, **{f"{n}.png": picture for n in range(4000)}})
    report = inspect(f"{url}all.jsonl", "--limit", "5")
    assert (report["samples"], report["images"]) == (5, 5)
    assert site.sent["set/all.jsonl"] == FIRST
    assert sum(name.endswith(".png") for name in site.sent) == 5


@pytest.mark.parametrize("name", ["all.ndjson", "all.jsonl.gz"])
def test_other_lines_are_read_from_their_beginning_too(site: Site, inspect: Inspect, name: str) -> None:
    words = np.random.default_rng(0).integers(0, 10**9, (40_000, 20))
    lines = b"".join(json.dumps({"caption": " ".join(map(str, row))}).encode() + b"\n" for row in words)
    data = gzip.compress(lines, 1) if name.endswith(".gz") else lines
    report = inspect(publish(site, {name: data}) + name, "--limit", "5")
    assert (report["samples"], report["refused"]) == (5, [])
    assert report["bytes_read"] < len(data) / 3


def test_of_parquet_the_footer_and_one_row_group_are_read(site: Site, picture: bytes, inspect: Inspect) -> None:
    data = io.BytesIO()
    table = pa.table({"caption": [f"Caption {n}." for n in range(400)], "image": [picture] * 400})
    pq.write_table(table, data, row_group_size=20, use_dictionary=False)
    url = publish(site, {f"{n}.parquet": data.getvalue() for n in range(8)})
    report = inspect(url, "--limit", "20")
    assert (report["samples"], report["images"], report["shards_read"]) == (20, 20, 4)
    assert report["bytes_read"] == sent(site)
    assert sent(site) < 4 * (20 * len(picture) + 6 * FIRST) < 8 * data.tell() / 5


@pytest.mark.parametrize("name", ["x.mds.zstd", "x.json", "x.csv"])
def test_a_shard_that_has_no_beginning_to_read_is_fetched_whole_at_once(site: Site, name: str) -> None:
    url = publish(site, {name: bytes(10 * FIRST)}) + name
    beginnings = Beginnings()
    with contextlib.closing(beginnings.open(url)) as blob:
        assert [len(blob.pread(offset, 100)) for offset in range(0, 10 * FIRST, FIRST)] == [100] * 10
    assert (len(site.gets), beginnings.bytes_read, sent(site)) == (1, 10 * FIRST, 10 * FIRST)


def test_a_server_without_ranges_is_asked_for_whole_files_of_few_shards(site: Site, picture: bytes, inspect: Inspect) -> None:
    site.ranges = False
    archive = tar_of(samples(picture, ROWS))
    url = publish(site, {f"{n:02}.tar": archive for n in range(SHARDS)})
    report = inspect(url, "--limit", "20")
    assert (report["samples"], report["shards_read"], report["refused"]) == (20, 4, [])


def test_without_a_limit_every_shard_is_fetched_once(site: Site, picture: bytes, inspect: Inspect) -> None:
    archive = tar_of(samples(picture, 2))
    report = inspect(publish(site, {f"{n}.tar": archive for n in range(3)}))
    assert (report["samples"], report["bytes_read"], report["not_probed"]) == (6, None, 0)
    assert sent(site) == 3 * len(archive)


def test_samples_to_compare_are_read_alike(
    site: Site, picture: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = publish(site, {f"{n:02}.tar": tar_of(samples(picture, ROWS)) for n in range(SHARDS)})
    options = ["--limit", "16", "--replicas", "1", "--num-stages", "2", "--out", str(tmp_path), "--format", "json"]
    assert main(["compare", url, *options]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["used"] == 16
    assert "read 16 samples, of 4 of 16 shards (--limit)" in err
    assert sent(site) < 2 * 16 * len(picture) + 4 * FIRST


def test_a_shard_that_cannot_be_read_is_one_sentence(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = publish(site, {"0.tar": b""})
    del site.files["set/0.tar"]
    assert main(["inspect", url, "--limit", "2", "--out", str(tmp_path)]) == 2
    assert "cannot read the shard" in capsys.readouterr().err


def test_an_object_store_is_asked_for_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file system of fsspec; the one in memory stands for a remote one here."""
    monkeypatch.setattr(remote_beginnings, "is_remote", lambda _: True)
    monkeypatch.setattr(remote_beginnings, "FIRST_BYTES", 100)
    with fsspec.open("memory://beginnings/x.tar", "wb") as file:
        file.write(bytes(range(250)) * 4)
    beginnings = Beginnings()
    url = "memory://beginnings/x.tar"
    with_100 = beginnings.open(url)
    assert (with_100.size, beginnings.is_cut(url), beginnings.bytes_read) == (100, True, 100)
    beginnings.lengthen(url, rows=1, wanted=3)
    assert (beginnings.open(url).size, with_100.size) == (257, 100)
    beginnings.lengthen(url, rows=0, wanted=3)
    assert beginnings.open(url).pread(240, 2000) == (bytes(range(250)) * 4)[240:]
    assert (beginnings.is_cut(url), beginnings.bytes_read) == (False, 1000)
    with pytest.raises(DatasetError, match=r"cannot read the shard memory://beginnings/y\.tar"):
        beginnings.open("memory://beginnings/y.tar")
