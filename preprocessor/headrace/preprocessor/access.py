"""Access control: the local folders and URL prefixes that this process may open on behalf of jobs.

Whoever submits a job names its paths and URLs, and they are opened with the rights of the preprocessor. So everything that a
job or a data set names is opened through this module: shards, media beside them, indexes, descriptions of data sets, tokenizers.

A local file is judged by its real location once it is open, so links and ".." cannot lead out of the folders. It must be a
regular file, since a pipe makes its reader wait for ever and a device never ends. A URL is judged by its prefix, and so is the
target of a redirection; it may not chain protocols ("zip::s3://..."). `reference://` is always refused: it names a program.
A host on loopback or on the link is refused by its address (headrace.preprocessor.local_addresses), that of a web server
by the address that a connection goes to: services there trust whoever is near, and clouds tell a machine its secrets there.

Until `granting` restricts it, a process may open any other file or URL.
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
from urllib.parse import unquote, urljoin, urlsplit

from headrace.errors import DatasetError, UserError
from headrace.preprocessor.local_addresses import is_local_address, local_address_of

USUAL_URLS = ("s3://", "s3a://", "gs://", "gcs://", "https://")
_NEVER = frozenset(("reference", "file", "local"))  # URL schemes that are always refused; local files are named by plain paths
_WEB = ("http", "https")
_OF_HOSTS = frozenset((*_WEB, "ftp", "ftps", "sftp", "ssh", "smb", "webhdfs", "hdfs", "webdav", "dav", "davs"))
"""URL schemes whose URLs name a host. The others' name a bucket, whose host is set by the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The folders and URL prefixes that may be read."""

    roots: tuple[str, ...] = ("/",)
    """Real paths of the folders, without symbolic links."""
    urls: tuple[str, ...] | None = USUAL_URLS
    """URL prefixes, each taken to end with "/": "s3://bucket" does not allow "s3://bucket-of-others". None allows any URL."""
    local_urls: bool = False
    """Whether URLs may name loopback, or what is on this machine's link only."""

    @classmethod
    def of(cls, roots: Sequence[Path], urls: Sequence[str], *, local_urls: bool = False) -> Access:
        """Build it from an operator's folders and URL prefixes. Raises UserError for a root or prefix that is not one."""
        for root in roots:
            if not root.is_dir():
                raise UserError(f"--data-root {root} is no folder; make it, or name another one")
        for url in urls:
            scheme, separator, _ = url.partition("://")
            if not separator or "::" in url or scheme in _NEVER:
                raise UserError(
                    f"--allow-url {url} is no beginning of a URL, for example s3://bucket/ (for local files: --data-root)"
                )
        return cls(roots=tuple(os.path.realpath(root) for root in roots), urls=tuple(urls), local_urls=local_urls)


EVERYTHING = Access(urls=None, local_urls=True)
"""No restriction, for processes whose own user names what is opened; the default."""
NOTHING = Access(roots=(), urls=())
_granted = EVERYTHING


@contextlib.contextmanager
def granting(access: Access) -> Iterator[None]:
    """Let this process, with all of its threads, open only what `access` allows during the block."""
    global _granted
    before, _granted = _granted, access
    try:
        yield
    finally:
        _granted = before


def declared_roots() -> tuple[str, ...]:
    """Return the real paths of the folders that an operator has named; none where any local file may be read."""
    return tuple(root for root in _granted.roots if root != "/")


class ForbiddenError(DatasetError):
    """Raised for a path or URL that a job names and this process may not open on its behalf."""


def is_forbidden(error: BaseException) -> bool:
    """Whether an error is a ForbiddenError, or was raised because of one."""
    return isinstance(error, ForbiddenError) or (error.__cause__ is not None and is_forbidden(error.__cause__))


class IrregularError(Exception):
    """Raised for a path that is not a regular file but a folder, pipe, socket or device."""


class OutsideError(Exception):
    """Raised for a file whose real location is outside the folders that may be read."""


def check_url(url: str) -> None:
    """Raise ForbiddenError if a URL may not be fetched."""
    if "::" in url or url.partition("://")[0] in _NEVER:
        raise ForbiddenError(f"{url} chains protocols or holds references, which is not taken; name the files themselves")
    leads_up = ".." in unquote(url).split("/")
    beginnings = _granted.urls
    if beginnings is not None and (leads_up or not any(f"{url}/".startswith(f"{one.rstrip('/')}/") for one in beginnings)):
        allowed = f"URLs there begin with {', '.join(beginnings)}" if beginnings else "it may fetch no URL"
        raise ForbiddenError(f"{url} is not for this process to fetch: {allowed}; start the preprocessor with --allow-url PREFIX")
    if not _granted.local_urls:
        _check_host(url)


def _check_host(url: str) -> None:
    """Raise ForbiddenError if a URL names loopback or what is on this machine's link.

    Names of web servers are looked up once, by whoever connects, who asks `check_address`; those of other servers here.
    """
    scheme = url.partition("://")[0]
    if scheme not in _OF_HOSTS:
        return
    try:
        host = urlsplit(url).hostname or ""
    except ValueError as err:
        raise DatasetError(f"{url} is no URL ({err}); name the files by ones that are") from err
    if (address := local_address_of(host, look_up=scheme not in _WEB)) is not None:
        raise _too_near(f"{url} names", address)


def check_address(address: str) -> None:
    """Raise ForbiddenError if nothing may be fetched from an IP address, since it is loopback or on this machine's link."""
    if not _granted.local_urls and is_local_address(address):
        raise _too_near("the URL's host is", address)


def _too_near(what: str, address: str) -> ForbiddenError:
    return ForbiddenError(
        f"{what} {address}, a loopback or link-local address, from which jobs may fetch nothing; serve the data from "
        "another host, or start the preprocessor with --allow-local-urls"
    )


def check_redirection(url: str, location: str) -> None:
    """Raise ForbiddenError if a server redirects `url` to a `location` that may not be fetched."""
    check_url(urljoin(url, location))


def check_path(path: str) -> None:
    """Raise ForbiddenError if a local path or glob leads out of the folders that may be read, by links or by ".."."""
    fixed, magic = path, ""
    if not os.path.lexists(path) and (found := re.search(r"[*?\[]", path)):
        fixed, magic = os.path.dirname(path[: found.start()]), path[found.start() :]
    if ".." in magic.split("/") or not _inside(os.path.realpath(fixed), _granted.roots):
        raise _outside(path)


def open_local(path: str) -> BinaryIO:
    """Open a local file. Raises ForbiddenError if it may not be read, OSError if it cannot be opened."""
    try:
        return open_inside(path, _granted.roots)
    except OutsideError as err:
        raise _outside(path) from err
    except IrregularError as err:
        raise ForbiddenError(f"{path} is {err}; only regular files are read") from err


def open_inside(path: str, roots: Sequence[str]) -> BinaryIO:
    """Open a regular file that lies below one of `roots`. Raises OutsideError, IrregularError or OSError.

    A path can be pointed at another file at any time, so the opened file is checked, not the path. Opening never blocks.
    """
    _check_regular(os.stat(path).st_mode)  # checked before opening too: opening a device can have effects
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


def _outside(path: str) -> ForbiddenError:
    allowed = f"it may read below {', '.join(_granted.roots)}" if _granted.roots else "it may read no local file"
    return ForbiddenError(f"{path} is not for this process to read: {allowed}; start the preprocessor with --data-root DIR")
