"""JSONL files beside media files: one annotation a line. Packed ones (.jsonl.gz) are unpacked first.

Every line that is not blank is a row, whose key is the line's number from 0, counting blank lines. Reading a line that is not
JSON raises BadSampleError and leaves the other rows readable.
"""

from __future__ import annotations

from array import array
from typing import Any

from headrace.preprocessor.sources.annotation import parse_annotation
from headrace.preprocessor.sources.blob import Blob
from headrace.preprocessor.sources.row_files import RowFileShard
from headrace.quarantine import BadSampleError

_CHUNK_BYTES = 2**20


class JsonlShard(RowFileShard):
    """A shard that is one JSONL file, with a row for each line that is not blank."""

    what = "the line"

    def _parse(self, data: bytes) -> dict[str, Any]:
        return parse_annotation(data, self.what)

    def _index(self, blob: Blob) -> tuple[array[int], array[int], BadSampleError | None]:
        return *index_lines(blob), None


def index_lines(blob: Blob) -> tuple[array[int], array[int]]:
    """Return the numbers of the n lines that are not blank, (n,), and their bounds in bytes as start, stop, start, ..., (2n,).

    Reads the file once, in chunks.
    """
    lines, bounds = array("q"), array("q")
    number = start = offset = 0
    blank = True
    while chunk := blob.pread(offset, _CHUNK_BYTES):
        position = 0
        while True:
            newline = chunk.find(b"\n", position)
            end = len(chunk) if newline < 0 else newline
            blank = blank and not chunk[position:end].strip()
            if newline < 0:
                break
            if not blank:
                lines.append(number)
                bounds.extend((start, offset + newline))
            number, start, blank, position = number + 1, offset + newline + 1, True, newline + 1
        offset += len(chunk)
    if not blank:
        lines.append(number)
        bounds.extend((start, offset))
    return lines, bounds
