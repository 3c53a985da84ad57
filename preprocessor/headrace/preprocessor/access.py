"""What this process may open for a job: files below some folders, and URLs that begin in some ways.

Who may submit a job names its paths and URLs, and they are opened with the rights of the preprocessor. So everything that a
job or a data set names is opened through here: shards, media beside them, indexes, descriptions of data sets, tokenizers.

A local file is judged by where it really is, once it is open: links and ".." lead nowhere else. It must be a regular file,
since a pipe makes its reader wait for ever and a device never ends. A URL is judged by its beginning, where a redirection
leads too, and may not chain protocols ("zip::s3://..."). `reference://` is never taken: what it names is a program.

A process may open everything until it says less, with `granting`.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urljoin

from headrace.errors import DatasetError, UserError

USUAL_URLS = ("s3://", "s3a://", "gs://", "gcs://", "https://")
_NEVER = frozenset(("reference", "file", "local"))  # of URLs: what is local is judged as a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Folders and beginnings of URLs that may be read."""

    roots: tuple[str, ...] = ("/",)
    """Without links in them."""
    urls: tuple[str, ...] | None = USUAL_URLS
    """Each ends at a "/" or is taken to: "s3://bucket" is not "s3://bucket-of-others". None: any."""

    @classmethod
    def of(cls, roots: Sequence[Path], urls: Sequence[str]) -> Access:
        """As an operator names them. Raises UserError for a root that is no folder, or what is no beginning of a URL."""
        for root in roots:
            if not root.is_dir():
                raise UserError(f"--data-root {root} is no folder; make it, or name another one")
        for url in urls:
            scheme, separator, _ = url.partition("://")
            if not separator or "::" in url or scheme in _NEVER:
                raise UserError(
                    f"--allow-url {url} is no beginning of a URL, for example s3://bucket/ (for local files: --data-root)"
                )
        return cls(roots=tuple(os.path.realpath(root) for root in roots), urls=tuple(urls))


EVERYTHING = Access(urls=None)
"""For who names himself what is opened."""
NOTHING = Access(roots=(), urls=())
_granted = EVERYTHING


@contextlib.contextmanager
def granting(access: Access) -> Iterator[None]:
    """This process, with all of its threads, may open no more than that during the block."""
    global _granted
    before, _granted = _granted, access
    try:
        yield
    finally:
        _granted = before


class IrregularError(Exception):
    """A file that is none: a folder, pipe, socket or device."""


class OutsideError(Exception):
    """A file that really lies outside of the folders that may be read."""


def check_url(url: str) -> None:
    """Raises DatasetError for a URL that may not be fetched."""
    if "::" in url or url.partition("://")[0] in _NEVER:
        raise DatasetError(f"{url} chains protocols or holds references, which is not taken; name the files themselves")
    leads_up = ".." in unquote(url).split("/")
    beginnings = _granted.urls
    if beginnings is not None and (leads_up or not any(f"{url}/".startswith(f"{one.rstrip('/')}/") for one in beginnings)):
        allowed = f"URLs there begin with {', '.join(beginnings)}" if beginnings else "it may fetch no URL"
        raise DatasetError(f"{url} is not for this process to fetch: {allowed}; start the preprocessor with --allow-url PREFIX")


def check_redirection(url: str, location: str) -> None:
    """Raises DatasetError where a server that answers for `url` names a `location` that may not be fetched."""
    check_url(urljoin(url, location))


def check_path(path: str) -> None:
    """Raises DatasetError for a local path or glob that leads out of the folders that may be read, by links or by ".."."""
    fixed, magic = path, ""
    if not os.path.lexists(path) and (found := re.search(r"[*?\[]", path)):
        fixed, magic = os.path.dirname(path[: found.start()]), path[found.start() :]
    if ".." in magic.split("/") or not _inside(os.path.realpath(fixed), _granted.roots):
        raise _outside(path)


def open_local(path: str) -> BinaryIO:
    """A local file that may be read. Raises DatasetError where it may not, OSError where it cannot be opened."""
    try:
        return open_inside(path, _granted.roots)
    except OutsideError as err:
        raise _outside(path) from err
    except IrregularError as err:
        raise DatasetError(f"{path} is {err}; only regular files are read") from err


def open_inside(path: str, roots: Sequence[str]) -> BinaryIO:
    """A regular file that lies below one of `roots`. Raises OutsideError, IrregularError or OSError.

    What is there may be exchanged at any time: what counts is the file that is open. Opening waits for nobody.
    """
    _check_regular(os.stat(path).st_mode)  # before it is opened: a device may do something then
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor).st_mode)
        if not _inside(os.readlink(f"/proc/self/fd/{descriptor}"), roots):
            raise OutsideError(path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise IrregularError("a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device")


def _inside(path: str, roots: Sequence[str]) -> bool:
    return any(root == "/" or path == root or path.startswith(f"{root}/") for root in roots)


def _outside(path: str) -> DatasetError:
    allowed = f"it may read below {', '.join(_granted.roots)}" if _granted.roots else "it may read no local file"
    return DatasetError(f"{path} is not for this process to read: {allowed}; start the preprocessor with --data-root DIR")
