"""Random access to the bytes of one file: pread for local files, a cache or a locked fsspec file for the rest."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, BinaryIO, Protocol, cast

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from packaging.version import Version

from headrace.errors import DatasetError, UserError
from headrace.preprocessor import access
from headrace.preprocessor.sources.base import MAX_MEDIUM_BYTES, check_size
from headrace.quarantine import BadSampleError, Reason

CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 60.0  # between two packets, not for the whole file
_CHUNK_BYTES = 16 * 2**20
_WEB = ("http://", "https://")
_FSSPEC = Version("2026.6")  # the oldest whose drivers keep to `access`

Span = tuple[int, int]
"""Offset of the first byte of a part of a file, and of the first one behind it."""
Fill = Callable[[io.FileIO, Callable[[int], None]], None]
"""fill(file, reserve) writes a new file of a cache; it calls reserve(size) before it writes beyond the size reserved last."""


class Blob(ABC):
    """A read-only file of known size, local or remote. Reads are thread-safe, and concurrent for local files.

    The file is closed by `close`, or with the last reference to the blob.
    """

    size: int

    @property
    def version(self) -> str:
        """Name of the file with what changes with its content, as far as that is told; "" where nothing is known."""
        return ""

    @property
    def is_local(self) -> bool:
        """Whether the file is on a local disk, so that reading a little at a time costs little."""
        return False

    @abstractmethod
    def pread(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer only at the end of the file. Raises DatasetError where reading fails."""

    def view(self, offset: int, size: int) -> memoryview:
        """Return the same as `pread`. Of a local file nothing is read before it is touched, which must be done before others
        shorten the file."""
        return memoryview(self.pread(offset, size))

    def reader(self) -> Blob:
        """Return the blob for one more reader, who goes on from a place of its own."""
        return self

    def prefetch(self, spans: Sequence[Span]) -> None:  # noqa: B027 - most have nothing to do
        """Ask for spans that will be read soon, where that saves waiting. Never raises."""

    def fetch_whole(self) -> None:  # noqa: B027
        """Prepare to read all of the file. Raises DatasetError where that fails."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def arrow_file(self) -> pa.NativeFile:
        """Return a file over the blob for Arrow, with an offset of its own. Closing it does not close the blob."""
        return pa.PythonFile(BlobReader(self), mode="r")


class LocalBlob(Blob):
    """A blob over an open local file, which it takes over."""

    def __init__(self, file: BinaryIO, url: str) -> None:
        self._file = file
        self._url = url
        self.size = os.fstat(file.fileno()).st_size
        weakref.finalize(self, file.close)

    @property
    def version(self) -> str:
        """Absolute path, inode, time of modification and size."""
        status = os.fstat(self._file.fileno())
        path = os.path.abspath(local_path(self._url) or self._url)
        return f"{path} inode={status.st_ino} mtime={status.st_mtime_ns} size={status.st_size}"

    @property
    def is_local(self) -> bool:
        """True."""
        return True

    @property
    def unlinked(self) -> bool:
        """Whether the file has been unlinked, so that its space is freed once nobody has it open."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def pread(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` by one system call; above 2 GiB, which one call cannot return, by several."""
        try:
            data = os.pread(self._file.fileno(), size, offset)
            while len(data) < size and (more := os.pread(self._file.fileno(), size - len(data), offset + len(data))):
                data += more
        except OSError as err:
            raise unreadable_error(self._url, err) from err
        return data

    def view(self, offset: int, size: int) -> memoryview:
        """Map the bytes into memory, for as long as the result is referenced."""
        size = min(size, os.fstat(self._file.fileno()).st_size - offset)
        if size <= 0:
            return memoryview(b"")
        before = offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._file.fileno(), before + size, access=mmap.ACCESS_READ, offset=offset - before)
        return memoryview(mapped)[before:]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def arrow_file(self) -> pa.NativeFile:
        """Open the same file again, whatever its path leads to by now: Arrow reads it without the GIL, and without a copy."""
        return pa.OSFile(f"/proc/self/fd/{self._file.fileno()}")


