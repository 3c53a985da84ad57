"""LitData chunks, as `litdata.optimize` writes them: rows of typed leaves, and an index.json that says what the leaves are.

Layout of a chunk, all numbers little-endian and 32 bits wide:

    number of rows n | n + 1 offsets, of the rows and of the end | rows
    row: the sizes of its leaves, in order | the values of all leaves

A row is a tree of dicts and lists, whose shape index.json has; a row that is no dict has the fields "0", "1", ... Packed are

    chunk-0-0.zstd.bin    the whole file, by zstd
    LDFZ01\\0\\0            frames of many rows each, behind a table of them
    each row by itself    where index.json says `compression_level: sample`

of which the first two are unpacked into an unnamed temporary file.

Rows of texts, numbers and lists of these are an Arrow file at the end instead: Arrow | its size | LDARW01\\0. Rows have no key of
their own: the key is the row number. Encrypted chunks and those of other loaders (tokens, Parquet) are refused.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import DatasetError
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.arrow_stream import ArrowShard
from headrace.preprocessor.sources.base import MAX_MEDIUM_BYTES, NumberedShard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, BlobPart, open_blob, read_row, read_url
from headrace.preprocessor.sources.litdata_leaves import decoded
from headrace.preprocessor.sources.unpacked import Unpacking, unpack
from headrace.quarantine import BadSampleError, Reason, Rejected

INDEX_NAME = "index.json"
CHUNK = re.compile(r"(?:^|/)chunk-\d+-\d+(?:\.zstd(?::\d+)?)?\.bin$")
"""What the names of chunks look like."""
MAX_INDEX_BYTES = 128 * 2**20
_FRAMED, _FRAMED_HEAD, _FRAME = b"LDFZ01\0\0", struct.Struct("<8sHHIII"), struct.Struct("<IIQII")
_ARROW_TAIL = struct.Struct("<I8s")
_ARROW = b"LDARW01\0"
_MAX_FRAME_BYTES = 2**30
_CONTAINERS = {"dict": dict, "list": list, "tuple": list}
_INDEXES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What an index.json says of the chunks beside it."""

    names: tuple[str, ...]
    formats: tuple[str, ...]
    """How each leaf of a row is stored."""
    tree: Any
    """The shape of a row: a leaf's number, or a dict or list of trees."""
    is_row_packed: bool
    """Whether each row is packed by itself."""


class LitDataShard(NumberedShard):
    """A shard that is one LitData chunk."""

    def __init__(self, url: str, cache: BlobCache | None = None) -> None:
        self._index = read_index(posixpath.join(posixpath.dirname(url), INDEX_NAME))
        self._blob = open_blob(url, cache)
        self._offsets = np.zeros(1, np.int64)
        self._table: ArrowShard | None = None
        self.rejected = ()
        try:
            if re.search(r"\.zstd(?::\d+)?\.bin$", url):
                self._blob, failure = unpack(self._blob, url, "zstd")
                if failure:
                    raise failure
            if self._blob.pread(0, len(_FRAMED)) == _FRAMED:
                self._blob, self._offsets = _unframed(self._blob, url)
            elif (size := _arrow_size(self._blob)) is not None:
                part = BlobPart(self._blob, self._blob.size - _ARROW_TAIL.size - size, size)
                self._table = ArrowShard(url, blob=part)
                self.rejected = self._table.rejected
            else:
                self._offsets = _offsets(self._blob)
        except BadSampleError as err:
            self.rejected = (Rejected(name="", reason=err.reason, detail=err.detail),)
            self._offsets = np.zeros(1, np.int64)
        self.num_rows = self._table.num_rows if self._table else len(self._offsets) - 1

    def read(self, row: int) -> Record:
        """Return the record at `row`, with its leaves decoded. Raises BadSampleError where it is damaged."""
        key = self.key(row)
        if self._table:
            return self._table.read(row)
        data = read_row(self._blob, int(self._offsets[row]), int(self._offsets[row + 1]))
        if self._index.is_row_packed:
            data = _inflated(data, MAX_MEDIUM_BYTES)
        leaves = [decoded(form, value) for form, value in zip(self._index.formats, _split(data, self._index), strict=True)]
        tree = _filled(self._index.tree, leaves)
        fields = tree if isinstance(tree, dict) else {str(n): v for n, v in enumerate(tree if isinstance(tree, list) else [tree])}
        return Record(key=key, fields=fields, load=_no_files)

    def close(self) -> None:
        """Close the file."""
        self._blob.close()


@functools.lru_cache(maxsize=_INDEXES)
def read_index(url: str) -> Index:
    """Read an index.json. Raises DatasetError where it is not there, is damaged, or describes what is not read."""
    return parse_index(read_url(url, MAX_INDEX_BYTES), url)


