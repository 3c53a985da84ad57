"""What a job may have a preprocessor open: files below its folders, URLs that begin as its operator says, and nothing else."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.run import preprocessor
from headrace.errors import DatasetError, SpecError, UserError
from headrace.preprocessor.access import NOTHING, Access, check_url, granting
from headrace.preprocessor.sources import list_shards, open_shard
from headrace.preprocessor.sources.blob import check_fsspec
from headrace.preprocessor.sources.cache import ShardCache
from headrace.preprocessor.text import BUNDLED, load_encoder
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec
from headrace.spec import parse_spec
from tests.http_site import Site, running_site

LINE = b'{"caption": "secret", "image": "a.jpg"}\n'


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the one that may be read."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "s.jsonl").write_bytes(LINE)
    (folder / "a.jpg").write_bytes(b"secret")
    (folder / "tokenizer.json").write_bytes(BUNDLED.read_bytes())
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The one folder that may be read, and no URL."""
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "s.jsonl").write_bytes(LINE)
    with granting(Access.of([folder], [])):
        yield folder


def listed(path: str) -> list[str]:
    return [shard.url for shard in list_shards(parse_spec({"name": "job", "sources": [{"path": path}]}))]


def opened(path: str) -> bytes:
    """The medium of the first sample of a source."""
    (url,) = listed(path)
    with open_shard(url, SourceSpec(path=path)) as shard:
        return shard.read(0).load("a.jpg")


def test_what_lies_in_the_folder_is_read(root: Path) -> None:
    (root / "a.jpg").write_bytes(b"medium")
    for path in (f"{root}", f"{root}/s.jsonl", f"{root}/*.jsonl", f"file://{root}/s.jsonl", f"{root}/../root/s.jsonl"):
        assert opened(path) == b"medium"


@pytest.mark.parametrize(
    "path", ["", "/", "/s.jsonl", "/*.jsonl", "/../outside/s.jsonl", "/../root/../outside", "/../root*/../outside/*.jsonl"]
)
def test_a_path_outside_is_refused_by_the_name_of_the_flag(root: Path, outside: Path, path: str) -> None:
    with pytest.raises(DatasetError, match=rf"not for this process to read: it may read below {root}; .*--data-root"):
        listed(f"{outside}{path}")


def test_links_lead_no_further_than_the_folder(root: Path, outside: Path) -> None:
    (root / "inner.jsonl").symlink_to(root / "s.jsonl")
    (root / "a.jpg").symlink_to(outside / "a.jpg")
    (root / "out.jsonl").symlink_to(outside / "s.jsonl")
    (root / "folder").symlink_to(outside)
    with open_shard(f"{root}/inner.jsonl", SourceSpec(path=str(root))) as shard, pytest.raises(BadSampleError) as caught:
        shard.read(0).load("a.jpg")
    assert caught.value.reason is Reason.UNSAFE_MEMBER_NAME
    for path in ("out.jsonl", "folder/s.jsonl"):
        with pytest.raises(DatasetError, match="--data-root"):
            open_shard(f"{root}/{path}", SourceSpec(path=str(root)))
        with pytest.raises(DatasetError, match="--data-root"):
            listed(f"{root}/{path}")


def test_media_are_not_read_beside_a_link_from_elsewhere(root: Path, outside: Path) -> None:
    (outside / "link.jsonl").symlink_to(root / "s.jsonl")
    with pytest.raises(DatasetError, match="--data-root"):
        open_shard(f"{outside}/link.jsonl", SourceSpec(path=str(outside)))


