"""A small server that has the page's files and recorded answers of a reorder service, and can fall silent or ask for a token."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mimetypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from headrace.reorder_service.page.static_files import STATIC, static_answers
from tests.http_site import serving

ROOT = Path(__file__).parents[2]
STATES = ROOT / "tests" / "data" / "page"
POLICY = static_answers()["/"].headers["Content-Security-Policy"]


@dataclass
class Service:
    """What the server answers. A test may change it while it runs."""

    documents: dict[str, Any] = field(default_factory=dict)
    """By path without its query, what the service answers."""
    silent: bool = False
    """Whether it breaks every connection off."""
    token: str = ""
    """The only one that is let in; empty: all are."""
    unchanged: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Counts the answers that were not sent because they are known."""
    url: str = ""

    @property
    def job(self) -> dict[str, Any]:
        """The first job's document."""
        return next(body for path, body in self.documents.items() if path.count("/") == 2)


def state(name: str) -> dict[str, Any]:
    """The recorded answers of a state."""
    found: dict[str, Any] = json.loads((STATES / f"{name}.json").read_text(encoding="utf-8"))
    return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, service: Service) -> None:
        self._service = service
        super().__init__(*args)

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0]).lstrip("/")
        if self._service.silent and path.startswith("api/"):
            self.close_connection = True
            return
        if path.startswith("api/"):
            self._api(path)
        else:
            self._file(STATIC / (path.removeprefix("static/") or "index.html"))

    def _api(self, path: str) -> None:
        service = self._service
        if service.token and self.headers.get("Authorization") != f"Bearer {service.token}":
            given = "The token is not one of this service" if "Authorization" in self.headers else "A token is asked for"
            self._send(401, json.dumps({"error": f"{given}: take one that `headrace certificates` wrote."}).encode())
        elif path in service.documents:
            self._send(200, json.dumps(service.documents[path]).encode())
        elif path.count("/") < 2:
            self._send(409, json.dumps({"error": "this service stands by: /api/service says who leads"}).encode())
        else:
            sentence = f"no job is called {path.split('/')[2]}: `headrace job list` has their names"
            self._send(404, json.dumps({"error": sentence}).encode())

    def _file(self, path: Path) -> None:
        if path.is_file():
            self._send(200, path.read_bytes(), mimetypes.guess_type(path)[0] or "application/octet-stream")
        else:
            self._send(404, b"")

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        if status == 200 and self.headers.get("If-None-Match") == etag:
            self._service.unchanged.release()
            status, body = 304, b""
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "ETag": etag,
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def canned_service(name: str = "running") -> Iterator[Service]:
    """A server in a state, during the block."""
    service = Service(documents=state(name))
    with serving(partial(_Handler, service=service)) as service.url:
        yield service