def parse_index(data: bytes, url: str) -> Index:
    """Parse an index.json; `url` names it in errors. Raises DatasetError where it is damaged or describes what is not read."""
    try:
        document = json.loads(data)
        config = document["config"]
        names = tuple(str(chunk["filename"]) for chunk in document["chunks"])
        formats = tuple(map(str, config["data_format"]))
        numbers = iter(range(len(formats)))
        spec = config["data_spec"]
        tree = _tree(json.loads(spec)[1], numbers) if spec else next(numbers)
        if next(numbers, None) is not None:
            raise ValueError("it has more formats than leaves")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, StopIteration) as err:
        raise DatasetError(
            f"{url} is no sound index of LitData chunks ({type(err).__name__}: {err}); write the data set again or restore it"
        ) from err
    if config.get("encryption"):
        raise DatasetError(f"{url}: the chunks are encrypted, which is not read; write the data set without encryption")
    if config.get("item_loader") not in (None, "PyTreeLoader"):
        raise DatasetError(
            f"{url}: the chunks are for LitData's {config['item_loader']}, and only those of its PyTreeLoader are read; of "
            "tokens, give the texts that they were made from"
        )
    for name in names:
        if not CHUNK.search(name) or "/" in name:
            raise DatasetError(f"{url} lists {name!r}, which is no name of a chunk; write the data set again or restore it")
    return Index(names=names, formats=formats, tree=tree, is_row_packed=config.get("compression_level") == "sample")


def _tree(spec: Mapping[str, Any], numbers: Iterator[int]) -> Any:
    """Return the shape of a row as index.json has it: torch's pytree specs, which know containers by the names of their types."""
    if spec["type"] is None:
        return next(numbers)
    container = _CONTAINERS.get(str(spec["type"]).rpartition(".")[2])
    trees = [_tree(child, numbers) for child in spec["children_spec"]]
    if container is dict:
        return dict(zip(map(str, json.loads(spec["context"])), trees, strict=True))
    if container is list:
        return trees
    raise ValueError(f"rows have a {spec['type']}, and only dicts, lists and tuples are known")


def _filled(tree: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _filled(child, leaves) for key, child in tree.items()}
    return [_filled(child, leaves) for child in tree] if isinstance(tree, list) else leaves[tree]


def _split(data: bytes, index: Index) -> list[bytes]:
    """Split a row into the bytes of its leaves. Raises BadSampleError where they do not fill the row exactly."""
    position = 4 * len(index.formats)
    values = []
    for size in np.frombuffer(data[:position].ljust(position, b"\0"), "<u4").tolist():
        values.append(data[position : position + size])
        position += size
    if position != len(data):
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"the leaves take {position} bytes, the row has {len(data)}")
    return values


def _offsets(blob: Blob) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the offsets of the n rows and of the end, (n + 1,). Raises BadSampleError."""
    num_rows = int.from_bytes(blob.pread(0, 4), "little")
    table_end = 4 * (num_rows + 2)
    if blob.size < 8 or table_end > blob.size:
        raise BadSampleError(Reason.ARCHIVE_TRUNCATED, f"{num_rows} rows do not fit into {blob.size} bytes")
    offsets = np.frombuffer(blob.pread(4, table_end - 4), "<u4").astype(np.int64)
    if offsets[0] != table_end:
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"the first row is at byte {offsets[0]}, the offsets end at {table_end}")
    return offsets


def _arrow_size(blob: Blob) -> int | None:
    """Return the bytes of the Arrow file at the end of a chunk; None if it has none."""
    if blob.size < _ARROW_TAIL.size:
        return None
    size, mark = _ARROW_TAIL.unpack(blob.pread(blob.size - _ARROW_TAIL.size, _ARROW_TAIL.size))
    return size if mark == _ARROW and size <= blob.size - _ARROW_TAIL.size else None


def _unframed(blob: Blob, url: str) -> tuple[Blob, np.ndarray[Any, np.dtype[np.int64]]]:
    """Unpack a chunk of frames; return the rows one behind the other, and their offsets. Closes `blob`. Raises BadSampleError."""
    _, version, _, num_rows, _, num_frames = _FRAMED_HEAD.unpack(blob.pread(0, _FRAMED_HEAD.size).ljust(_FRAMED_HEAD.size, b"\0"))
    start = _FRAMED_HEAD.size + 4 * (num_rows + 1)
    if version != 1:
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"frames of version {version}, and only version 1 is known")
    if start + _FRAME.size * num_frames > blob.size:
        raise BadSampleError(
            Reason.ARCHIVE_TRUNCATED, f"{num_rows} rows in {num_frames} frames do not fit into {blob.size} bytes"
        )
    offsets = np.frombuffer(blob.pread(_FRAMED_HEAD.size, 4 * (num_rows + 1)), "<u4").astype(np.int64)
    unpacking = Unpacking(blob, url)
    written = 0
    try:
        for _, _, place, packed, size in _FRAME.iter_unpack(blob.pread(start, _FRAME.size * num_frames)):
            check_size("a frame, unpacked,", size, _MAX_FRAME_BYTES)
            data = _inflated(blob.pread(place, packed), size)
            written += len(data)
            unpacking.write(data)
        if written != offsets[-1]:
            raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"the frames have {written} bytes, and the rows end at {offsets[-1]}")
    except BaseException:
        unpacking.discard()
        raise
    finally:
        blob.close()
    return unpacking.finish(), offsets


def _inflated(data: bytes, most: int) -> bytes:
    """Unpack zstd data. Raises BadSampleError if it is damaged or becomes more than `most` bytes."""
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            result = bytes(stream.read(most + 1))
    except (pa.ArrowException, OSError, ValueError) as err:
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"the zstd data is damaged: {err}") from err
    check_size("zstd data, unpacked,", len(result), most)
    return result


def _no_files(name: Any) -> bytes:
    raise BadSampleError(Reason.SCHEMA_ERROR, f"expected a medium as bytes, got the string {name!r}")
