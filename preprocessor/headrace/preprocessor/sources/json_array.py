"""JSON files that are one array of objects, as LLaVA's annotations are; each item is a row, whose key is its number from 0.

The file is read once, in chunks, to find the bytes of each item by the quotes, brackets and commas in it; an item is parsed when
its row is read, so that a damaged one leaves the others readable. Files that end in .json and hold one object a line are read as
JSONL.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.preprocessor.sources.annotation import parse_annotation
from headrace.preprocessor.sources.base import MAX_ANNOTATION_BYTES
from headrace.preprocessor.sources.blob import Blob
from headrace.preprocessor.sources.jsonl import index_lines
from headrace.preprocessor.sources.row_files import RowFileShard
from headrace.quarantine import BadSampleError, Reason

_CHUNK_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_MARKS = np.zeros(256, bool)
_MARKS[list(b'"{}[],')] = True
_STEPS = np.zeros(256, np.int64)
_STEPS[list(b"{[")] = 1
_STEPS[list(b"}]")] = -1


class JsonShard(RowFileShard):
    """A shard that is one JSON array with a row for each item, or lines of objects."""

    what = "the item"

    def _parse(self, data: bytes) -> dict[str, Any]:
        return parse_annotation(data, self.what)

    def _index(self, blob: Blob) -> tuple[array[int], array[int], BadSampleError | None]:
        start, first = _first(blob)
        if not first:
            return array("q"), array("q"), BadSampleError(Reason.EMPTY_ARCHIVE, "the file is empty")
        if first == b"{" and _is_line(blob, start):
            self.what = "the line"
            return *index_lines(blob), None
        if first != b"[":
            detail = "the file is one JSON value, and no array of objects or lines of objects: write one of these"
            return array("q"), array("q"), BadSampleError(Reason.SCHEMA_ERROR, detail)
        scan = _Scan(start)
        while not scan.ended and (chunk := blob.pread(scan.offset, _CHUNK_BYTES)):
            scan.take(chunk)
        bounds = array("q", scan.bounds.tobytes())
        if (
            len(bounds) == 2
            and bounds[1] - bounds[0] <= _CHUNK_BYTES
            and not blob.pread(bounds[0], bounds[1] - bounds[0]).strip()
        ):
            bounds = array("q")  # an empty array
        return array("q", range(len(bounds) // 2)), bounds, _damage(blob, scan, len(bounds) // 2)


class _Scan:
    """The search for the items of an array, chunk by chunk."""

    def __init__(self, start: int) -> None:
        """`start`: the offset of the array's bracket in the file."""
        self.offset = start
        """Bytes of the file that have been searched; the offset behind the array once it has ended."""
        self.ended = False
        self._depth = 0
        self._quoted = False
        self._item = start + 1
        self._found: list[NDArray[np.int64]] = []

    @property
    def bounds(self) -> NDArray[np.int64]:
        """The bounds of the complete items: start, stop, start, ..."""
        return np.concatenate([np.empty(0, np.int64), *self._found])

    def take(self, chunk: bytes) -> None:
        """Search the chunk at `offset`, or all of it but a backslash at its end."""
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 and len(chunk) > 1:
            chunk = chunk[:-1]
        data = np.frombuffer(chunk, np.uint8)
        places = np.flatnonzero(_MARKS[data])
        kinds = data[places]
        turns = kinds == _QUOTE
        if b"\\" in chunk:
            turns[turns] = ~_escaped(data, places[turns])
        quoted = (np.cumsum(turns) + self._quoted) % 2 == 1
        self._quoted = bool(quoted[-1]) if len(quoted) else self._quoted
        outside = ~quoted & (kinds != _QUOTE)
        places, kinds = places[outside], kinds[outside]
        depths = self._depth + np.cumsum(_STEPS[kinds])
        ends = np.flatnonzero(depths == 0)
        if len(ends):
            self.ended = True
            places, kinds, depths = places[: ends[0] + 1], kinds[: ends[0] + 1], depths[: ends[0] + 1]
        cuts = self.offset + places[((kinds == _COMMA) & (depths == 1)) | (depths == 0)]
        if len(cuts):
            starts = np.concatenate(([self._item], cuts[:-1] + 1))
            self._found.append(np.stack((starts, cuts), axis=1).reshape(-1))
            self._item = int(cuts[-1]) + 1
        self._depth = int(depths[-1]) if len(depths) else self._depth
        self.offset = self._item if self.ended else self.offset + len(chunk)


def _escaped(data: NDArray[np.uint8], quotes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of the places `quotes` have an odd number of backslashes in front of them."""
    slashes = np.flatnonzero(data == _BACKSLASH)
    starts = slashes[np.diff(slashes, prepend=-2) != 1]  # of the runs of backslashes
    before = quotes - 1
    follows = (before >= 0) & (data[before] == _BACKSLASH)
    runs = np.zeros(len(quotes), np.int64)
    runs[follows] = quotes[follows] - starts[np.searchsorted(starts, before[follows], side="right") - 1]
    return np.asarray(runs % 2, bool)


def _damage(blob: Blob, scan: _Scan, num_items: int) -> BadSampleError | None:
    if not scan.ended:
        return BadSampleError(Reason.ARCHIVE_TRUNCATED, f"the file ends inside of item {num_items} of its array")
    offset = scan.offset
    while chunk := blob.pread(offset, _CHUNK_BYTES):
        if chunk.strip():
            return BadSampleError(Reason.ARCHIVE_CORRUPT, f"the array ends at byte {scan.offset}, and more follows")
        offset += len(chunk)
    return None


def _first(blob: Blob) -> tuple[int, bytes]:
    """Return the offset of the first byte that is not blank, and this byte; b"" where there is none."""
    offset = len(_BOM) if blob.pread(0, len(_BOM)) == _BOM else 0
    while chunk := blob.pread(offset, _CHUNK_BYTES):
        if rest := chunk.lstrip():
            return offset + len(chunk) - len(rest), rest[:1]
        offset += len(chunk)
    return offset, b""


def _is_line(blob: Blob, start: int) -> bool:
    """Whether the line from `start` on is a whole JSON object."""
    line, offset = b"", start
    while b"\n" not in line and len(line) <= MAX_ANNOTATION_BYTES and (chunk := blob.pread(offset, _CHUNK_BYTES)):
        line += chunk
        offset += len(chunk)
    try:
        parse_annotation(line.partition(b"\n")[0], "the line")
    except BadSampleError:
        return False
    return True
