"""Lance data sets: folders of versions of a table, read by pylance (`pip install headrace[lance]`).

    NAME/_versions/*.manifest    which fragments a version has; the latest is read
    NAME/data/*.lance            the columns of fragments; one fragment may have several files, after columns were added
    NAME/_deletions/*            which of their rows are deleted

A shard is a fragment, called by the first of its files. Its rows, without deleted ones, are taken one by one, so that memory
is bounded by the row. Lance opens files by itself: only data sets on a local disk are read, whose files lie in their own folder.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from headrace.errors import DatasetError
from headrace.preprocessor import access
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.base import MAX_MEDIUM_BYTES, NumberedShard, check_size
from headrace.preprocessor.sources.blob import local_path
from headrace.quarantine import BadSampleError, Reason

FRAGMENT = re.compile(r"(?:^|/)data/[^/]+\.lance$")
"""What the names of the files of a fragment look like."""
_MANIFEST = re.compile(r"_versions/[^/]+\.manifest$")
_CACHE_BYTES = 16 * 2**20  # of pylance, for each open shard; its default is a gigabyte
_ROWS_AT_ONCE = 16
_BLOB = b"lance-encoding:blob"

Result = TypeVar("Result")


def is_dataset(names: Sequence[str]) -> bool:
    """Whether a folder with these files is a Lance data set."""
    return any(map(_MANIFEST.match, names))


def list_fragments(root: str) -> list[str]:
    """Return the first file of each fragment of the data set at `root`, relative to it.

    Raises DatasetError where it cannot be read, or lies where Lance is not to open files.
    """
    fragments = _call(lambda: _opened(root).get_fragments(), root)
    return [f"data/{_first_file(fragment, root)}" for fragment in fragments]


class LanceShard(NumberedShard):
    """A shard that is one fragment of a Lance data set."""

    def __init__(self, url: str) -> None:
        """Open the fragment whose first file is at `url`. Raises DatasetError where it is no more, or cannot be read."""
        self._url = url
        root, name = posixpath.dirname(posixpath.dirname(url)), posixpath.basename(url)
        dataset = _call(lambda: _opened(root), root)
        found = [one for one in _call(dataset.get_fragments, root) if _first_file(one, root) == name]
        if not found:
            raise DatasetError(f"{url} is in no fragment of the latest version of {root}: submit the job again")
        for field in dataset.schema:
            if _BLOB in (field.metadata or {}):
                raise DatasetError(f"{root} stores the column {field.name} as blobs, which are not read: write it as binary")
        self._fragment = found[0]
        self._columns: list[str] = dataset.schema.names
        self.num_rows = int(_call(self._fragment.count_rows, url))
        self.rejected = ()

    def read(self, row: int) -> Record:
        """Return the record at `row`, whose fields are its cells as Python values. Raises BadSampleError where it is damaged."""
        key = self.key(row)
        try:
            cells = _call(lambda: self._fragment.take([row]), self._url)
        except DatasetError as err:
            raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"the row does not decode: {err.__cause__ or err}") from err
        check_size("the row", cells.nbytes, MAX_MEDIUM_BYTES)
        return Record(key=key, fields=_values(cells)[0], load=_no_files)

    def annotations(self, paths: Collection[str] | None) -> Iterator[Mapping[str, Any] | None]:
        """Yield the fields of each row, of the columns that are asked for; see `Shard.annotations`."""
        columns = [name for name in self._columns if paths is None or any(f"{path}.".startswith(f"{name}.") for path in paths)]
        if not columns:
            yield from ({} for _ in range(self.num_rows))
            return
        for batch in self._fragment.to_batches(columns=columns, batch_size=_ROWS_AT_ONCE):
            yield from _values(batch)

    def close(self) -> None:
        """Forget the fragment, of which no file stays open."""


def _opened(root: str) -> Any:
    """Open the latest version of a data set, of which pylance may open the files itself. Raises DatasetError."""
    try:
        import lance
    except ImportError as err:
        raise DatasetError(
            f"{root} is a Lance data set, which needs pylance on the preprocessor: pip install headrace[lance], or write it as "
            "Parquet: lance.dataset(PATH).to_batches() and pyarrow.parquet"
        ) from err
    path = local_path(root)
    if path is None:
        raise DatasetError(f"{root} is a Lance data set that is not on a local disk: copy it there, or write it as Parquet")
    for folder in ("_versions", "data", "_deletions"):
        access.check_path(os.path.join(path, folder))
    return lance.dataset(path, metadata_cache_size_bytes=_CACHE_BYTES, index_cache_size_bytes=_CACHE_BYTES)


def _first_file(fragment: Any, root: str) -> str:
    """Return the name of a fragment's first file. Raises DatasetError if any of its files lies elsewhere than in the data set."""
    files = [*fragment.metadata.files]
    others = [fragment.metadata.deletion_file] if fragment.metadata.deletion_file else []
    for file in files:
        if file.base_id is not None or "/" in file.path or file.path.startswith("."):
            raise DatasetError(f"{root} has data in another folder ({file.path}), which is not read: write the data set anew")
        access.check_path(os.path.join(local_path(root) or root, "data", file.path))
    if not files or any(file.base_id is not None for file in others):
        raise DatasetError(f"{root} has data in another folder, which is not read: write the data set anew")
    return str(files[0].path)


def _call(function: Callable[[], Result], what: str) -> Result:
    """Call a function of pylance. Raises DatasetError where it fails."""
    try:
        return function()
    except DatasetError:
        raise
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as err:  # a panic of its native part is no Exception
        message = str(err).partition(", /")[0]  # without the place in pylance's sources
        raise DatasetError(f"cannot read the Lance data set {what}: {message}; check that it is complete") from err


def _values(cells: Any) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = cells.to_pylist()
    except (ValueError, OverflowError) as err:  # a date out of Python's range
        raise BadSampleError(Reason.SCHEMA_ERROR, f"a cell has no value in Python: {err}") from err
    return rows


def _no_files(name: Any) -> bytes:
    raise BadSampleError(Reason.SCHEMA_ERROR, f"expected a medium as {{bytes, path}} or bytes, got the string {name!r}")
