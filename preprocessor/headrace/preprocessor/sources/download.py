"""Remote files: what identifies one, and how its bytes come down whole in spite of throttling and broken connections.

A transfer goes on at the byte where it broke. A server that takes no ranges is asked for the whole file again.
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

CHUNK_BYTES = 16 * 2**20  # of one request: large enough that its latency does not count
# What drivers call the version and the time of a file.
_VERSION_KEYS = ("ETag", "etag", "checksum", "version_id", "Last-Modified", "LastModified", "updated", "mtime", "created")
_PASSING_STATUS = frozenset((408, 425, 429))  # and all from 500 on; other answers of 4xx stay what they are
_THROTTLING_STATUS = frozenset((429, 503))
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, ValueError, HeadraceError)

_T = TypeVar("_T")


class DiskError(Exception):
    """The disk of this machine failed, not the server; the cause says how."""


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """An OSError in the block is the disk's: raises DiskError."""
    try:
        yield
    except OSError as err:
        raise DiskError from err


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file as its server describes it."""

    url: str
    size: int | None
    """Bytes; None where the server does not tell."""
    version: str
    """Changes when the content does, as far as the server tells: from its entity tag, times and size."""

    @property
    def key(self) -> str:
        """A file name for this version of it."""
        return hashlib.sha256(f"{self.url}\n{self.version}".encode()).hexdigest()[:40]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """When to try again what a server has refused for now."""

    attempts: int = 6
    first_pause_s: float = 0.5
    """Doubles with every attempt. With six attempts that is 15 s in all, what object stores take to scale up."""
    max_pause_s: float = 60.0
    """Also of what a server asks for with Retry-After."""
    sleep: Callable[[float], None] = time.sleep

    def call(self, work: Callable[[], _T], what: str) -> _T:
        """`work()`, again after failures that may pass. Raises its last error, of whatever library that is."""
        for attempt in range(1, self.attempts):
            try:
                return work()
            except Exception as err:
                if not may_pass(err):
                    raise
                asked = retry_after_s(err, time.time())
                pause_s = min(asked if asked is not None else self.first_pause_s * 2 ** (attempt - 1), self.max_pause_s)
                log.warning("trying again %s", pairs(what=what, attempt=attempt, pause_s=pause_s, error=repr(err)))
                metrics.DOWNLOAD_RETRIES.labels("throttled" if _http(err)[0] in _THROTTLING_STATUS else "failed").inc()
            metrics.DOWNLOAD_PAUSE_SECONDS.inc(pause_s)
            self.sleep(pause_s)
        return work()


def describe(url: str, retry: Retry) -> RemoteFile:
    """Ask for a file's size and version. Raises whatever the driver raises."""
    fs, path = filesystem(url)
    fs.invalidate_cache(path)
    info = retry.call(lambda: fs.info(path), url)
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{url} is a folder")
    version = " ".join(f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key) is not None)
    size = info.get("size")
    return RemoteFile(url=url, size=size, version=f"{version} size={size}")


def download(file: RemoteFile, sink: io.FileIO, max_bytes: int, retry: Retry) -> int:
    """Write a file into `sink` from its start; the number of bytes.

    Raises DiskError where `sink` fails or more than `max_bytes` come, else whatever the driver raises; TimeoutError for a
    server that keeps ending early.
    """
    fs, path = filesystem(file.url)
    transfer = _Transfer(fs, path, file.size, sink, max_bytes)
    retry.call(transfer.run, file.url)
    return transfer.done


class _Transfer:
    """A file on its way; `run` may be called again after an error."""

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str, size: int | None, sink: io.FileIO, max_bytes: int) -> None:
        self._fs = fs
        self._path = path
        self._size = size
        self._sink = sink
        self._max_bytes = max_bytes
        self._ranges = size is not None
        self.done = 0

    def run(self) -> None:
        """Go on until the end."""
        try:
            self._copy()
        except ValueError:  # so fsspec says that the server takes no ranges
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
                    _write(self._sink, data)


def _write(sink: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[sink.write(view) :]


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: throttling, timeouts and broken connections, not what the answer settles."""
    if isinstance(error, DiskError | HeadraceError):
        return False
    status = _http(error)[0]
    if status is not None:
        return status >= 500 or status in _PASSING_STATUS
    first = _first_cause(error)
    # The names are botocore's, which not everybody has installed.
    return not isinstance(first, _LASTING) and type(first).__name__ not in ("NoCredentialsError", "PartialCredentialsError")


def retry_after_s(error: Exception, now_s: float) -> float | None:
    """Seconds from `now_s` (Unix time) that the server asks to wait, from its Retry-After header: a number or a date."""
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
    """fsspec calls any failure to describe an HTTP file a FileNotFoundError; what happened is its cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _http(error: BaseException | None) -> tuple[int | None, str | None]:
    """Status and Retry-After behind an error: in aiohttp's attributes or botocore's response, or those of its cause."""
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
