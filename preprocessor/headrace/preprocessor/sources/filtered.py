"""A shard without the rows that its source does not take: by their fields, or by their numbers."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from headrace.filter_spec import FilterSpec
from headrace.preprocessor.records.filtering import unmet_condition
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.base import Shard
from headrace.quarantine import BadSampleError, Reason, Rejected


class FilteredShard(Shard):
    """The rows of a shard that a filter admits, in their order, under their own keys.

    A row whose fields cannot be read or compared stays, and is refused when it is probed: so the reason is told for each.
    """

    def __init__(self, shard: Shard, spec: FilterSpec) -> None:
        """`shard` is taken over by this one. Looks at the fields of all rows."""
        self._shard = shard
        self._rows = array("q")
        for row, fields in enumerate(shard.annotations(tuple(spec.fields))):
            try:
                admitted = fields is None or not unmet_condition(fields, spec)
            except BadSampleError:
                admitted = True
            if admitted:
                self._rows.append(row)
        self.num_rows = len(self._rows)
        self.rejected = shard.rejected
        if num_filtered := shard.num_rows - self.num_rows:
            detail = f"{num_filtered} of {shard.num_rows} samples do not fulfil filter.fields"
            self.rejected += (Rejected(name="", reason=Reason.FILTERED, detail=detail),)

    def key(self, row: int) -> str:
        """Return the key of the sample at `row`."""
        return self._shard.key(self._rows[row])

    def read(self, row: int) -> Record:
        """Return the record at `row`; see `Shard.read`."""
        return self._shard.read(self._rows[row])

    def prefetch(self, rows: Sequence[int]) -> None:
        """Ask for rows; see `Shard.prefetch`."""
        self._shard.prefetch([self._rows[row] for row in rows])

    def close(self) -> None:
        """Close the file."""
        self._shard.close()


class PartShard(Shard):
    """The rows of a shard from one number to another, under their own keys."""

    def __init__(self, shard: Shard, start: int, stop: int) -> None:
        """`shard` is taken over by this one."""
        self._shard = shard
        self._rows = range(start, stop)
        self.num_rows = len(self._rows)
        self.rejected = shard.rejected

    def key(self, row: int) -> str:
        """Return the key of the sample at `row`."""
        return self._shard.key(self._rows[row])

    def read(self, row: int) -> Record:
        """Return the record at `row`; see `Shard.read`."""
        return self._shard.read(self._rows[row])

    def prefetch(self, rows: Sequence[int]) -> None:
        """Ask for rows; see `Shard.prefetch`."""
        self._shard.prefetch([self._rows[row] for row in rows])

    def annotations(self, paths: Collection[str] | None) -> Iterator[Mapping[str, Any] | None]:
        """Yield the fields of each row; see `Shard.annotations`."""
        return islice(self._shard.annotations(paths), self._rows.start, self._rows.stop)

    def close(self) -> None:
        """Close the file."""
        self._shard.close()
