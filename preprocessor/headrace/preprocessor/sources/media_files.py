"""Media in files of their own, which rows name by paths.

A path is relative to the source's `media_root`, or else to the folder of the file that names it. On a local disk it may also be
below one of the folders _BESIDE that lie beside that file, if it is in one of these alone.

Absolute paths, ".." and symbolic links are followed where they end in that folder, in the source's folder, in `media_root`, in
a folder that the operator has declared (--data-root), or in the blobs of the same Hugging Face snapshot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
from collections.abc import Iterator
from typing import Protocol

from headrace.errors import DatasetError, HeadraceError
from headrace.preprocessor import access
from headrace.preprocessor.sources.base import MAX_MEDIUM_BYTES, check_size
from headrace.preprocessor.sources.blob import BlobCache, filesystem, local_path, read_file, unreadable_error
from headrace.preprocessor.sources.energon_selection import parse_selection
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec

# Errors of the system that are the sample's fault, because its path names nothing readable; others (EIO, EMFILE) are not.
_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP))
_BESIDE = ("images", "image", "data", "audio", "media", "clips", "wavs")
_GLOB = re.compile(r"[*?\[]")
_SNAPSHOT = re.compile(r"(.+)/snapshots/[^/]+(?:/|$)")


class MediaFiles(Protocol):
    """A place of media files."""

    def load(self, name: str) -> bytes:
        """Return the content of the file at the path `name` of a row; see `Record.load`."""


def media_files(url: str, source: SourceSpec | None = None, cache: BlobCache | None = None) -> MediaFiles:
    """Return where the media are that the file at `url`, a shard of `source`, names; remote ones are kept in `cache`.

    Raises DatasetError where headrace.preprocessor.access forbids to read there.
    """
    media_root = source.media_root if source else None
    folder = _folder_of(url)
    place = media_root or folder
    inside = _fixed_folder(parse_selection(source.path).root) if source else folder
    if local_path(place) is None:
        return _RemoteFiles(place, [place, folder, inside], cache)
    return _LocalFiles([one for one in (media_root, folder) if one and local_path(one) is not None], [place, folder, inside])


def files_below(folder: str) -> MediaFiles:
    """Return the files in a folder, a path or URL. Raises DatasetError where headrace.preprocessor.access forbids to read it."""
    return _RemoteFiles(folder, [folder]) if local_path(folder) is None else _LocalFiles([folder], [folder])


def _folder_of(url: str) -> str:
    path = local_path(url)
    return posixpath.dirname(url) if path is None else os.path.dirname(path) or "."


def _fixed_folder(path: str) -> str:
    """Return the folder that a source's path is or lies in; of a glob, that of the part before its first wildcard."""
    local = local_path(path)
    if local is not None and os.path.isdir(local):
        return local
    if found := _GLOB.search(path):
        path = path[: found.start()]
    return _folder_of(path) if local is not None or found else path


