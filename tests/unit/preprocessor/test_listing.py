"""Which files of a source are shards: folders, files, globs, URLs, and errors that say what to do."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from headrace.errors import DatasetError
from headrace.manifest import ShardInfo
from headrace.spec import parse_spec
from preprocessor.sources import list_shards


def listed(*paths: str) -> list[ShardInfo]:
    sources = [{"path": path, "name": f"s{index}"} for index, path in enumerate(paths)]
    return list_shards(parse_spec({"name": "test", "sources": sources}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "b.tar",
        "a/x.parquet",
        "a/y.jsonl",
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
        f"s0/{name}" for name in ("a/x.parquet", "a/y.jsonl", "b.tar", "c.tar.gz", "d.tgz", "e[1].tar")
    ]
    assert shards[2] == ShardInfo(source=0, url=str(folder / "b.tar"), name="s0/b.tar")


def test_sources_keep_their_order(folder: Path) -> None:
    assert [(shard.source, shard.name) for shard in listed(str(folder / "c.tar.gz"), str(folder / "b.tar"))] == [
        (0, "s0/c.tar.gz"),
        (1, "s1/b.tar"),
    ]


def test_glob(folder: Path) -> None:
    assert [shard.name for shard in listed(f"{folder}/?/*")] == ["s0/a/x.parquet", "s0/a/y.jsonl"]
    assert [shard.name for shard in listed(f"{folder}/*.tar")] == ["s0/b.tar", "s0/e[1].tar"]


def test_file_with_brackets_is_no_glob(folder: Path) -> None:
    assert [shard.name for shard in listed(str(folder / "e[1].tar"))] == ["s0/e[1].tar"]


def test_relative_path_and_file_url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    expected = [ShardInfo(source=0, url=str(folder / "b.tar"), name="s0/b.tar")]
    assert listed("b.tar") == listed(f"file://{folder}/b.tar") == listed("./*b.tar") == expected


def test_remote_folder() -> None:
    for name in ("x/b.tar", "x/y/a.jsonl", "x/notes.txt"):
        with fsspec.open(f"memory://listing/{name}", "wb") as file:
            file.write(b"1")
    shards = listed("memory://listing/x")
    assert [shard.name for shard in shards] == ["s0/b.tar", "s0/y/a.jsonl"]
    for shard in shards:
        with fsspec.open(shard.url) as file:
            assert file.read() == b"1"


@pytest.fixture
def web_folder(folder: Path) -> Iterator[str]:
    """The folder on a web server of the standard library, which lists it as a page and takes no ranges."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_web_folder(web_folder: str, folder: Path) -> None:
    assert [shard.name for shard in listed(web_folder)] == [
        f"s0/{name}" for name in ("a/x.parquet", "a/y.jsonl", "b.tar", "c.tar.gz", "d.tgz", "e%5B1%5D.tar")
    ]
    assert listed(f"{web_folder}/b.tar") == [ShardInfo(source=0, url=f"{web_folder}/b.tar", name="s0/b.tar")]
    with pytest.raises(DatasetError, match=f"{web_folder}/none.tar does not exist"):
        listed(f"{web_folder}/none.tar")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "does not exist; give"),
        ("/no/such/*.tar", "holds no shard; shards are"),
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
