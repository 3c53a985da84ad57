"""Which files of a source are shards, and what they are called."""

from __future__ import annotations

import os
import posixpath

import fsspec
from fsspec.implementations.local import LocalFileSystem

from headrace.errors import DatasetError
from headrace.manifest import ShardInfo
from headrace.spec import JobSpec, SourceSpec

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".parquet", ".jsonl")
_MAGIC = frozenset("*?[")


def list_shards(spec: JobSpec) -> list[ShardInfo]:
    """The shards of all sources, in the order of the sources, then by name: the same list on every machine.

    A source's path is a folder (searched recursively; names that begin with a dot are skipped), one file, a glob, or an
    fsspec URL of any of these. Raises DatasetError: no such path, no shard in it, no access, an unknown protocol.
    """
    return [shard for index, source in enumerate(spec.sources) for shard in _list_source(index, source)]


def _list_source(index: int, source: SourceSpec) -> list[ShardInfo]:
    try:
        fs, path = fsspec.core.url_to_fs(source.path)
        root, files = _find(fs, path)
    except ImportError as err:
        raise DatasetError(f"source {source.name!r}: {source.path} needs another package: {err}") from err
    except (OSError, ValueError) as err:
        raise DatasetError(f"source {source.name!r}: cannot list {source.path} ({err}); check the path and its access") from err
    if files is None:
        raise DatasetError(
            f"source {source.name!r}: {source.path} does not exist; give a folder, a file, a glob or an fsspec URL"
        )
    relative = {file: posixpath.relpath(file, root) for file in files}
    shards = sorted((name, file) for file, name in relative.items() if _is_shard(name))
    if not shards:
        raise DatasetError(
            f"source {source.name!r}: {source.path} holds no shard; shards are files that end in {', '.join(SUFFIXES)}"
        )
    return [ShardInfo(source=index, url=_url(fs, file), name=f"{source.name}/{name}") for name, file in shards]


def _find(fs: fsspec.AbstractFileSystem, path: str) -> tuple[str, list[str] | None]:
    """The folder that names are relative to, and all files below it; None for a path that is not there."""
    if fs.isdir(path):
        return path, fs.find(path)
    if fs.exists(path):
        return posixpath.dirname(path), [path]
    if _MAGIC & set(path):
        fixed = path[: min(path.index(c) for c in _MAGIC & set(path))]
        return posixpath.dirname(fixed), [file for file in fs.glob(path) if fs.isfile(file)]
    return path, None


def _is_shard(name: str) -> bool:
    return name.endswith(SUFFIXES) and not any(part.startswith(".") for part in name.split("/"))


def _url(fs: fsspec.AbstractFileSystem, path: str) -> str:
    return os.path.abspath(path) if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(path))
