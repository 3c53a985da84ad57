"""What the formats have in common: a shard is rows of records, and a record is annotation fields with media."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from headrace.quarantine import BadSampleError, Reason, Rejected

# Bounds on what one record may ask for. Ten minutes of 96 kHz stereo at 24 bits are 346 MB; annotations grow tenfold
# when JSON becomes objects.
MAX_MEDIUM_BYTES = 512 * 2**20
MAX_ANNOTATION_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row of a shard, media not yet read."""

    key: str
    """Unique in its shard."""
    fields: Mapping[str, Any]
    """The annotation: JSON-like values. A medium stands in it as a name for `load`, as bytes, or as `{bytes, path}`."""
    load: Callable[[str], bytes]
    """The bytes of the medium with a name (tar: the member's extension; JSONL: a path). Thread-safe. Raises BadSampleError
    with missing_media, unsafe_member_name, unsupported_member_type, too_large or archive_truncated."""
    members: tuple[str, ...] = ()
    """Names that `load` knows without any annotation, in natural order (only tar samples have such)."""


class Shard(ABC):
    """One file of a data set. Rows are its whole samples in the file's order; reading is random access.

    Everything but `close` may be called from many threads at once. A shard holds one open file and its index (for tar
    some hundred bytes a sample), never media.
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
