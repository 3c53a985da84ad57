"""Ranges come over few connections that are kept, and by the driver where something is particular about a server."""

from __future__ import annotations

import contextlib
import socketserver
from collections.abc import Iterator

import pytest

from headrace.preprocessor.access import Access, granting
from headrace.preprocessor.sources import blob, ranges
from headrace.preprocessor.sources.blob import filesystem, load_drivers
from headrace.preprocessor.sources.cache import ShardCache
from headrace.preprocessor.sources.download import Retry, describe
from headrace.preprocessor.sources.range_requests import RefusedError, get_range, plain_url
from headrace.preprocessor.sources.ranges import RangedFile
from tests.http_site import Site, running_site, serving

CONTENT = bytes(range(256)) * 40


class _Keeping(socketserver.StreamRequestHandler):
    """Keeps a connection for two answers, without saying so, as a server does that closes what is idle."""

    connections = 0

    def handle(self) -> None:
        type(self).connections += 1
        for _ in range(2):
            lines = list(iter(lambda: self.rfile.readline().strip().decode(), ""))
            if not lines:
                return
            asked = next(line for line in lines if line.startswith("Range:")).partition("=")[2]
            start, stop = int(asked.split("-")[0]), int(asked.split("-")[1]) + 1
            head = f"HTTP/1.1 206 .\r\nContent-Length: {stop - start}\r\n\r\n"
            self.wfile.write(head.encode() + CONTENT[start:stop])


@pytest.fixture
def keeping() -> Iterator[str]:
    _Keeping.connections = 0
    with serving(_Keeping) as url:
        yield url


def test_a_connection_is_used_again_and_made_anew_once_the_server_has_closed_it(keeping: str) -> None:
    url = plain_url(*filesystem(f"{keeping}/a"))
    assert url is not None
    for start in range(0, 5000, 1000):
        answer = get_range(url, start, start + 100)
        assert (answer.status, answer.data) == (206, CONTENT[start : start + 100])
    assert _Keeping.connections == 3, "two answers each"


def test_a_failure_has_its_status_and_what_the_server_asks_for(site: Site) -> None:
    site.files["a"], site.failures = CONTENT, [(503, {"Retry-After": "7"})]
    url = plain_url(*filesystem(f"{site.url}/a"))
    assert url is not None
    with pytest.raises(RefusedError, match="503") as caught:
        get_range(url, 0, 10)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "7")


def test_a_server_that_redirects_is_left_to_the_driver_which_asks_what_may_be_fetched(site: Site, retry: Retry) -> None:
    with running_site() as store:
        store.files["a"] = site.files["a"] = CONTENT
        file = RangedFile(describe(f"{site.url}/a", retry), retry)
        site.failures = [(302, {"Location": f"{store.url}/a"})] * 3
        with granting(Access.of([], [site.url, store.url], local_urls=True)):
            assert file.read(10, 20) == file.read(10, 20) == CONTENT[10:20]
        assert len(site.gets) == 3, "the first, and two of the driver"
        assert site.url in ranges._redirecting


@pytest.mark.parametrize("url", ["http://me:secret@127.0.0.1:1/a", "http://me@127.0.0.1:1/a"])
def test_passwords_are_left_to_the_driver(url: str) -> None:
    assert plain_url(*filesystem(url)) is None


def test_settings_of_the_driver_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setitem(fsspec.config.conf, "http", {"headers": {"Authorization": "Bearer secret"}})
    assert plain_url(*filesystem("http://127.0.0.1:1/a")) is None


def test_drivers_that_are_not_there_are_no_reason_not_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(blob, "filesystem", lambda url: asked.append(url) or filesystem(url))
    urls = ["nonsense://bucket/", "reference://a", "http://127.0.0.1:1/"]
    load_drivers(urls)
    assert asked == urls, "those behind one that is not there too"


def test_a_path_is_asked_for_as_the_driver_writes_it(site: Site, cache: ShardCache) -> None:
    site.files["a%20b%C3%A9"] = bytes(200_000) + CONTENT
    with contextlib.closing(cache.open_in_parts(f"{site.url}/a bé", grouped=False)) as blob:
        assert blob.pread(200_000, 10) == CONTENT[:10]
