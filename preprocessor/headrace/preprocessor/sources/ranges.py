"""Requests for ranges of bytes of remote files: few at a time, over connections that are kept, tried again like whole downloads.

A file that has changed since it was described is told by its entity tag or its size. A server that answers with whole files is
remembered, and not asked for ranges again.
"""

from __future__ import annotations

import functools
import re
import threading
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import sync

from headrace.errors import DatasetError
from headrace.observability import metrics
from headrace.preprocessor.sources.blob import filesystem, unreadable_error
from headrace.preprocessor.sources.download import RemoteFile, Retry
from headrace.preprocessor.sources.range_requests import (
    MOST_REQUESTS,
    NOT_SATISFIABLE,
    PARTIAL,
    PRECONDITION_FAILED,
    Answer,
    RedirectedError,
    get_range,
    plain_url,
    range_headers,
)

_WEB = ("http://", "https://")
_ETAG = re.compile(r"ETag=(\S+)")
_slots = threading.BoundedSemaphore(MOST_REQUESTS)
_without_ranges: set[str] = set()
_redirecting: set[str] = set()


class NoRangesError(Exception):
    """Raised where a server does not send ranges of a file."""


class RangedFile:
    """A remote file, as its server described it, whose ranges can be asked for. Thread-safe."""

    def __init__(self, file: RemoteFile, retry: Retry) -> None:
        """`file` must be of a size that is known."""
        self._file = file
        self._retry = retry
        self._lock = threading.Lock()
        self._opened: Any = None

    def read(self, start: int, stop: int, *, once: bool = False) -> bytes:
        """Return the bytes from `start` to `stop`, both within the file. `once`: a request that fails is not made again.

        Raises NoRangesError, or DatasetError where reading fails or the file has changed.
        """
        if not sends_ranges(self._file.url):
            raise NoRangesError(self._file.url)
        try:
            data = self._request(start, stop) if once else self._retry.call(lambda: self._request(start, stop), self._file.url)
        except (NoRangesError, DatasetError):
            raise
        except Exception as err:  # drivers raise their libraries' errors as well
            if type(err).__name__ == "FileExpired":  # s3fs, which is not installed everywhere
                raise changed_error(self._file.url) from err
            raise unreadable_error(self._file.url, err) from err
        metrics.RANGE_REQUESTS.inc()
        metrics.RANGE_BYTES.inc(len(data))
        return data

    def _request(self, start: int, stop: int) -> bytes:
        fs, path = self._driver
        with _slots:
            if path.startswith(_WEB):
                data = _content(self._answer(fs, path, start, stop), self._file)
            elif hasattr(handle := self._handle(fs, path), "_fetch_range"):
                data = handle._fetch_range(start, stop)  # stateless, where reading moves the file's position
            else:
                data = fs.cat_file(path, start=start, end=stop)
        if len(data) != stop - start:
            raise TimeoutError(f"{len(data)} of {stop - start} bytes came")
        return data

    @functools.cached_property
    def _driver(self) -> tuple[fsspec.AbstractFileSystem, str]:
        return filesystem(self._file.url)

    @functools.cached_property
    def _plain(self) -> str | None:
        return plain_url(*self._driver)

    def _answer(self, fs: Any, url: str, start: int, stop: int) -> Answer:
        """Ask a web server for a range, by its driver only where something is particular about it."""
        if self._plain is not None and _server(url) not in _redirecting:
            try:
                return get_range(self._plain, start, stop)
            except RedirectedError:
                _redirecting.add(_server(url))
        answer: Answer = sync(fs.loop, _get, fs, url, start, stop)
        return answer

    def _handle(self, fs: fsspec.AbstractFileSystem, path: str) -> Any:
        """Return the file opened by its driver, which then refuses to read another version of it, if it knows versions."""
        with self._lock:
            if self._opened is None:
                self._opened = fs.open(path, "rb", cache_type="none")
            return self._opened


def sends_ranges(url: str) -> bool:
    """Whether a server is not known to send whole files only."""
    return _server(url) not in _without_ranges


def changed_error(url: str) -> DatasetError:
    """Return the error to raise for a file that is not the one any more that was indexed."""
    return DatasetError(f"the shard {url} has changed since it was indexed; submit the job again")


def _content(answer: Answer, file: RemoteFile) -> bytes:
    """Return the content of an answer. Raises NoRangesError, or DatasetError where the file has changed."""
    tag = _ETAG.search(file.version)
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if (
        answer.status in (NOT_SATISFIABLE, PRECONDITION_FAILED)
        or (tag and answer.headers.get("ETag", tag[1]) != tag[1])
        or (total.isdigit() and int(total) != file.size)
    ):
        raise changed_error(file.url)
    if answer.status != PARTIAL:
        _without_ranges.add(_server(file.url))
        raise NoRangesError(file.url)
    return answer.data


async def _get(fs: Any, url: str, start: int, stop: int) -> Answer:
    """Ask a web server for a range by its driver."""
    options = dict(fs.kwargs)
    options["headers"] = {**options.get("headers", {}), **range_headers(start, stop)}
    session = await fs.set_session()
    async with session.get(fs.encode_url(url), **options) as answer:
        if answer.status not in (NOT_SATISFIABLE, PRECONDITION_FAILED):
            answer.raise_for_status()
        data = await answer.read() if answer.status == PARTIAL else b""
        return Answer(status=answer.status, headers=answer.headers, data=data)


def _server(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
