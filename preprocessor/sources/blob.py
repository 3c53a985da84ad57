"""Random access to the bytes of one file: pread for local files, a locked fsspec file for the rest."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from typing import BinaryIO, cast

import fsspec

from headrace.errors import DatasetError


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
    """A file behind fsspec. Its buffering is the file system's; one read at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        try:
            self._file: BinaryIO = fsspec.open(url, "rb").open()
            weakref.finalize(self, self._file.close)
            self.size = self._file.seek(0, os.SEEK_END)
        except OSError as err:
            raise unreadable(url, err) from err

    def pread(self, offset: int, size: int) -> bytes:
        """Seek and read under the lock."""
        try:
            with self._lock:
                self._file.seek(offset)
                return self._file.read(size)
        except OSError as err:
            raise unreadable(self._url, err) from err

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_blob(url: str) -> Blob:
    """The file at a local path or fsspec URL. Raises DatasetError where it cannot be opened."""
    path = local_path(url)
    if path is None:
        return RemoteBlob(url)
    try:
        return LocalBlob(open(path, "rb"), url)
    except OSError as err:
        raise unreadable(url, err) from err


def local_path(url: str) -> str | None:
    """The path behind a plain path or a file:// URL; None for any other URL."""
    if url.startswith(("file://", "local://")):
        return cast(str, fsspec.core.url_to_fs(url)[1])
    return None if "://" in url else url


def unreadable(url: str, error: OSError) -> DatasetError:
    """The error for a file that does not open or read."""
    return DatasetError(f"cannot read the shard {url}: {error}; check that it exists and that this process may read it")