class RemoteBlob(Blob):
    """A remote file, read in ranges through fsspec, which buffers it; a lock admits one read at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        try:
            fs, path = filesystem(url)
            self._file: BinaryIO = fs.open(path, "rb")
            weakref.finalize(self, self._file.close)
            self.size = self._file.seek(0, os.SEEK_END)
        except Exception as err:  # drivers raise their libraries' errors as well: aiohttp's, botocore's
            raise unreadable_error(url, err) from err

    def pread(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, once other reads of this blob are done."""
        try:
            with self._lock:
                self._file.seek(offset)
                return self._file.read(size)
        except Exception as err:
            raise unreadable_error(self._url, err) from err

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class BlobPart(Blob):
    """A range of bytes of another blob, which has to stay open."""

    def __init__(self, blob: Blob, offset: int, size: int) -> None:
        self._blob = blob
        self._offset = offset
        self.size = size

    def pread(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` in the range; fewer only at its end."""
        return self._blob.pread(self._offset + offset, max(0, min(size, self.size - offset)))

    def view(self, offset: int, size: int) -> memoryview:
        """Return the same as `pread`; see `Blob.view`."""
        return self._blob.view(self._offset + offset, max(0, min(size, self.size - offset)))

    def close(self) -> None:
        """Do nothing: the other blob is its owner's to close."""


class BlobReader(io.RawIOBase):
    """A file object over a blob, for libraries that need one. Closing it does not close the blob."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._offset = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to `offset`, counted from where `whence` says, and return the new absolute offset."""
        self._offset = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._blob.size}[whence]
        return self._offset

    def tell(self) -> int:
        """Return the current offset."""
        return self._offset

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` from the current offset and return the number of bytes read, smaller only at the end of the file."""
        data = self._blob.pread(self._offset, len(buffer))
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)


class BlobCache(Protocol):
    """The interface of a cache that keeps remote files, and what is made of files, on a local disk."""

    def __hash__(self) -> int:
        """Return the hash of the cache itself: two are equal if they are one."""

    def open(self, url: str) -> Blob:
        """Open the file at `url`, all of which will be read. Raises DatasetError where it cannot be read."""

    def open_in_parts(self, url: str, *, grouped: bool) -> Blob:
        """Open the same, of which only parts will be read, at least for now. `grouped`: whoever reads a sample reads those beside
        it too, as in a Parquet row group."""

    def find(self, key: str, url: str) -> Blob | None:
        """Open the file that was made under `key`; None if it is not there, or no more."""

    def medium(self, url: str, read: Callable[[], bytes]) -> bytes:
        """Return a medium that a row names, by `read` unless it is at hand. Raises what `read` raises."""

    def make(self, key: str, url: str, fill: Fill) -> Blob | None:
        """Open the file under `key`, made of the file at `url` by `fill` if it is not there; None where there is no room."""


def open_blob(url: str, cache: BlobCache | None = None, *, in_parts: bool = False, grouped: bool = False) -> Blob:
    """Open the file at a local path or fsspec URL, a remote one through `cache` if there is one.

    `in_parts`: only parts of it will be read. `grouped`: whoever reads a sample reads those beside it too (`BlobCache`).

    Raises DatasetError where the file cannot be opened or headrace.preprocessor.access forbids it.
    """
    path = local_path(url)
    if path is None:
        if cache is None:
            return RemoteBlob(url)
        return cache.open_in_parts(url, grouped=grouped) if in_parts else cache.open(url)
    try:
        return LocalBlob(access.open_local(path), url)
    except OSError as err:
        raise unreadable_error(url, err) from err


def read_url(url: str, max_bytes: int) -> bytes:
    """Read the whole file at a local path or fsspec URL.

    Raises DatasetError where it cannot be read, headrace.preprocessor.access forbids it, or it exceeds `max_bytes`.
    """
    try:
        return read_file(*filesystem(url), max_bytes)
    except DatasetError:
        raise
    except BadSampleError as err:
        raise DatasetError(f"{err.detail}, which is the most that is read; make it smaller") from err
    except Exception as err:  # drivers raise their libraries' errors as well
        raise DatasetError(f"cannot read {url}: {err}") from err


def read_row(blob: Blob, start: int, stop: int) -> bytes:
    """Return the bytes of a row, from its offset to that of the next one. Raises BadSampleError where they are not there."""
    if stop < start:
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"the row ends at byte {stop}, before its start at {start}")
    check_size("the row", stop - start, MAX_MEDIUM_BYTES)
    data = blob.pread(start, stop - start)
    if len(data) < stop - start:
        raise BadSampleError(Reason.ARCHIVE_TRUNCATED, f"{len(data)} of the row's {stop - start} bytes are there")
    return data


def read_file(fs: fsspec.AbstractFileSystem, path: str, max_bytes: int) -> bytes:
    """Read a whole file, bounding the memory at little more than `max_bytes` whatever size its server states.

    Raises BadSampleError (too_large) where the file exceeds `max_bytes`, DatasetError where headrace.preprocessor.access
    forbids to open it, else whatever the driver raises.
    """
    if isinstance(fs, LocalFileSystem):
        file = access.open_local(path)
        size: int | None = os.fstat(file.fileno()).st_size
    else:
        access.check_url(str(fs.unstrip_protocol(path)))
        # Read the web as one stream, which asks first for a size that it has no use for unless one is given; read other file
        # systems in exactly the ranges asked for.
        file = fs.open(path, "rb", **({"block_size": 0, "size": 1} if path.startswith(_WEB) else {"cache_type": "none"}))
        size = getattr(file, "size", None)
    with file:
        check_size(path, size or 0, max_bytes)
        data = bytearray()
        while chunk := file.read(min(_CHUNK_BYTES, max_bytes + 1 - len(data))):
            data += chunk
            check_size(path, len(data), max_bytes)
    return bytes(data)


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the fsspec file system of a path or URL, and the path within it.

    Raises DatasetError where this process may not open it, ImportError where its driver is not installed.
    """
    if local_path(url) is None or "::" in url:
        access.check_url(url)
    if url.startswith(_WEB):
        web = fsspec.core.url_to_fs(url, client_kwargs=web_client(), get_client=open_web_session)
        return cast(tuple[fsspec.AbstractFileSystem, str], web)
    fs, path = fsspec.core.url_to_fs(url)
    if isinstance(fs, LocalFileSystem):
        access.check_path(path)
    return fs, path


def check_fsspec(version: str) -> None:
    """Raise UserError where this version of fsspec is one that came with a library which asks for an older one."""
    if Version(version) < _FSSPEC:
        raise UserError(
            f"fsspec is {version}, and a preprocessor needs {_FSSPEC} or later: `pip install 'headrace[preprocessor]'`"
        )


def load_drivers(urls: Iterable[str]) -> None:
    """Load the drivers of URLs now, each of which takes up to a second, so that no job that begins waits for it.

    One that is not installed, or not known, is left to the job that names it.
    """
    for url in urls:
        with contextlib.suppress(ImportError, ValueError, DatasetError):
            filesystem(url)


def url_of(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """Return the absolute path, or the URL, of a path in a file system."""
    return os.path.abspath(path) if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(path))


@cache
def web_client() -> dict[str, Any]:
    """Return the options of the HTTP client; always the same objects, so that fsspec shares its connections."""
    import aiohttp  # comes with the driver; its default limit is five minutes for a whole file

    async def check(_session: aiohttp.ClientSession, _context: Any, request: aiohttp.TraceRequestRedirectParams) -> None:
        access.check_redirection(str(request.url), request.response.headers.get("Location", ""))

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
    return {"timeout": timeout, "trace_configs": [trace]}


async def open_web_session(**settings: Any) -> Any:
    """Return an aiohttp session with these settings, which connects to no address that jobs may not fetch from."""
    import aiohttp

    def connect(info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, proto, _, address = info
        access.check_address(str(address[0]))
        return socket.socket(family, kind, proto)

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=connect), **settings)


def local_path(url: str) -> str | None:
    """Return the path behind a plain path or a file:// URL; None for any other URL."""
    if url.startswith(("file://", "local://")):
        return cast(str, fsspec.core.url_to_fs(url)[1])
    return None if "://" in url else url


def is_remote(url: str) -> bool:
    """Whether a file has to be fetched from a server."""
    return "://" in url and not url.startswith("memory://") and local_path(url) is None


def unreadable_error(url: str, error: Exception) -> DatasetError:
    """Return the DatasetError to raise for a shard that cannot be opened or read, with `error` and its cause in the message."""
    what = str(error) or type(error).__name__
    if (cause := error.__cause__) is not None and str(cause) not in what:
        what += f": {cause}"
    return DatasetError(f"cannot read the shard {url}: {what}; check that it exists and that this process may read it")