def test_what_describes_a_data_set_is_no_way_out(root: Path, outside: Path) -> None:
    (root / ".nv-meta").mkdir()
    (root / ".nv-meta" / ".info.json").write_text("{}")
    (outside / "split.yaml").write_text("split_parts: {train: [a.tar]}")
    (root / ".nv-meta" / "split.yaml").symlink_to(outside / "split.yaml")
    with pytest.raises(DatasetError, match="--data-root"):
        listed(str(root))
    (root / "mds").mkdir()
    (root / "mds" / "shard.00000.mds").write_bytes(b"")
    (root / "mds" / "index.json").symlink_to(outside / "a.jpg")
    with pytest.raises(DatasetError, match="--data-root"):
        listed(f"{root}/mds")


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "socket", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, name: str) -> None:
    """A reader waits for ever at a pipe, and a device never ends."""
    os.mkfifo(tmp_path / "pipe")
    os.mknod(tmp_path / "socket", 0o600 | 0o140000)
    (tmp_path / "folder").mkdir()
    path = str(tmp_path / name)
    with pytest.raises(SpecError, match=r"text\.tokenizer: .* is a .*; only regular files are read"):
        load_encoder(path)
    for link in ("x.jsonl", "x.parquet", "x.mds", "x.tar"):
        (tmp_path / link).symlink_to(path)
        with pytest.raises(DatasetError, match="only regular files are read"):
            open_shard(str(tmp_path / link), SourceSpec(path=str(tmp_path)))
    meta = tmp_path / "energon" / ".nv-meta"
    meta.mkdir(parents=True)
    (meta / ".info.json").write_text("{}")
    (meta / "split.yaml").symlink_to(path)
    with pytest.raises(DatasetError, match="only regular files are read"):
        listed(str(meta.parent))


def test_a_tokenizer_is_read_up_to_a_limit(tmp_path: Path) -> None:
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(SpecError, match=r"text\.tokenizer: .*large\.json has 1099511627776 bytes, more than"):
        load_encoder(str(tmp_path / "large.json"))


def test_a_tokenizer_outside_is_refused(root: Path, outside: Path) -> None:
    with pytest.raises(SpecError, match=r"text\.tokenizer: .*--data-root"):
        load_encoder(f"{outside}/tokenizer.json")


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("s3://bucket", True),
        ("s3://bucket/a/b.tar", True),
        ("s3://bucket-of-others/a.tar", False),
        ("s3://other/a.tar", False),
        ("https://host/data/x.tar", True),
        ("https://host/data", True),
        ("https://host/database/x.tar", False),
        ("https://host/data/../x.tar", False),
        ("https://host/data/%2e%2e/x.tar", False),
        ("https://host.others/data/x.tar", False),
        ("https://host@others/data/x.tar", False),
        ("http://host/data/x.tar", False),
    ],
)
def test_urls_go_by_their_beginnings(url: str, allowed: bool) -> None:
    with granting(Access.of([], ["s3://bucket", "https://host/data/"])):
        if allowed:
            check_url(url)
        else:
            with pytest.raises(DatasetError, match="--allow-url"):
                check_url(url)


@pytest.mark.parametrize("url", ["ftp://h/a.tar", "sftp://h/a.tar", "smb://h/a.tar", "github://o:r@/a.tar", "http://h/a.tar"])
def test_unless_told_only_object_stores_and_https_are_fetched(url: str) -> None:
    with granting(Access()):
        for usual in ("s3://b/a.tar", "gs://b/a.tar", "https://h/a.tar"):
            check_url(usual)
        with pytest.raises(DatasetError, match="--allow-url"):
            listed(url)


@pytest.mark.parametrize(
    "url",
    ["reference://a.jsonl", "reference://::http://127.0.0.1:9/refs.json", "zip://a.tar::s3://b/c.zip", "/data::/etc/a.jsonl"],
)
def test_references_and_chains_are_never_taken(url: str) -> None:
    """What a reference names is a program, and a chain's beginning says nothing of its end."""
    with pytest.raises(DatasetError, match="which is not taken"):
        listed(url)
    with pytest.raises(SpecError, match="which is not taken"):
        load_encoder(url)


def test_a_redirection_leads_only_to_what_may_be_fetched(site: Site, cache: ShardCache) -> None:
    with running_site() as internal:
        internal.files["api"] = site.files["a.jsonl"] = LINE
        site.failures = [(302, {"Location": f"{internal.url}/api"})] * 9
        with (
            granting(Access.of([], [site.url], local_urls=True)),
            pytest.raises(DatasetError, match=f"{internal.url}/api is not for this process"),
        ):
            cache.open(f"{site.url}/a.jsonl").pread(0, 100)
        assert internal.gets == []
        with granting(Access.of([], [site.url, internal.url], local_urls=True)):
            assert cache.open(f"{site.url}/a.jsonl").pread(0, 100) == LINE


