"""What the formats have in common: a shard is rows of records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from headrace.preprocessor.records.record import Record
from headrace.quarantine import BadSampleError, Reason, Rejected

# Bounds on what one record may ask for. Ten minutes of 96 kHz stereo at 24 bits are 346 MB; annotations grow tenfold
# when JSON becomes objects.
MAX_MEDIUM_BYTES = 512 * 2**20
MAX_ANNOTATION_BYTES = 64 * 2**20


class Shard(ABC):
    """One file of a data set. Rows are its whole samples in the file's order; reading is random access.

    Everything but `close` may be called from many threads at once. A shard holds one open file and its index (for tar
    some hundred bytes a sample), never media. One that others may still read is dropped instead of closed: its file is
    closed when the last reference, which every record holds, has gone.
    """

    num_rows: int
    rejected: tuple[Rejected, ...]
    """Damage found while indexing. `name` is a bare key, or "" where it concerns the file as a whole."""

    @abstractmethod
    def key(self, row: int) -> str:
        """The key of a row."""

    @abstractmethod
    def read(self, row: int) -> Record:
        """The record of a row. Raises BadSampleError where its annotation is damaged, DatasetError where the file is gone."""

    @abstractmethod
    def close(self) -> None:
        """Release the file. Records read before can no longer load media."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def check_size(what: str, size: int, limit: int) -> None:
    """Raises BadSampleError (too_large) where `size` bytes are more than `limit`."""
    if size > limit:
        raise BadSampleError(Reason.TOO_LARGE, f"{what} has {size} bytes, more than {limit}")
