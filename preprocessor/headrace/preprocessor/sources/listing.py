"""Listing of the shards of a source: which of its files are shards, and what they are called.

A folder is refused where its shards are of several formats (such as annotations beside the archives that hold the media, as
img2dataset writes them) or of evaluation splits beside training splits; the source must then name the files to use.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from headrace.errors import DatasetError
from headrace.manifest import ShardInfo
from headrace.preprocessor.sources import energon, mds
from headrace.preprocessor.sources.blob import filesystem, read_file
from headrace.preprocessor.sources.download import Retry
from headrace.preprocessor.sources.metadataset import is_metadataset
from headrace.spec import JobSpec, SourceSpec

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".parquet", ".jsonl", *mds.SUFFIXES)
_FORMATS = {".tar": "tar", ".tar.gz": "tar", ".tgz": "tar", ".parquet": "Parquet", ".jsonl": "JSONL"}
_SPLITS = re.compile(r"(?:^|[-_./])(?:(train|training)|(validation|valid|val|dev|eval|test|testing))(?=[-_./0-9])", re.IGNORECASE)
_GLOB_CHARACTERS = frozenset("*?[")
_WEB = ("http://", "https://")


def list_shards(spec: JobSpec, retry: Retry = Retry()) -> list[ShardInfo]:  # noqa: B008 - frozen
    """Return the shards of all sources, in the order of the sources, then by name: the same list on every machine.

    A source's path is a folder (searched recursively; names that begin with a dot are skipped), one file, a glob, or an
    fsspec URL of any of these. An Energon data set gives the shards of one split, an MDS data set those in its index.json.
    Raises DatasetError where a path does not exist, cannot be accessed or holds no shard, a protocol is unknown, or an index
    is damaged.
    """
    return [shard for index, source in enumerate(spec.sources) for shard in _list_source(index, source, retry)]


def _list_source(index: int, source: SourceSpec, retry: Retry) -> list[ShardInfo]:
    if is_metadataset(source):
        raise DatasetError(
            f"source {source.name!r}: {source.path} is a blend of data sets, which is expanded when a job is submitted; "
            "submit it where the file can be read"
        )
    selection = energon.parse_selection(source.path)
    try:
        fs, path = filesystem(selection.root)
        names, root = retry.call(lambda: _names(fs, path, selection), source.path)
    except DatasetError as err:
        raise DatasetError(f"source {source.name!r}: {err}") from err
    except ImportError as err:
        raise DatasetError(f"source {source.name!r}: {source.path} needs another package: {err}") from err
    except Exception as err:  # drivers raise their libraries' errors as well
        raise DatasetError(f"source {source.name!r}: cannot list {source.path} ({err}); check the path and its access") from err
    if names is None:
        raise DatasetError(
            f"source {source.name!r}: {source.path} does not exist; give a folder, a file, a glob or an fsspec URL"
        )
    if not names:
        raise DatasetError(
            f"source {source.name!r}: {source.path} holds no shard; shards are files that end in {', '.join(SUFFIXES)}"
        )
    return [
        ShardInfo(source=index, url=_url(fs, posixpath.join(root, name)), name=f"{source.name}/{name}") for name in sorted(names)
    ]


def _names(fs: fsspec.AbstractFileSystem, path: str, selection: energon.Selection) -> tuple[list[str] | None, str]:
    """Return the names of the shards and the folder they are relative to; the names are None where `path` does not exist."""
    root, files = _find(fs, path)
    if files is None:
        return None, root
    names = [posixpath.relpath(file, root) for file in files]
    if root == path and energon.is_dataset(fs, root):
        wanted = energon.split_shards(fs, root, selection)
        missing = sorted(set(wanted) - set(names))
        if missing:
            raise DatasetError(f"{selection.root} has no {missing[0]}, which its split {selection.split!r} lists; complete it")
        return wanted, root
    shards = [name for name, file in zip(names, files, strict=True) if is_shard(file) and not _is_hidden(name)]
    _check_one_format(shards, _url(fs, root))
    _check_one_split(shards, _url(fs, root))
    of_mds = [name for name in shards if name.endswith(mds.SUFFIXES)]
    others = [name for name in shards if not name.endswith(mds.SUFFIXES)]
    return others + _indexed(fs, root, of_mds, whole=root == path), root


def _check_one_format(names: list[str], root: str) -> None:
    """Raise DatasetError if the shards are of several formats."""
    examples = {_format(name): name for name in sorted(names, reverse=True)}
    if len(examples) > 1:
        kinds = " and ".join(f"{kind} ({name})" for kind, name in sorted(examples.items()))
        one = max(examples)  # archives hold the media, while files beside them often only describe it
        suffix = next(suffix for suffix in SUFFIXES if examples[one].endswith(suffix))
        anywhere = "**/*" if any("/" in name for name in names) else "*"
        raise DatasetError(
            f"{root} holds {kinds}, and a source is of one format: name those to train on, for example "
            f"{posixpath.join(root, anywhere + suffix)}, or make each a source"
        )


def _format(name: str) -> str:
    return next((kind for suffix, kind in _FORMATS.items() if name.endswith(suffix)), "MDS")


def _check_one_split(names: list[str], root: str) -> None:
    """Raise DatasetError if the shards, by their names, are of several splits and one of these is for evaluation."""
    examples: dict[str, str] = {}
    to_train_on: list[str] = []
    evaluates = False
    for name in sorted(names, reverse=True):
        found = _SPLITS.search(name)
        examples[(found[1] or found[2]).lower() if found else "no split"] = name
        if found and found[1]:
            to_train_on.append(name[: found.end()] + ("" if name[found.end()] == "/" else "*"))
        evaluates = evaluates or bool(found and found[2])
    if evaluates and len(examples) > 1:
        kinds = ", ".join(f"{split} ({name})" for split, name in sorted(examples.items()))
        example = f", for example {posixpath.join(root, to_train_on[-1])}" if to_train_on else ""
        raise DatasetError(
            f"{root} holds shards of several splits, {kinds}: name the one to train on{example}, or make each a source"
        )


def _indexed(fs: fsspec.AbstractFileSystem, root: str, names: list[str], whole: bool) -> list[str]:
    """Return those MDS shards that the index.json of their folder lists, one file for each shard.

    Raises DatasetError where a folder has no index, or, if `whole`, a listed shard is missing.
    """
    folders: dict[str, set[str]] = {}
    for name in names:
        folders.setdefault(posixpath.dirname(name), set()).add(posixpath.basename(name))
    chosen = []
    for folder, present in folders.items():
        path = posixpath.join(root, folder, mds.INDEX_NAME)
        try:
            data = read_file(fs, path, mds.MAX_INDEX_BYTES)
        except FileNotFoundError as err:
            raise DatasetError(f"there is no {path} beside {min(present)}; MDS shards need their index") from err
        chosen += [posixpath.join(folder, name) for name in mds.choose_files(mds.parse_index(data, path), present, whole, path)]
    return chosen


def _find(fs: fsspec.AbstractFileSystem, path: str) -> tuple[str, list[str] | None]:
    """Return the folder that names are relative to, and the files that `path` stands for; None where it does not exist."""
    if not path.endswith(SUFFIXES) and _is_folder(fs, path):
        return path, fs.find(path)
    if _is_file(fs, path):
        return posixpath.dirname(path), [path]
    if path.endswith(SUFFIXES) and fs.isdir(path):
        return path, fs.find(path)
    if _GLOB_CHARACTERS & set(path):
        fixed = path[: min(path.index(c) for c in _GLOB_CHARACTERS & set(path))]
        return posixpath.dirname(fixed), [file for file in fs.glob(path) if _is_file(fs, file)]
    return path, None


def _is_folder(fs: fsspec.AbstractFileSystem, path: str) -> bool:
    """Whether `path` is a folder. Over HTTP only HTML pages are tried, as `fs.isdir` downloads a URL to look for links in it."""
    if path.startswith(_WEB) and (_web_info(fs, path) or {}).get("mimetype") != "text/html":
        return False
    return bool(fs.isdir(path))


def _is_file(fs: fsspec.AbstractFileSystem, path: str) -> bool:
    """Whether `path` is a file. Over HTTP any URL that exists is one, folders too; only its headers are asked for.

    `fs.isfile` would request the whole file there.
    """
    return _web_info(fs, path) is not None if path.startswith(_WEB) else bool(fs.isfile(path))


def _web_info(fs: fsspec.AbstractFileSystem, url: str) -> Mapping[str, Any] | None:
    """Return what a web server says of a file, asking for at most one byte of it; None where there is no such file."""
    try:
        return cast(Mapping[str, Any], fs.info(url, headers={"Range": "bytes=0-0"}))  # sends HEAD; if that fails, GET
    except FileNotFoundError as err:  # fsspec raises this whatever went wrong
        status = getattr(err.__cause__, "status", None)
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # an empty file has no first byte
            return {}
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            return None
        raise err.__cause__ or err from None


def is_shard(url: str) -> bool:
    """Whether a path or URL names a shard, by its suffix; false for web URLs with a query or fragment, whose end says nothing."""
    return url.endswith(SUFFIXES) and not (url.startswith(_WEB) and {"?", "#"} & set(url))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _url(fs: fsspec.AbstractFileSystem, path: str) -> str:
    return os.path.abspath(path) if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(path))
