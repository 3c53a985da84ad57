"""CSV and TSV files: a header with the names of the fields, then a row for each record, whose key is its number from 0.

A field that begins with a quotation mark ends at the next single one, as RFC 4180 has it: inside, separators and line breaks are
text, and two marks are one. Only in the shards of MosaicML's writer, which are told by a .meta file beside them, quotation marks
are text everywhere. A record with more or fewer fields than the header, or with text behind a closing mark, is damaged;
the others stay readable. Blank lines are skipped, and empty fields are null.
"""

from __future__ import annotations

import csv
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.errors import HeadraceError
from headrace.preprocessor.sources.annotation import parse_text
from headrace.preprocessor.sources.base import MAX_ANNOTATION_BYTES
from headrace.preprocessor.sources.blob import Blob, BlobCache, filesystem, unreadable_error
from headrace.preprocessor.sources.row_files import RowFileShard
from headrace.preprocessor.sources.unpacked import plain_name
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec

_CHUNK_BYTES = 2**20

csv.field_size_limit(MAX_ANNOTATION_BYTES)  # of the process; the default of 128 KiB refuses documents and base64


class CsvShard(RowFileShard):
    """A shard that is one CSV file, or a TSV file by its suffix."""

    what = "the record"

    def __init__(self, url: str, cache: BlobCache | None = None, source: SourceSpec | None = None) -> None:
        self._separator = "\t" if plain_name(url).endswith(".tsv") else ","
        self._quoting: Any = csv.QUOTE_NONE if _is_of_mosaic(url) else csv.QUOTE_MINIMAL
        self._header: list[str] = []
        super().__init__(url, cache, source)

    def _parse(self, data: bytes) -> dict[str, Any]:
        values = self._split(data)
        if len(values) != len(self._header):
            detail = f"the record has {len(values)} fields, and the header names {len(self._header)}"
            raise BadSampleError(Reason.SCHEMA_ERROR, detail)
        if self._separator == "\t" and any("\n" in value or "\t" in value for value in values):
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                "a quotation mark joins several lines or fields, which in a TSV is hardly meant: write CSV or JSONL",
            )
        return {name: value or None for name, value in zip(self._header, values, strict=True) if name}

    def _split(self, data: bytes) -> list[str]:
        text = parse_text(data, self.what)
        try:
            return next(self._reader([text]), [])
        except csv.Error as err:
            raise BadSampleError(Reason.SCHEMA_ERROR, f"{self.what} is no CSV: {err}") from err

    def _index(self, blob: Blob) -> tuple[array[int], array[int], BadSampleError | None]:
        numbers, bounds = array("q"), array("q")
        records = self._records(blob)
        failure = self._read_header(blob, next(records, None))
        if failure is None:
            for number, (start, stop) in enumerate(records):
                numbers.append(number)
                bounds.extend((start, stop))
        return numbers, bounds, failure

    def _reader(self, lines: Iterable[str]) -> Iterator[list[str]]:
        return csv.reader(lines, strict=True, delimiter=self._separator, quoting=self._quoting)

    def _records(self, blob: Blob) -> Iterator[tuple[int, int]]:
        """Yield the bounds in bytes of each record that is not blank, damaged ones included."""
        lines = _Lines(blob)
        reader = self._reader(lines)
        while True:
            start = lines.offset
            try:
                blank = not next(reader)
            except StopIteration:
                return
            except csv.Error:
                blank = False
            if not blank:
                yield start, lines.offset

    def _read_header(self, blob: Blob, bounds: tuple[int, int] | None) -> BadSampleError | None:
        """Read the names of the fields; return what is wrong with them."""
        if bounds is None:
            return BadSampleError(Reason.EMPTY_ARCHIVE, "the file is empty")
        try:
            self._header = self._split(blob.pread(bounds[0], bounds[1] - bounds[0]))
        except BadSampleError as err:
            return BadSampleError(err.reason, f"the header is damaged: {err.detail}")
        twice = [name for name, count in Counter(self._header).items() if count > 1]
        if twice:
            return BadSampleError(Reason.SCHEMA_ERROR, f"the header names {twice[0]!r} twice")
        return None


class _Lines:
    """The lines of a file with their ends, as text of one character a byte. A line that is longer than a record may be is cut."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self.offset = 0
        """Bytes of the lines that have been taken."""

    def __iter__(self) -> Iterator[str]:
        read = 0
        parts: list[bytes] = []
        size = 0
        while chunk := self._blob.pread(read, _CHUNK_BYTES):
            read += len(chunk)
            for piece in _split_lines(chunk):
                parts.append(piece)
                size += len(piece)
                if piece.endswith(b"\n") or size > MAX_ANNOTATION_BYTES:
                    yield self._take(parts)
                    parts, size = [], 0
        if parts:
            yield self._take(parts)

    def _take(self, parts: list[bytes]) -> str:
        line = b"".join(parts)
        self.offset += len(line)
        return line.decode("latin-1")


def _split_lines(chunk: bytes) -> list[bytes]:
    """Split at line feeds, which stay at the ends, and at nothing else."""
    *ended, last = chunk.split(b"\n")
    return [line + b"\n" for line in ended] + ([last] if last else [])


def _is_of_mosaic(url: str) -> bool:
    """Whether a file of offsets lies beside a shard. Raises DatasetError where that cannot be told."""
    plain = plain_name(url)
    try:
        fs, path = filesystem(f"{plain}.meta{url[len(plain) :]}")
        return bool(fs.exists(path))
    except HeadraceError:
        raise
    except Exception as err:  # drivers raise their libraries' errors as well
        raise unreadable_error(url, err) from err
