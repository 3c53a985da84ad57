"""JSONL files beside media files: one annotation a line, media as paths relative to the JSONL's folder.

Every line that is not blank is a row, whose key is the line's number from 0, counting blank lines. Reading a line that is not
JSON raises BadSampleError and leaves the other rows readable. A path that leads outside of the folder (absolute, with "..",
or through a symbolic link) is rejected as unsafe_member_name, and only regular files are opened.
"""

from __future__ import annotations

import errno
import os
import posixpath
from array import array

from headrace.errors import HeadraceError
from headrace.preprocessor import access
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.annotation import parse_annotation
from headrace.preprocessor.sources.base import MAX_ANNOTATION_BYTES, MAX_MEDIUM_BYTES, Shard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, filesystem, local_path, open_blob, read_file, unreadable_error
from headrace.quarantine import BadSampleError, Reason

_CHUNK_BYTES = 2**20
# Errors of the system that are the sample's fault, because its path names nothing readable; others (EIO, EMFILE) are not.
_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP))


class JsonlShard(Shard):
    """A shard that is one JSONL file, with a row for each line that is not blank."""

    def __init__(self, url: str, cache: BlobCache | None = None) -> None:
        self._blob = open_blob(url, cache)
        self._media: _LocalFolder | _RemoteFolder = _folder(url)
        self._lines, self._starts = _index_lines(self._blob)
        self.num_rows = len(self._lines)
        self.rejected = ()

    def key(self, row: int) -> str:
        """Return the number of the row's line, from 0, as a string."""
        return str(self._lines[row])

    def read(self, row: int) -> Record:
        """Return the record in the line of `row`. Raises BadSampleError where the line is damaged or too large."""
        start, stop = self._starts[2 * row], self._starts[2 * row + 1]
        check_size("the line", stop - start, MAX_ANNOTATION_BYTES)
        fields = parse_annotation(self._blob.pread(start, stop - start), "the line")
        return Record(key=self.key(row), fields=fields, load=self._media.load)

    def close(self) -> None:
        """Close the file."""
        self._blob.close()


def _index_lines(blob: Blob) -> tuple[array[int], array[int]]:
    """Return the numbers of the n lines that are not blank, (n,), and their bounds in bytes as start, stop, start, ..., (2n,).

    Reads the file once, in chunks.
    """
    lines, bounds = array("q"), array("q")
    number = start = offset = 0
    blank = True
    while chunk := blob.pread(offset, _CHUNK_BYTES):
        position = 0
        while True:
            newline = chunk.find(b"\n", position)
            end = len(chunk) if newline < 0 else newline
            blank = blank and not chunk[position:end].strip()
            if newline < 0:
                break
            if not blank:
                lines.append(number)
                bounds.extend((start, offset + newline))
            number, start, blank, position = number + 1, offset + newline + 1, True, newline + 1
        offset += len(chunk)
    if not blank:
        lines.append(number)
        bounds.extend((start, offset))
    return lines, bounds


def _folder(url: str) -> _LocalFolder | _RemoteFolder:
    path = local_path(url)
    return _RemoteFolder(url) if path is None else _LocalFolder(os.path.dirname(path))


class _LocalFolder:
    """Media files below the local folder of a JSONL file."""

    def __init__(self, path: str) -> None:
        self._root = os.path.realpath(path)
        access.check_path(self._root)  # the JSONL file may be a link to elsewhere

    def load(self, name: str) -> bytes:
        path = os.path.join(self._root, _inside(name))
        try:
            with access.open_inside(path, [self._root]) as file:
                size = os.fstat(file.fileno()).st_size
                check_size(repr(name), size, MAX_MEDIUM_BYTES)
                return file.read(size)
        except access.OutsideError as err:
            raise BadSampleError(Reason.UNSAFE_MEMBER_NAME, f"{name!r} leads outside of the data set through a link") from err
        except access.IrregularError as err:
            raise BadSampleError(Reason.UNSUPPORTED_MEMBER_TYPE, f"{name!r} is {err}, not a regular file") from err
        except OSError as err:
            if err.errno in _ABSENT:
                raise BadSampleError(Reason.MISSING_MEDIA, f"no file {name!r} beside the JSONL file: {err.strerror}") from err
            raise unreadable_error(path, err) from err


class _RemoteFolder:
    """Media files below the remote folder of a JSONL file, read through fsspec."""

    def __init__(self, url: str) -> None:
        self._fs, path = filesystem(url)
        self._root = posixpath.dirname(path)

    def load(self, name: str) -> bytes:
        path = posixpath.join(self._root, _inside(name))
        try:
            return read_file(self._fs, path, MAX_MEDIUM_BYTES)
        except FileNotFoundError as err:
            raise BadSampleError(Reason.MISSING_MEDIA, f"no file {name!r} beside the JSONL file") from err
        except HeadraceError:
            raise
        except Exception as err:  # drivers raise their libraries' errors as well
            raise unreadable_error(path, err) from err


def _inside(name: str) -> str:
    """Return `name` if it is a relative path without "..", else raise BadSampleError (unsafe_member_name or encoding_error)."""
    try:
        name.encode()
    except UnicodeEncodeError as err:
        raise BadSampleError(Reason.ENCODING_ERROR, f"the path {name!r} has no UTF-8 form") from err
    if name.startswith("/") or ".." in name.split("/") or "\0" in name or "://" in name:
        raise BadSampleError(Reason.UNSAFE_MEMBER_NAME, f"{name!r} leads outside of the data set")
    return name
