"""Random access to the bytes of one file: pread for local files, a cache or a locked fsspec file for the rest."""

from __future__ import annotations

import io
import os
import threading
import weakref
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, BinaryIO, Protocol, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from headrace.errors import DatasetError
from headrace.preprocessor import access
from headrace.preprocessor.sources.base import check_size
from headrace.quarantine import BadSampleError

CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 60.0  # between two packets, not for a whole file
_CHUNK_BYTES = 16 * 2**20
_WEB = ("http://", "https://")


class Blob(ABC):
    """The bytes of one file. Reads are thread-safe; those of local files do not wait for each other.

    The file is closed by `close`, or when the last reference to the blob goes.
    """

    size: int

    @abstractmethod
    def pread(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file. Raises DatasetError."""

    @abstractmethod
    def close(self) -> None:
        """Release the file."""


class LocalBlob(Blob):
    """A local file that is already open; takes the file over."""

    def __init__(self, file: BinaryIO, url: str) -> None:
        self._file = file
        self._url = url
        self.size = os.fstat(file.fileno()).st_size
        weakref.finalize(self, file.close)

    @property
    def unlinked(self) -> bool:
        """Whether the file has lost its name, so that only those who have it open hold its space."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def pread(self, offset: int, size: int) -> bytes:
        """One system call, except above 2 GiB, where the system gives less at a time."""
        try:
            data = os.pread(self._file.fileno(), size, offset)
            while len(data) < size and (more := os.pread(self._file.fileno(), size - len(data), offset + len(data))):
                data += more
        except OSError as err:
            raise unreadable(self._url, err) from err
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RemoteBlob(Blob):
    """A file behind fsspec, read by ranges. Its buffering is the file system's; one read at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        try:
            fs, path = filesystem(url)
            self._file: BinaryIO = fs.open(path, "rb")
            weakref.finalize(self, self._file.close)
            self.size = self._file.seek(0, os.SEEK_END)
        except Exception as err:  # drivers raise their libraries' errors as well: aiohttp's, botocore's
            raise unreadable(url, err) from err

    def pread(self, offset: int, size: int) -> bytes:
        """Seek and read under the lock."""
        try:
            with self._lock:
                self._file.seek(offset)
                return self._file.read(size)
        except Exception as err:
            raise unreadable(self._url, err) from err

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class BlobReader(io.RawIOBase):
    """A blob as a file for libraries that want one. Does not close the blob."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._offset = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; returns the new offset."""
        self._offset = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._blob.size}[whence]
        return self._offset

    def tell(self) -> int:
        """The present offset."""
        return self._offset

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer; fewer bytes only at the end."""
        data = self._blob.pread(self._offset, len(buffer))
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)


class BlobCache(Protocol):
    """Keeps remote files on a local disk."""

    def open(self, url: str) -> Blob:
        """The file at `url`. Raises DatasetError."""


def open_blob(url: str, cache: BlobCache | None = None) -> Blob:
    """The file at a local path or fsspec URL, a remote one through `cache`.

    Raises DatasetError where it cannot be opened, or may not (headrace.preprocessor.access).
    """
    path = local_path(url)
    if path is None:
        return RemoteBlob(url) if cache is None else cache.open(url)
    try:
        return LocalBlob(access.open_local(path), url)
    except OSError as err:
        raise unreadable(url, err) from err


def read_url(url: str, max_bytes: int) -> bytes:
    """The whole of a file at a local path or fsspec URL. Raises DatasetError as `open_blob`, and where there is more of it."""
    try:
        return read_file(*filesystem(url), max_bytes)
    except DatasetError:
        raise
    except BadSampleError as err:
        raise DatasetError(f"{err.detail}, which is the most that is read; make it smaller") from err
    except Exception as err:  # drivers raise their libraries' errors as well
        raise DatasetError(f"cannot read {url}: {err}") from err


def read_file(fs: fsspec.AbstractFileSystem, path: str, max_bytes: int) -> bytes:
    """The whole of a file, of which no more than `max_bytes` and a little come into memory, whatever its server says.

    Raises BadSampleError (too_large) where there is more, DatasetError where the file may not be opened, else whatever the
    driver raises.
    """
    if isinstance(fs, LocalFileSystem):
        file = access.open_local(path)
        size: int | None = os.fstat(file.fileno()).st_size
    else:
        access.check_url(str(fs.unstrip_protocol(path)))
        # As one stream from the web, else by exactly the ranges that are read.
        file = fs.open(path, "rb", **({"block_size": 0} if path.startswith(_WEB) else {"cache_type": "none"}))
        size = getattr(file, "size", None)
    with file:
        check_size(path, size or 0, max_bytes)
        data = bytearray()
        while chunk := file.read(min(_CHUNK_BYTES, max_bytes + 1 - len(data))):
            data += chunk
            check_size(path, len(data), max_bytes)
    return bytes(data)


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL and the path in it.

    Raises DatasetError for what this process may not open, ImportError where its driver is not installed.
    """
    if local_path(url) is None or "::" in url:
        access.check_url(url)
    if url.startswith(_WEB):
        return cast(tuple[fsspec.AbstractFileSystem, str], fsspec.core.url_to_fs(url, client_kwargs=_web_client()))
    fs, path = fsspec.core.url_to_fs(url)
    if isinstance(fs, LocalFileSystem):
        access.check_path(path)
    return fs, path


@cache
def _web_client() -> dict[str, Any]:
    """Options of the web's client: always the same objects, so that its connections are shared."""
    import aiohttp  # comes with the driver; its own limit is five minutes for a whole file

    async def check(_session: aiohttp.ClientSession, _context: Any, request: aiohttp.TraceRequestRedirectParams) -> None:
        access.check_redirection(str(request.url), request.response.headers.get("Location", ""))

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
    return {"timeout": timeout, "trace_configs": [trace]}


def local_path(url: str) -> str | None:
    """The path behind a plain path or a file:// URL; None for any other URL."""
    if url.startswith(("file://", "local://")):
        return cast(str, fsspec.core.url_to_fs(url)[1])
    return None if "://" in url else url


def unreadable(url: str, error: Exception) -> DatasetError:
    """The error for a file that does not open or read."""
    what = str(error) or type(error).__name__
    if (cause := error.__cause__) is not None and str(cause) not in what:
        what += f": {cause}"
    return DatasetError(f"cannot read the shard {url}: {what}; check that it exists and that this process may read it")
