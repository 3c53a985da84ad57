"""Listing of the shards of a source: the files that its path stands for, and what they are called.

A source is of one format (formats.py) and of one split (splits.py, hub_card.py). What is left out of a folder is said, and the
folder is refused where it is not certain what is meant.
"""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast

import fsspec

from headrace.errors import DatasetError
from headrace.manifest import ShardInfo
from headrace.preprocessor.sources import energon, hub_card, lance_table, litdata, mds
from headrace.preprocessor.sources.blob import filesystem, local_path, read_file, url_of
from headrace.preprocessor.sources.download import Retry
from headrace.preprocessor.sources.energon_join import check_join
from headrace.preprocessor.sources.energon_selection import Selection, selection_of
from headrace.preprocessor.sources.formats import choose_format, format_of, has_shard_name, may_be_shard, why_no_shard
from headrace.preprocessor.sources.metadataset import is_metadataset
from headrace.preprocessor.sources.splits import ALL, choose_split, split_of
from headrace.printable import printable
from headrace.source_spec import SourceSpec
from headrace.spec import JobSpec

log = logging.getLogger(__name__)

_GLOB_CHARACTERS = frozenset("*?[")
_WEB = ("http://", "https://")


def list_shards(spec: JobSpec, retry: Retry = Retry()) -> list[ShardInfo]:  # noqa: B008 - frozen
    """Return the shards of all sources, in the order of the sources, then by name: the same list on every machine.

    A source's path is a folder (searched recursively; names that begin with a dot are skipped), one file, a glob, or an
    fsspec URL of any of these. An Energon data set gives the shards of one split, an MDS data set those in its index.json.
    What is left out of a source without being asked for is logged as a warning, in a sentence.

    Raises DatasetError where a path does not exist, cannot be accessed or holds no shard, where it is not certain which of its
    shards are meant, a protocol is unknown, or an index is damaged.
    """
    return [shard for index, source in enumerate(spec.sources) for shard in _list_source(index, source, retry)]


def _list_source(index: int, source: SourceSpec, retry: Retry) -> list[ShardInfo]:
    if is_metadataset(source):
        raise DatasetError(
            f"source {source.name!r}: {source.path} is a blend of data sets, which is expanded when a job is submitted; "
            "submit it where the file can be read"
        )
    notes: list[str] = []
    try:
        selection = selection_of(source)
        fs, path = filesystem(selection.root)
        wanted = source.split or (None if selection.split == "train" else selection.split)
        names, root = retry.call(lambda: _names(fs, path, selection, wanted, notes.append), source.path)
    except DatasetError as err:
        raise DatasetError(f"source {source.name!r}: {err}") from err
    except ImportError as err:
        raise DatasetError(f"source {source.name!r}: {source.path} needs another package: {err}") from err
    except Exception as err:  # drivers raise their libraries' errors as well
        raise DatasetError(f"source {source.name!r}: cannot list {source.path} ({err}); check the path and its access") from err
    if names and source.media_root is not None:
        _check_media_root(source, names)
    if names is None:
        raise DatasetError(
            f"source {source.name!r}: {source.path} does not exist; give a folder, a file, a glob or an fsspec URL"
        )
    for note in dict.fromkeys(notes):  # once, even if the listing was tried again
        log.warning("source %s: %s", source.name, printable(note))
    return [
        ShardInfo(source=index, url=url_of(fs, posixpath.join(root, name)), name=f"{source.name}/{name}")
        for name in sorted(names)
    ]


def _check_media_root(source: SourceSpec, names: Sequence[str]) -> None:
    """Raise DatasetError if a source's `media_root` is no folder (where it is local), or if its format has no use for it."""
    holding = sorted({format_of(name) for name in names} & {"tar", "MDS", "LitData"})
    if holding:
        raise DatasetError(f"source {source.name!r}: {holding[0]} shards hold their media; leave media_root out")
    path = local_path(source.media_root or "")
    if path is not None and not os.path.isdir(path):
        raise DatasetError(
            f"source {source.name!r}: media_root {source.media_root} is no folder; name the one that holds the media"
        )


def _names(
    fs: fsspec.AbstractFileSystem, path: str, selection: Selection, wanted: str | None, tell: Callable[[str], None]
) -> tuple[list[str] | None, str]:
    """Return the names of the shards and the folder they are relative to; the names are None where `path` does not exist.

    `wanted`: the split that the source asks for; None: none.
    """
    root, files = _find(fs, path)
    if files is None:
        return None, root
    names = _relative(files, root)
    if root == path and energon.is_dataset(fs, root):
        shards = energon.split_shards(fs, root, selection)
        missing = sorted(set(shards) - set(names))
        if missing:
            raise DatasetError(f"{selection.root} has no {missing[0]}, which its split {selection.split!r} lists; complete it")
        if selection.joiner:
            check_join(selection)
        return shards, root
    if root == path and lance_table.is_dataset(names):
        return lance_table.list_fragments(url_of(fs, root)), root
    visible = [name for name in names if not _is_hidden(name)]
    shards = _chosen(fs, root, visible, wanted, tell, whole=root == path)
    if not shards:
        raise DatasetError(why_no_shard(visible, selection.root))
    if selection.joiner or (selection.is_part and len(shards) > 1):
        raise DatasetError(
            f"{selection.root} is no prepared Energon data set, which alone says how many samples its shards have and can be "
            "joined: run `energon prepare` for it"
        )
    if format_of(shards[0]) == "MDS":
        return _indexed(fs, root, shards, _of_mds, whole=root == path), root
    if format_of(shards[0]) == "LitData":
        return _indexed(fs, root, shards, _of_litdata, whole=root == path), root
    return shards, root