def test_media_beside_a_remote_file_are_bounded_by_what_comes(
    site: Site, cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server need not say how long its answer is."""
    monkeypatch.setattr("headrace.preprocessor.sources.media_files.MAX_MEDIUM_BYTES", 1000)
    site.sizes = False
    site.files = {"s.jsonl": LINE, "a.jpg": bytes(1000), "b.jpg": bytes(1001)}
    with open_shard(f"{site.url}/s.jsonl", SourceSpec(path=site.url), cache) as shard:
        assert shard.read(0).load("a.jpg") == bytes(1000)
        with pytest.raises(BadSampleError) as caught:
            shard.read(0).load("b.jpg")
    assert caught.value.reason is Reason.TOO_LARGE


@pytest.mark.parametrize("path", ["api?x=.jsonl", "api#.jsonl", "api?x=/a.jsonl"])
def test_what_stands_behind_the_path_makes_no_shard_of_a_web_page(site: Site, path: str) -> None:
    site.files = {path.partition("#")[0]: LINE}
    with pytest.raises(DatasetError, match=r"holds no shard|does not exist"):
        listed(f"{site.url}/{path}")
    with pytest.raises(DatasetError, match="is not a shard"):
        open_shard(f"{site.url}/{path}", SourceSpec(path=site.url))


def test_nothing_is_nothing(tmp_path: Path) -> None:
    with granting(NOTHING):
        with pytest.raises(DatasetError, match="it may read no local file; start the preprocessor with --data-root"):
            listed(str(tmp_path))
        with pytest.raises(DatasetError, match="it may fetch no URL; start the preprocessor with --allow-url"):
            listed("s3://bucket/a.tar")
        assert load_encoder("").vocab_size, "the bundled one is ours"


@pytest.mark.parametrize("url", ["bucket/", "/data", "file:///data", "reference://", "zip::s3://b"])
def test_what_is_no_beginning_of_a_url_is_told(url: str) -> None:
    with pytest.raises(UserError, match="--allow-url"):
        Access.of([], [url])


def test_a_root_that_is_no_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--data-root"):
        Access.of([tmp_path / "none"], [])


@pytest.mark.parametrize(
    ("listen", "reorder", "access"),
    [
        ("127.0.0.1:0", "localhost:7070", Access()),
        ("[::1]:0", "127.0.0.2:1,127.0.0.3:1", Access()),
        ("0.0.0.0:0", "127.0.0.1:7070", NOTHING),
        ("127.0.0.1:0", "127.0.0.1:7070,reorder:7070", NOTHING),
    ],
)
def test_unless_told_jobs_of_this_machine_alone_may_read(listen: str, reorder: str, access: Access, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    preprocessor.add_arguments(parser)
    arguments = ["--listen", listen, "--reorder", reorder]
    assert preprocessor.access(parser.parse_args(arguments)) == access
    told = preprocessor.access(parser.parse_args([*arguments, "--data-root", str(tmp_path), "--allow-url", "s3://b/"]))
    assert told == Access(roots=(str(tmp_path.resolve()),), urls=("s3://b/",))
    near = preprocessor.access(parser.parse_args([*arguments, "--allow-local-urls"]))
    assert near == (NOTHING if access == NOTHING else Access(local_urls=True))


def test_drivers_that_are_too_old_to_keep_to_it_are_refused_with_the_remedy() -> None:
    """A trainer's library may ask for them, as torchtitan's data sets do."""
    check_fsspec("2026.6.0")
    with pytest.raises(UserError, match=r"^fsspec is 2025\.3\.2, .* 2026\.6 or later: `pip install 'headrace\[preprocessor\]'`$"):
        check_fsspec("2025.3.2")
