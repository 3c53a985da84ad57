"""Files behind HTTP: a server that does as a test says, and tells what it was asked for."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE_S = 30


@dataclass
class Site:
    """What a server has, how it behaves, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    """By name; one that ends in a slash is the page of a folder."""
    heads: bool = True
    """Whether it answers HEAD."""
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
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of each file, at most: who goes away in the middle has had fewer."""
    described: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Counts the answers to HEAD."""
    most_at_a_time: int = 0
    """GETs that were being answered at the same time, at most."""
    busy: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Counts the GETs that have come in."""
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, *args: Any, site: Site) -> None:
        self._site = site
        super().__init__(*args)

    def do_HEAD(self) -> None:
        if self._site.heads:
            self._answer(body=False)
        else:
            self._refuse(405, {})
        self._site.described.release()

    def do_GET(self) -> None:
        site = self._site
        with site.lock:
            site.busy += 1
            site.most_at_a_time = max(site.most_at_a_time, site.busy)
        try:
            self._get(site)
        finally:
            with site.lock:
                site.busy -= 1

    def _get(self, site: Site) -> None:
        site.gets.append(self.headers.get("Range", ""))
        site.asked.release()
        if site.gate is not None:
            site.gate.wait(PATIENCE_S)
        if site.failures:
            self._refuse(*site.failures.pop(0))
        else:
            self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        name = self.path.removeprefix("/")
        data = self._site.files.get(name)
        if data is None:
            self._refuse(404, {})
            return
        kind = "text/html" if name.endswith("/") else "application/octet-stream"
        headers = {"Content-Type": kind, "ETag": f'"{hash(data)}"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self._site.ranges else None
        if asked:
            first, total = int(asked[1]), len(data)
            data = data[first : int(asked[2]) + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(data) - 1}/{total}"
        if self._site.sizes:
            headers["Content-Length"] = str(len(data))
        if body:
            data = data[: self._site.cuts.pop(0)] if self._site.cuts else data
            self._site.sent[name] += len(data)  # first: a test may look as soon as it has the headers
        self._begin(206 if asked else 200, headers)
        if body:
            self.wfile.write(data)

    def _refuse(self, status: int, headers: dict[str, str]) -> None:
        self._begin(status, {"Content-Length": "0", **headers})

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    """Says nothing of clients that go away."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[str]:
    """A server of the standard library on this machine, during the block. Its URL."""
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def running_site() -> Iterator[Site]:
    """A site that is empty yet."""
    site = Site()
    with serving(partial(_Handler, site=site)) as site.url:
        yield site