class _LocalFiles:
    """Media files on a local disk: relative to `bases`, and with their real locations below one of `roots`."""

    def __init__(self, bases: list[str], roots: list[str]) -> None:
        self._bases = [os.path.abspath(_local(base)) for base in bases]
        for base in self._bases:
            access.check_path(base)  # the file that names media may be a link to elsewhere
        local = [os.path.abspath(_local(root)) for root in roots if local_path(root) is not None]
        snapshots = [f"{found[1]}/blobs" for root in local if (found := _SNAPSHOT.match(root))]
        named = dict.fromkeys([*local, *snapshots])
        self._real = [*map(os.path.realpath, filter(_permitted, named)), *access.declared_roots()]
        self._lexical = [*named, *self._real]

    def load(self, name: str) -> bytes:
        _check_text(name)
        paths = [path for base in self._bases if self._is_inside(path := os.path.normpath(os.path.join(base, name)))]
        if not paths:
            remedy = "name the folder of its media as the source's media_root, or declare it with --data-root"
            raise _unsafe(name, f"leads outside of the data set; {remedy}")
        for path in paths:
            with contextlib.suppress(_AbsentError):
                return self._read(path, name)
        return self._beside(name)

    def _beside(self, name: str) -> bytes:
        """Read the file from the one folder beside the annotations that has it."""
        folder = self._bases[-1]
        below = not os.path.isabs(name) and ".." not in name.split("/")
        found = [one for one in _BESIDE if below and os.path.exists(os.path.join(folder, one, name))]
        if len(found) == 1:
            with contextlib.suppress(_AbsentError):
                return self._read(os.path.join(folder, found[0], name), name)
        several = f": {' and '.join(found)} have one, so" if len(found) > 1 else ";"
        raise BadSampleError(
            Reason.MISSING_MEDIA, f"no file {name!r} in {self._bases[0]}{several} say what it is relative to with media_root"
        )

    def _read(self, path: str, name: str) -> bytes:
        try:
            with access.open_inside(path, self._real) as file:
                size = os.fstat(file.fileno()).st_size
                check_size(repr(name), size, MAX_MEDIUM_BYTES)
                return file.read(size)
        except access.OutsideError as err:
            raise _unsafe(name, "leads outside of the data set through a link; name where to as the source's media_root") from err
        except access.IrregularError as err:
            raise BadSampleError(Reason.UNSUPPORTED_MEMBER_TYPE, f"{name!r} is {err}, not a regular file") from err
        except OSError as err:
            if err.errno in _ABSENT:
                raise _AbsentError from err
            raise unreadable_error(path, err) from err

    def _is_inside(self, path: str) -> bool:
        return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in self._lexical)


class _AbsentError(Exception):
    """Raised for a file that is not there."""


class _RemoteFiles:
    """Media files at URLs below `base`, read through fsspec; ".." leads no further than `roots`."""

    def __init__(self, base: str, roots: list[str], cache: BlobCache | None) -> None:
        self._cache = cache
        self._fs, self._base = filesystem(base)
        self._roots = list(dict.fromkeys(filesystem(root)[1].rstrip("/") for root in _beginning_alike(base, roots)))

    def load(self, name: str) -> bytes:
        _check_text(name)
        path = _joined(self._base, name)
        if name.startswith("/") or not any(path.startswith(f"{root}/") for root in self._roots):
            raise _unsafe(name, "leads outside of the data set; give the URL of its media as the source's media_root")
        if self._cache is None:
            return self._read(path, name)
        return self._cache.medium(str(self._fs.unstrip_protocol(path)), lambda: self._read(path, name))

    def _read(self, path: str, name: str) -> bytes:
        try:
            return read_file(self._fs, path, MAX_MEDIUM_BYTES)
        except FileNotFoundError as err:
            detail = f"no file {name!r} in {self._base}; say what it is relative to with media_root"
            raise BadSampleError(Reason.MISSING_MEDIA, detail) from err
        except HeadraceError:
            raise
        except Exception as err:  # drivers raise their libraries' errors as well
            raise unreadable_error(path, err) from err


def _beginning_alike(url: str, others: list[str]) -> Iterator[str]:
    protocol = url.partition("://")[0]
    return (other for other in others if other.partition("://")[0] == protocol and "://" in other)


def _joined(base: str, name: str) -> str:
    """Return the path of `name` below `base`, a path in a file system or, on the web, a URL; ".." is followed in it."""
    protocol, separator, rest = base.rpartition("://")
    return protocol + separator + posixpath.normpath(posixpath.join(rest, name))


def _check_text(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as err:
        raise BadSampleError(Reason.ENCODING_ERROR, f"the path {name!r} has no UTF-8 form") from err
    if "\0" in name or "://" in name:
        raise _unsafe(name, "is no path of a file in the data set")


def _unsafe(name: str, what: str) -> BadSampleError:
    return BadSampleError(Reason.UNSAFE_MEMBER_NAME, f"{name!r} {what}")


def _local(path: str) -> str:
    found = local_path(path)
    assert found is not None
    return found


def _permitted(path: str) -> bool:
    """Whether this process may read in a folder."""
    try:
        access.check_path(path)
    except DatasetError:
        return False
    return True
