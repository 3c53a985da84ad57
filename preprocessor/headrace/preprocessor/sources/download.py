"""Identification and whole downloads of remote files, in spite of throttling and broken connections.

A transfer resumes at the byte where it broke. A server that does not support ranges is asked for the whole file again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import fsspec

from headrace.errors import HeadraceError
from headrace.observability import metrics
from headrace.observability.logs import pairs
from headrace.preprocessor.sources.blob import filesystem

log = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 2**20  # per request, large enough for its latency not to count
# The names under which fsspec drivers report a file's version and its times.
_VERSION_KEYS = ("ETag", "etag", "checksum", "version_id", "Last-Modified", "LastModified", "updated", "mtime", "created")
_RETRYABLE_STATUS = frozenset((408, 425, 429))  # worth a retry, as are all from 500 on; other 4xx answers are final
_THROTTLING_STATUS = frozenset((429, 503))
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, ValueError, HeadraceError)

_T = TypeVar("_T")


class DiskError(Exception):
    """A failure of the local disk rather than of the server; `__cause__` is the OSError."""


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn an OSError raised in the block into a DiskError."""
    try:
        yield
    except OSError as err:
        raise DiskError from err


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A remote file's URL, size and version, as its server describes it."""

    url: str
    size: int | None
    """Size in bytes; None where the server does not state it."""
    version: str
    """The server's entity tag, times and size in one string, which changes with the content as far as the server tells."""

    @property
    def key(self) -> str:
        """File name for this version of the file: 40 hexadecimal digits."""
        return hashlib.sha256(f"{self.url}\n{self.version}".encode()).hexdigest()[:40]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Policy for retrying requests that may yet succeed: exponential backoff, or the pause the server asks for."""

    attempts: int = 6
    first_pause_s: float = 0.5
    """Pause after the first attempt, doubled after each further one: with six attempts 15 s in all, as long as object stores
    take to scale up."""
    max_pause_s: float = 60.0
    """Longest pause, even where the server asks for more with Retry-After."""
    sleep: Callable[[float], None] = time.sleep

    def call(self, work: Callable[[], _T], what: str) -> _T:
        """Return `work()`, retried after errors for which `is_retryable`; `what` names it in the log.

        Raises the last error of `work` unchanged, whichever library it is from.
        """
        for attempt in range(1, self.attempts):
            try:
                return work()
            except Exception as err:
                if not is_retryable(err):
                    raise
                asked = retry_after_s(err, time.time())
                pause_s = min(asked if asked is not None else self.first_pause_s * 2 ** (attempt - 1), self.max_pause_s)
                log.warning(
                    "trying again %s", pairs(what=what, attempt=attempt, pause_s=pause_s, error=f"{type(err).__name__}: {err}")
                )
                metrics.DOWNLOAD_RETRIES.labels("throttled" if _http(err)[0] in _THROTTLING_STATUS else "failed").inc()
            metrics.DOWNLOAD_PAUSE_SECONDS.inc(pause_s)
            self.sleep(pause_s)
        return work()


def describe(url: str, retry: Retry) -> RemoteFile:
    """Ask the server for a file's size and version. Raises IsADirectoryError for a folder, else whatever the driver raises."""
    fs, path = filesystem(url)
    fs.invalidate_cache(path)
    info = retry.call(lambda: fs.info(path), url)
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{url} is a folder")
    version = " ".join(f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key) is not None)
    size = info.get("size")
    return RemoteFile(url=url, size=size, version=f"{version} size={size}")


def download(file: RemoteFile, sink: io.FileIO, max_bytes: int, retry: Retry) -> int:
    """Write a whole remote file into `sink` from its start and return the number of bytes.

    Raises DiskError where writing fails or more than `max_bytes` arrive, TimeoutError where the server keeps ending early,
    else whatever the driver raises.
    """
    fs, path = filesystem(file.url)
    transfer = _Transfer(fs, path, file.size, sink, max_bytes)
    retry.call(transfer.run, file.url)
    return transfer.done


class _Transfer:
    """A download in progress, which `run` resumes when called again after an error."""

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str, size: int | None, sink: io.FileIO, max_bytes: int) -> None:
        self._fs = fs
        self._path = path
        self._size = size
        self._sink = sink
        self._max_bytes = max_bytes
        self._ranges = size is not None
        self.done = 0

    def run(self) -> None:
        """Download the rest of the file. Raises TimeoutError where the server ends early."""
        try:
            self._copy()
        except ValueError:  # fsspec's error where the server does not support ranges
            if not self._ranges:
                raise
            self._ranges = False
            self._copy()
        if self._size is not None and self.done != self._size:
            raise TimeoutError(f"{self.done} of {self._size} bytes came")

    def _copy(self) -> None:
        if not self._ranges:
            self.done = 0
        with disk_errors():
            self._sink.seek(self.done)
        with self._fs.open(self._path, "rb", **({"cache_type": "none"} if self._ranges else {"block_size": 0})) as source:
            if self.done:
                source.seek(self.done)
            while data := source.read(CHUNK_BYTES):
                self.done += len(data)
                with disk_errors():
                    if self.done > self._max_bytes:
                        raise OSError(errno.EFBIG, f"more than {self._max_bytes} bytes come, of a size that was not told")
                    write_all(self._sink, data)


def write_all(sink: io.FileIO, data: bytes) -> None:
    """Write data at the place where a file is. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[sink.write(view) :]


def is_retryable(error: Exception) -> bool:
    """Whether the same request may succeed later: true for throttling, timeouts, broken connections; false for final answers."""
    if isinstance(error, DiskError | HeadraceError):
        return False
    status = _http(error)[0]
    if status is not None:
        return status >= 500 or status in _RETRYABLE_STATUS
    first = _first_cause(error)
    # botocore's errors are matched by name, since it may not be installed.
    return not isinstance(first, _FINAL) and type(first).__name__ not in ("NoCredentialsError", "PartialCredentialsError")


def retry_after_s(error: Exception, now_s: float) -> float | None:
    """Return the seconds from `now_s` (Unix time) that the server's Retry-After header asks to wait; None without one.

    The header holds a number of seconds or a date; one that is neither counts as absent.
    """
    value = _http(error)[1]
    if value is None:
        return None
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_s)
    except ValueError:
        return None


def _first_cause(error: BaseException) -> BaseException:
    """Follow an error's causes to the first: fsspec wraps any failure to describe an HTTP file in a FileNotFoundError."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _http(error: BaseException | None) -> tuple[int | None, str | None]:
    """Return the HTTP status and the Retry-After header from an aiohttp or botocore error among an error and its causes."""
    while error is not None:
        response: Any = getattr(error, "response", None)
        if isinstance(response, dict):
            answer = response.get("ResponseMetadata", {})
            return answer.get("HTTPStatusCode"), answer.get("HTTPHeaders", {}).get("retry-after")
        status = getattr(error, "status", None)
        if isinstance(status, int):
            return status, (getattr(error, "headers", None) or {}).get("Retry-After")
        error = error.__cause__
    return None, None
