"""Ranges of files on web servers, asked for by urllib3, which takes half of the processor time of fsspec's driver: a job that
begins on a remote tar asks for a range a sample.

Only what is plain is done here. Redirections, passwords in URLs and settings of the driver are left to the driver.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import urllib3

from headrace.preprocessor import access
from headrace.preprocessor.sources.blob import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, open_web_session, web_client

MOST_REQUESTS = 64
"""Requests of this process at a time, for whatever files: where each takes 50 ms, as many as its interpreter can make."""
PARTIAL, PRECONDITION_FAILED, NOT_SATISFIABLE = 206, 412, 416
_REDIRECTIONS, _FAILURES = range(300, 400), range(400, 600)


class RedirectedError(Exception):
    """Raised where a server says that a file is elsewhere."""


class RefusedError(Exception):
    """Raised where a server answers with a failure, which its status and headers describe."""

    def __init__(self, status: int, reason: str | None, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status}, {reason}")
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server answers to a request for a range: its status, its headers and, if it is PARTIAL, the content."""

    status: int
    headers: Mapping[str, str]
    """Names are found in any case."""
    data: bytes


def plain_url(fs: Any, url: str) -> str | None:
    """Return the URL to ask for a file of a web server; None where that takes what only its fsspec driver `fs` knows."""
    if fs.kwargs or fs.client_kwargs != web_client() or fs.get_client is not open_web_session:
        return None
    parts = fs.encode_url(url)
    return None if parts.raw_user or parts.raw_password or not parts.raw_host else str(parts)


def range_headers(start: int, stop: int) -> dict[str, str]:
    """Return the headers of a request for the bytes from `start` to `stop`, as they are in the file."""
    return {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}


def get_range(url: str, start: int, stop: int) -> Answer:
    """Ask for the bytes from `start` to `stop` of a file, over a connection that is kept.

    Raises RedirectedError or RefusedError for such answers, urllib3's HTTPError where no answer comes, and DatasetError where
    headrace.preprocessor.access forbids it.
    """
    answer = _pool().request("GET", url, headers=range_headers(start, stop), redirect=False, preload_content=False)
    try:
        if answer.status in _REDIRECTIONS:
            raise RedirectedError(url)
        if answer.status in _FAILURES and answer.status not in (PRECONDITION_FAILED, NOT_SATISFIABLE):
            raise RefusedError(answer.status, answer.reason, answer.headers)
        data = answer.read(stop - start) if answer.status == PARTIAL else b""
        if len(data) == stop - start and not answer.read(1):
            answer.release_conn()
        return Answer(status=answer.status, headers=answer.headers, data=data)
    finally:
        if answer.connection is not None:  # what is left of the content is not worth reading
            answer.close()


@cache
def _pool() -> urllib3.PoolManager:
    """Of connections. One that the server closed while it was idle is made anew."""
    once_more = urllib3.Retry(total=1, redirect=0, respect_retry_after_header=False)
    timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
    pool = urllib3.PoolManager(maxsize=MOST_REQUESTS, retries=once_more, timeout=timeout, headers={"User-Agent": "headrace"})
    pool.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
    return pool


class _Checked:
    """A connection that sends nothing to an address that jobs may not fetch from."""

    def _new_conn(self) -> socket.socket:
        connection: socket.socket = super()._new_conn()  # type: ignore[misc]
        try:
            access.check_address(str(connection.getpeername()[0]))
        except BaseException:
            connection.close()
            raise
        return connection


class _Connection(_Checked, urllib3.connection.HTTPConnection):
    pass


class _SecureConnection(_Checked, urllib3.connection.HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection
