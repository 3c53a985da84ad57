"""Ranges of files on web servers, over connections of our own: for half of the processor time of the driver's, which a job that
begins with a request for each sample of a remote tar has not to spare.

Only what is plain is done here: a range, or an answer that says why there is none. Redirections, passwords in URLs and settings
of the driver are left to the driver (`plain_request`, `RedirectedError`).
"""

from __future__ import annotations

import functools
import http.client
import ssl
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from headrace.preprocessor.sources.blob import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, web_client

PARTIAL, PRECONDITION_FAILED, NOT_SATISFIABLE = 206, 412, 416
IDLE_S = 15.0
"""Time for which a connection is kept; servers close them after a minute or so, those of Python after 5 s."""
_REDIRECTIONS, _FAILURES = range(300, 400), range(400, 600)
_BROKEN = (http.client.HTTPException, ConnectionError)


class RedirectedError(Exception):
    """Raised where a server says that a file is elsewhere."""


class RefusedError(Exception):
    """Raised where a server answers with a failure, which its status and headers describe."""

    def __init__(self, status: int, reason: str, headers: http.client.HTTPMessage) -> None:
        super().__init__(f"{status}, {reason}")
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRequest:
    """Where a file is: a server, and the path that it is asked for."""

    scheme: str
    host: str
    port: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server answers to a request for a range: its status, its headers and, if it is PARTIAL, the content."""

    status: int
    headers: Any
    """A mapping of names in any case, of the standard library or of the driver."""
    data: bytes


def plain_request(fs: Any, url: str) -> PlainRequest | None:
    """Return how to ask for a file of a web server; None where that takes what only its fsspec driver `fs` knows."""
    if fs.kwargs or fs.client_kwargs != web_client() or fs.get_client is not _usual_client():
        return None
    parts = fs.encode_url(url)
    if parts.raw_user or parts.raw_password or not parts.raw_host:
        return None
    return PlainRequest(scheme=parts.scheme, host=parts.raw_host, port=parts.port, path=parts.raw_path_qs)


@functools.cache
def _usual_client() -> Any:
    from fsspec.implementations import http as driver

    return driver.get_client


class Connections:
    """Connections to web servers, of which those that are idle are used again. Thread-safe."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str, int], deque[tuple[float, http.client.HTTPConnection]]] = {}

    def get(self, request: PlainRequest, start: int, stop: int) -> Answer:
        """Ask for the bytes from `start` to `stop` of a file.

        Raises RedirectedError or RefusedError for such answers, OSError or HTTPException where no answer comes.
        """
        idle = self._idle.setdefault((request.scheme, request.host, request.port), deque())
        while (connection := _kept(idle)) is not None:
            try:
                return _asked(connection, idle, request, start, stop)
            except _BROKEN:  # mostly since it was closed while it was idle, which tells nothing of the server
                connection.close()
        return _asked(_new(request), idle, request, start, stop)

    def close(self) -> None:
        """Close the connections that are idle."""
        for idle in self._idle.values():
            while idle:
                idle.pop()[1].close()


def _kept(idle: deque[tuple[float, http.client.HTTPConnection]]) -> http.client.HTTPConnection | None:
    """Take the connection that was used last; close those that have been idle for too long."""
    while True:
        try:
            since_s, connection = idle.pop()
        except IndexError:
            return None
        if time.monotonic() - since_s < IDLE_S:
            return connection
        connection.close()


def _new(request: PlainRequest) -> http.client.HTTPConnection:
    if request.scheme == "https":
        return http.client.HTTPSConnection(request.host, request.port, timeout=CONNECT_TIMEOUT_S, context=_tls())
    return http.client.HTTPConnection(request.host, request.port, timeout=CONNECT_TIMEOUT_S)


@functools.cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _asked(
    connection: http.client.HTTPConnection,
    idle: deque[tuple[float, http.client.HTTPConnection]],
    request: PlainRequest,
    start: int,
    stop: int,
) -> Answer:
    """Ask over a connection, which is closed or put among the idle ones when this returns or raises."""
    is_kept = False
    try:
        if connection.sock is None:
            connection.connect()
            socket: Any = connection.sock
            socket.settimeout(READ_TIMEOUT_S)
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity", "User-Agent": "headrace"}
        connection.request("GET", request.path, headers=headers)
        with connection.getresponse() as answer:
            if answer.status in _REDIRECTIONS:
                raise RedirectedError(request.host)
            if answer.status in _FAILURES and answer.status not in (PRECONDITION_FAILED, NOT_SATISFIABLE):
                raise RefusedError(answer.status, answer.reason, answer.headers)
            data = answer.read(stop - start) if answer.status == PARTIAL else b""
            is_kept = len(data) == stop - start and not answer.read(1) and not answer.will_close
            return Answer(status=answer.status, headers=answer.headers, data=data)
    finally:
        if is_kept:
            idle.append((time.monotonic(), connection))
        else:
            connection.close()
