"""Files of rows that are annotations and name media in other files: what JSONL, JSON and CSV have in common."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from typing import Any

from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.base import MAX_ANNOTATION_BYTES, Shard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, open_blob
from headrace.preprocessor.sources.named_media import NamedMedia
from headrace.preprocessor.sources.unpacked import CODECS, unpack
from headrace.quarantine import BadSampleError, Rejected
from headrace.source_spec import SourceSpec


class RowFileShard(Shard):
    """A shard that is one file, plain or packed, of rows at ranges of bytes."""

    what: str
    """What a row is called in errors."""

    def __init__(self, url: str, cache: BlobCache | None = None, source: SourceSpec | None = None) -> None:
        """`source` says where the media are and what its mapping names; None: those beside the file, and the usual mapping."""
        self._blob = open_blob(url, cache)
        self._media = NamedMedia(url, source, cache)
        self._media.check_access()
        rejected: list[Rejected] = []
        if codec := next((codec for end, codec in CODECS.items() if url.endswith(end)), None):
            self._blob, failure = unpack(self._blob, url, codec)
            rejected += [_rejected(failure)] if failure else []
        self._numbers, self._bounds, failure = self._index(self._blob)
        self.num_rows = len(self._numbers)
        self.rejected = (*rejected, *([_rejected(failure)] if failure else []))

    def key(self, row: int) -> str:
        """Return the number of the row in the file, from 0, as a string."""
        return str(self._numbers[row])

    def read(self, row: int) -> Record:
        """Return the record at `row`. Raises BadSampleError where it is damaged or too large."""
        start, stop = self._bounds[2 * row], self._bounds[2 * row + 1]
        check_size(self.what, stop - start, MAX_ANNOTATION_BYTES)
        return self._media.record(self.key(row), self._parse(self._blob.pread(start, stop - start)))

    def close(self) -> None:
        """Close the file."""
        self._blob.close()

    @abstractmethod
    def _index(self, blob: Blob) -> tuple[array[int], array[int], BadSampleError | None]:
        """Return the numbers of the n rows, (n,), their bounds in bytes as start, stop, start, ..., (2n,), and any damage."""

    @abstractmethod
    def _parse(self, data: bytes) -> dict[str, Any]:
        """Return the fields of a row. Raises BadSampleError."""


def _rejected(failure: BadSampleError) -> Rejected:
    return Rejected(name="", reason=failure.reason, detail=failure.detail)
