"""The interface that shards of all formats implement: rows that are read as records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from headrace.preprocessor.records.record import Record
from headrace.quarantine import BadSampleError, Reason, Rejected

# Limits on the size of one record's parts. Ten minutes of 96 kHz stereo at 24 bits are 346 MB; annotations take ten times as
# much memory once their JSON is parsed.
MAX_MEDIUM_BYTES = 512 * 2**20
MAX_ANNOTATION_BYTES = 64 * 2**20


class Shard(ABC):
    """One file of a data set, with random access to its rows: the complete samples in the file's order.

    Every method but `close` is thread-safe. A shard holds one open file and its index (for tar about a hundred bytes a sample),
    never media. While others may still read from a shard, drop it instead of closing it: its file is closed with the last
    reference to the shard, and every record holds one.
    """

    num_rows: int
    rejected: tuple[Rejected, ...]
    """Damage found while indexing. `name` is the key of a sample, or "" where the damage concerns the file as a whole."""
    rows_fetched_together: int = 1
    """Neighbouring rows, at most, that come with a single one which is read from a server."""

    @abstractmethod
    def key(self, row: int) -> str:
        """Return the key of the sample at `row`."""

    @abstractmethod
    def read(self, row: int) -> Record:
        """Return the record at `row`. Raises BadSampleError where it is damaged, DatasetError where the file is gone."""

    def annotations(self, paths: Collection[str] | None) -> Iterator[Mapping[str, Any] | None]:  # noqa: ARG002 - others need it
        """Yield the fields of each row, at least those that `paths` lead into (records.key_path); None for one that is damaged.

        Without `paths`, all fields.
        """
        for row in range(self.num_rows):
            try:
                yield self.read(row).fields
            except BadSampleError:
                yield None

    def prefetch(self, rows: Sequence[int]) -> None:  # noqa: B027 - most have nothing to do
        """Ask for what will be read of these rows soon, where waiting for one after the other would take long. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Close the file; records read earlier can no longer load media."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class NumberedShard(Shard):
    """A shard whose rows have no keys but their numbers."""

    def key(self, row: int) -> str:
        """Return the row number as a string. Raises IndexError where there is no such row."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        return str(row)


def check_size(what: str, size: int, limit: int) -> None:
    """Raise BadSampleError (too_large) if `what` has more bytes, `size`, than `limit`."""
    if size > limit:
        raise BadSampleError(Reason.TOO_LARGE, f"{what} has {size} bytes, more than {limit}")
