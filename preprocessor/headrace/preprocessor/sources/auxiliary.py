"""Media beside the samples of an Energon data set, in places that a metadataset names (`aux`): data sets, and folders of files.

What a sample names is looked for there by the whole name of a file; in a data set it is that of a member of any archive, such as
`images/0001.jpg`. If several places have one of that name, the sample is refused: in Energon code says which is meant.
"""

from __future__ import annotations

import functools
import posixpath
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import DatasetError, HeadraceError
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.base import MAX_MEDIUM_BYTES, Shard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, filesystem, open_blob, url_of
from headrace.preprocessor.sources.energon import is_dataset, listed_shards
from headrace.preprocessor.sources.media_files import MediaFiles, files_below
from headrace.preprocessor.sources.tar import Damage, scan
from headrace.quarantine import BadSampleError, Reason

FILES = "filesystem://"
"""What the place of a folder of files begins with."""
_OPEN_ARCHIVES = 64
_PLACES = 64


class AuxiliaryShard(Shard):
    """A shard whose samples may name media in other places."""

    def __init__(self, shard: Shard, places: Collection[str], cache: BlobCache | None) -> None:
        """`shard` is taken over by this one. Raises DatasetError where a place is not there."""
        self._shard = shard
        self._places = {place: media_at(place, cache) for place in places}
        self.num_rows = shard.num_rows
        self.rejected = shard.rejected

    def key(self, row: int) -> str:
        """Return the key of the sample at `row`."""
        return self._shard.key(row)

    def read(self, row: int) -> Record:
        """Return the record at `row`; see `Shard.read`."""
        record = self._shard.read(row)

        def load(name: str) -> bytes:
            if name.lower() not in record.members and (data := self._load(name)) is not None:
                return data
            return record.load(name)

        return replace(record, load=load)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Ask for rows; see `Shard.prefetch`."""
        self._shard.prefetch(rows)

    def annotations(self, paths: Collection[str] | None) -> Iterator[Mapping[str, Any] | None]:
        """Yield the fields of each row; see `Shard.annotations`."""
        return self._shard.annotations(paths)

    def close(self) -> None:
        """Close the file."""
        self._shard.close()

    def _load(self, name: str) -> bytes | None:
        """Return the file that one of the places has; None if none has it. Raises BadSampleError where several have it."""
        found: dict[str, bytes] = {}
        for place, files in self._places.items():
            try:
                found[place] = files.load(name)
            except BadSampleError as err:
                if err.reason not in (Reason.MISSING_MEDIA, Reason.UNSAFE_MEMBER_NAME):
                    raise
        if len(found) > 1:
            raise BadSampleError(Reason.MISSING_MEDIA, f"{' and '.join(found)} have each a file {name!r}: name one under aux")
        return next(iter(found.values()), None)


def media_at(place: str, cache: BlobCache | None) -> MediaFiles:
    """Return the media at a place: a data set's folder, or FILES and a folder. Raises DatasetError where it is not there."""
    try:
        return files_below(place.removeprefix(FILES)) if place.startswith(FILES) else _packed(place, cache)
    except HeadraceError:
        raise
    except Exception as err:  # drivers raise their libraries' errors as well
        raise DatasetError(f"cannot read {place}, where a metadataset says that media are: {err}; check the path") from err


class PackedFiles:
    """The members of all archives of a data set, by their names.

    What is remembered of one is a hash of its name, its archive, offset and size, 28 bytes; the archives are read through once.
    """

    def __init__(self, root: str, cache: BlobCache | None) -> None:
        fs, path = filesystem(root)
        if not is_dataset(fs, path):
            raise DatasetError(
                f"{root} is no prepared Energon data set: run `energon prepare` for it, or write {FILES}FOLDER for plain files"
            )
        self._root = root
        self._urls = [url_of(fs, posixpath.join(path, name)) for name in listed_shards(fs, path)]
        self._cache = cache
        self._opened = functools.lru_cache(maxsize=_OPEN_ARCHIVES)(self._open)
        self._lock = threading.Lock()
        self._hashes: npt.NDArray[np.int64] | None = None
        self._places: npt.NDArray[np.int64] = np.empty((0, 3), np.int64)

    def load(self, name: str) -> bytes:
        """Return the content of a member. Raises BadSampleError with missing_media, too_large or archive_truncated."""
        with self._lock:
            hashes = self._hashes if self._hashes is not None else self._indexed()
        wanted = hash(name)
        first, end = np.searchsorted(hashes, wanted), np.searchsorted(hashes, wanted, side="right")
        if first == end:
            raise BadSampleError(Reason.MISSING_MEDIA, f"no file {name!r} in {self._root}")
        if end - first > 1:
            raise BadSampleError(
                Reason.MISSING_MEDIA, f"{self._root} has {end - first} files {name!r}: give them different names"
            )
        archive, offset, size = self._places[first].tolist()
        check_size(repr(name), size, MAX_MEDIUM_BYTES)
        data = self._opened(archive).pread(offset, size)
        if len(data) < size:
            raise BadSampleError(Reason.ARCHIVE_TRUNCATED, f"{self._urls[archive]} has become shorter since it was indexed")
        return data

    def _open(self, archive: int) -> Blob:
        return open_blob(self._urls[archive], self._cache)

    def _indexed(self) -> npt.NDArray[np.int64]:
        """Read through all archives; return the hashes of their members' names, sorted as `_places` is."""
        found = [
            (hash(entry.name.removeprefix("./")), archive, entry.offset, entry.size)
            for archive in range(len(self._urls))
            for entry in scan(self._opened(archive))
            if not isinstance(entry, Damage) and entry.regular
        ]
        table = np.array(found, np.int64).reshape(-1, 4)
        table = table[np.argsort(table[:, 0], kind="stable")]
        self._hashes, self._places = table[:, 0].copy(), table[:, 1:].copy()
        return self._hashes


_packed = functools.lru_cache(maxsize=_PLACES)(PackedFiles)
