"""Which files of a source are shards: folders, files, globs, URLs, and errors that say what to do."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import fsspec
import pytest

from headrace.errors import DatasetError
from headrace.manifest import ShardInfo
from headrace.preprocessor.sources import list_shards
from headrace.preprocessor.sources.download import Retry
from headrace.spec import parse_spec
from tests.http_site import Site, serving


def listed(*paths: str) -> list[ShardInfo]:
    sources = [{"path": path, "name": f"s{index}"} for index, path in enumerate(paths)]
    return list_shards(parse_spec({"name": "test", "sources": sources}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "b.tar",
        "a/x.tar",
        "a/y.tar",
        "c.tar.gz",
        "d.tgz",
        "README.md",
        ".hidden.tar",
        ".cache/z.tar",
        "e[1].tar",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def test_folder_is_searched_recursively_and_sorted(folder: Path) -> None:
    shards = listed(str(folder))
    assert [shard.name for shard in shards] == [
        f"s0/{name}" for name in ("a/x.tar", "a/y.tar", "b.tar", "c.tar.gz", "d.tgz", "e[1].tar")
    ]
    assert shards[2] == ShardInfo(source=0, url=str(folder / "b.tar"), name="s0/b.tar")


def test_sources_keep_their_order(folder: Path) -> None:
    assert [(shard.source, shard.name) for shard in listed(str(folder / "c.tar.gz"), str(folder / "b.tar"))] == [
        (0, "s0/c.tar.gz"),
        (1, "s1/b.tar"),
    ]


def test_glob(folder: Path) -> None:
    assert [shard.name for shard in listed(f"{folder}/?/*")] == ["s0/a/x.tar", "s0/a/y.tar"]
    assert [shard.name for shard in listed(f"{folder}/*.tar")] == ["s0/b.tar", "s0/e[1].tar"]


def test_file_with_brackets_is_no_glob(folder: Path) -> None:
    assert [shard.name for shard in listed(str(folder / "e[1].tar"))] == ["s0/e[1].tar"]


def test_relative_path_and_file_url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    expected = [ShardInfo(source=0, url=str(folder / "b.tar"), name="s0/b.tar")]
    assert listed("b.tar") == listed(f"file://{folder}/b.tar") == listed("./*b.tar") == expected


def test_remote_folder() -> None:
    for name in ("x/b.tar", "x/y/a.tar", "x/notes.txt"):
        with fsspec.open(f"memory://listing/{name}", "wb") as file:
            file.write(b"1")
    shards = listed("memory://listing/x")
    assert [shard.name for shard in shards] == ["s0/b.tar", "s0/y/a.tar"]
    for shard in shards:
        with fsspec.open(shard.url) as file:
            assert file.read() == b"1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFolder:
    """The folder on a web server of the standard library, which lists it as a page and takes no ranges."""

    url: str
    gets: list[str]
    """The path of each GET."""


@pytest.fixture
def web_folder(folder: Path) -> Iterator[WebFolder]:
    gets: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            gets.append(self.path)
            super().do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(functools.partial(Handler, directory=folder)) as url:
        yield WebFolder(url=url, gets=gets)


def test_web_folder(web_folder: WebFolder) -> None:
    assert [shard.name for shard in listed(web_folder.url)] == [
        f"s0/{name}" for name in ("a/x.tar", "a/y.tar", "b.tar", "c.tar.gz", "d.tgz", "e%5B1%5D.tar")
    ]
    assert [shard.name for shard in listed(f"{web_folder.url}/*.t*gz")] == ["s0/c.tar.gz", "s0/d.tgz"]
    assert [path for path in web_folder.gets if path.endswith((".tar", "gz")) and "*" not in path] == []
    with pytest.raises(DatasetError, match=f"{web_folder.url}/none.tar does not exist"):
        listed(f"{web_folder.url}/none.tar")


@pytest.mark.parametrize("has_head", [True, False])
def test_of_a_file_on_the_web_a_byte_is_asked_for_at_most(site: Site, has_head: bool) -> None:
    site.heads = has_head
    site.files |= dict.fromkeys(("b.tar", "notes"), bytes(8 << 20))
    assert listed(f"{site.url}/b.tar") == [ShardInfo(source=0, url=f"{site.url}/b.tar", name="s0/b.tar")]
    with pytest.raises(DatasetError, match="holds no shard"):
        listed(f"{site.url}/notes")
    assert set(site.gets) == (set() if has_head else {"bytes=0-0"})
    assert site.sent.total() == len(site.gets)


def test_an_empty_file_on_the_web_is_there(site: Site) -> None:
    site.heads = False
    site.failures = [(416, {})]
    assert [shard.name for shard in listed(f"{site.url}/b.jsonl")] == ["s0/b.jsonl"]


def test_a_web_server_that_refuses_for_now_is_asked_again(site: Site, retry: Retry, pauses: list[float]) -> None:
    site.heads = False
    site.files["b.tar"] = b"b"
    site.failures = [(503, {}), (503, {"Retry-After": "7"})]
    spec = parse_spec({"name": "test", "sources": [{"path": f"{site.url}/b.tar", "name": "s0"}]})
    assert [shard.name for shard in list_shards(spec, retry)] == ["s0/b.tar"]
    assert pauses == [0.5, 7.0]
    site.failures = [(403, {})]
    with pytest.raises(DatasetError, match=r"cannot list .*b\.tar \(403, message='Forbidden'"):
        list_shards(spec, retry)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "does not exist; give"),
        ("/no/such/*.tar", "no file matches /no/such/"),
        ("memory://no/such", "does not exist; give"),
        ("nonsense://bucket/x", "nonsense"),
    ],
)
def test_error_names_source_and_path(path: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message) as caught:
        listed(path)
    assert "'s0'" in str(caught.value)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_without_shards(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(DatasetError, match=r"holds no shard; shards are files that end in \.tar"):
            listed(str(path))


def test_a_glob_on_the_web_asks_for_no_file(site: Site) -> None:
    names = [f"{number:03}.tar" for number in range(100)]
    site.files |= dict.fromkeys((f"set/{name}" for name in names), b"data")
    site.files["set/"] = "".join(f'<a href="{name}">{name}</a>' for name in [*names, "more/"]).encode()
    assert [shard.name for shard in listed(f"{site.url}/set/0[0-4]*.tar")] == [f"s0/{name}" for name in names[:50]]
    assert len(site.gets) < 5
    assert sum(site.described.acquire(blocking=False) for _ in names) < 5