def _chosen(
    fs: fsspec.AbstractFileSystem, root: str, files: list[str], wanted: str | None, tell: Callable[[str], None], whole: bool
) -> list[str]:
    """Return those of the files below `root` that are shards of the source's one format and split.

    `whole`: whether they are all files of a folder. Raises DatasetError where it is not certain which are meant.
    """
    where = url_of(fs, root)
    shards = [name for name in files if is_shard(posixpath.join(root, name))]
    split: Callable[[str], str] = split_of
    if whole or len(shards) > 1:
        shards = [name for name in shards if may_be_shard(name)]
        snapshots = sorted({"/".join(name.split("/", 2)[:2]) for name in shards if name.startswith("snapshots/")})
        if len(snapshots) > 1:
            raise DatasetError(
                f"{where} holds {len(snapshots)} snapshots of one data set: name one, such as {where}/{snapshots[0]}"
            )
        if whole and hub_card.NAME in files and wanted != ALL:
            card = read_file(fs, posixpath.join(root, hub_card.NAME), hub_card.MAX_BYTES)
            if patterns := hub_card.patterns_of(card, where):
                shards, split = _declared(shards, patterns, where)
        shards = choose_format(shards, files, where, tell)
    return choose_split(shards, where, wanted, split, tell) if shards else []


def _declared(shards: list[str], patterns: hub_card.Patterns, where: str) -> tuple[list[str], Callable[[str], str]]:
    """Return the shards that a README.md declares, and the function that tells the split of each."""
    declared = hub_card.splits_of(shards, patterns)
    if not declared:
        first = next((pattern for _, group in patterns for pattern in group), "")
        raise DatasetError(
            f"the README.md of {where} declares files ({first}), and no shard is one of them: name the files in the path, or say "
            "`split: all` in the source for every shard"
        )
    return list(declared), lambda name: declared[name] or split_of(name)


def _relative(files: Sequence[str], root: str) -> list[str]:
    beginning = root.rstrip("/") + "/"
    return [file[len(beginning) :] if file.startswith(beginning) else posixpath.relpath(file, root) for file in files]


def _of_mds(data: bytes, present: set[str], whole: bool, path: str) -> list[str]:
    return mds.choose_files(mds.parse_index(data, path), present, whole, path)


def _of_litdata(data: bytes, present: set[str], whole: bool, path: str) -> list[str]:
    names = litdata.parse_index(data, path).names
    if whole and (missing := [name for name in names if name not in present]):
        raise DatasetError(f"{path} lists {missing[0]}, which is not there; complete the data set or write its index again")
    return [name for name in names if name in present]


def _indexed(
    fs: fsspec.AbstractFileSystem,
    root: str,
    names: list[str],
    chosen_of: Callable[[bytes, set[str], bool, str], list[str]],
    whole: bool,
) -> list[str]:
    """Return those MDS or LitData shards that the index.json of their folder lists, one file for each shard.

    `chosen_of` returns those of an index, of the files that are present in its folder.

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
            raise DatasetError(f"there is no {path} beside {min(present)}; such shards need their index") from err
        chosen += [posixpath.join(folder, name) for name in chosen_of(data, present, whole, path)]
    return chosen


def _find(fs: fsspec.AbstractFileSystem, path: str) -> tuple[str, list[str] | None]:
    """Return the folder that names are relative to, and the files that `path` stands for; None where it does not exist."""
    if path.startswith(_WEB):
        if not has_shard_name(path) and (files := _linked_files(fs, path)):
            return path, files
    elif not has_shard_name(path) and _is_folder(fs, path):
        return path, fs.find(path)
    if _is_file(fs, path):
        return posixpath.dirname(path), [path]
    if has_shard_name(path) and fs.isdir(path):
        return path, fs.find(path)
    if _GLOB_CHARACTERS & set(path):
        fixed = path[: min(path.index(c) for c in _GLOB_CHARACTERS & set(path))]
        return posixpath.dirname(fixed), _matching_files(fs, path)
    return path, None


def _linked_files(fs: fsspec.AbstractFileSystem, url: str) -> list[str]:
    """Return the files that a web page links to, at any depth; none where the URL is no page, which is not downloaded then."""
    if (_web_info(fs, url) or {}).get("mimetype") != "text/html":
        return []
    return [file for file in fs.find(url) if file != url]


def _matching_files(fs: fsspec.AbstractFileSystem, pattern: str) -> list[str]:
    """Return the files that match a glob, as their folders list them: no server is asked for each file."""
    if isinstance(fs, LocalFileSystem):
        return [file for file in fs.glob(pattern) if fs.isfile(file)]
    return [file for file, info in fs.glob(pattern, detail=True).items() if info["type"] == "file"]


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
    return has_shard_name(url) and not (url.startswith(_WEB) and {"?", "#"} & set(url))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
