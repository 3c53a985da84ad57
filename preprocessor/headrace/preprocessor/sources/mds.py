"""MosaicML MDS shards: rows of typed columns, and an index.json that names the shards of its folder.

Layout of a shard, all numbers little-endian and 32 bits wide:

    number of rows n | n + 1 offsets, of the rows and of the end | the columns as JSON | rows
    row: the sizes of its columns of variable size, in order | the values of all columns

A shard describes itself, so that the index (which may list thousands of shards) is read only to list them, and to open a
shard with hashes. Hashes of algorithms that hashlib has are checked when the shard is opened; others (xxhash) are not.

Compressed shards (.zstd, .gz, .br, .bz2, .snappy) are unpacked into an unnamed temporary file. Rows have no key of their
own: the key is the row number.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa

from headrace.errors import DatasetError
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.base import NumberedShard, check_size
from headrace.preprocessor.sources.blob import Blob, BlobCache, open_blob, read_row, read_url
from headrace.preprocessor.sources.mds_columns import Decode, decoder
from headrace.preprocessor.sources.unpacked import CODECS, COPY_BYTES, Unpacking, unpack
from headrace.quarantine import BadSampleError, Reason, Rejected

INDEX_NAME = "index.json"
SUFFIXES = (".mds", *(f".mds{packing}" for packing in (".zstd", ".gz", ".br", ".bz2", ".snappy")))
MAX_INDEX_BYTES = 128 * 2**20  # an index has about a kilobyte per shard
_MAX_HEADER_BYTES = 2**20
_MAX_SNAPPY_RATIO = 32  # at best snappy encodes 64 bytes in 3
_MAX_SNAPPY_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of an MDS shard: how its values are stored and decoded."""

    name: str
    encoding: str
    size: int | None
    """Size of every value in bytes; None where values differ in size."""
    decode: Decode


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedShard:
    """One shard as index.json lists it: its possible files and their hashes."""

    names: tuple[str, ...]
    """Paths relative to the index, of the plain file and then of the compressed one if listed; either file may be missing."""
    hashes: Mapping[str, str]
    """Hexadecimal digests of the plain file, by algorithm."""


class MdsShard(NumberedShard):
    """A shard that is one MDS file, compressed or plain."""

    def __init__(self, url: str, cache: BlobCache | None = None) -> None:
        self._blob = open_blob(url, cache, in_parts=url.endswith(".mds"))
        self._columns: tuple[Column, ...] = ()
        self._offsets = np.zeros(1, np.int64)
        self.num_rows = 0
        self.rejected = ()
        try:
            if packing := url.rpartition(".mds")[2]:
                self._blob = _unpacked(self._blob, packing, url)
            header, offsets = _header(self._blob)
            self._columns = _columns(header, url)
            _check_hashes(header, self._blob, url)
        except BadSampleError as err:
            self.rejected = (Rejected(name="", reason=err.reason, detail=err.detail),)
            return
        self._offsets = offsets
        self.num_rows = len(offsets) - 1

    def read(self, row: int) -> Record:
        """Return the record at `row`, whose fields are the decoded columns. Raises BadSampleError where it is damaged."""
        key = self.key(row)
        data = read_row(self._blob, int(self._offsets[row]), int(self._offsets[row + 1]))
        values = _split(data, self._columns)
        fields = {column.name: _decoded(column, value) for column, value in zip(self._columns, values, strict=True)}
        return Record(key=key, fields=fields, load=_no_files)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Ask for the rows; see `Shard.prefetch`."""
        self._blob.prefetch([(int(self._offsets[row]), int(self._offsets[row + 1])) for row in rows])

    def annotations(self, paths: Collection[str] | None) -> Iterator[Mapping[str, Any] | None]:
        """Yield the fields of each row; see `Shard.annotations`."""
        self._blob.fetch_whole()
        yield from super().annotations(paths)

    def close(self) -> None:
        """Close the file."""
        self._blob.close()


def parse_index(data: bytes, url: str) -> list[IndexedShard]:
    """Parse an index.json and return the shards it lists.

    Raises DatasetError where it is damaged, of another format, or has columns that are pickled or of an unknown encoding.
    """
    try:
        document = json.loads(data)
        shards = [shard for shard in document["shards"] if _is_mds(shard, document["version"])]
        if len(shards) < len(document["shards"]):
            raise DatasetError(f"{url} lists shards that are not MDS version 2; convert them with mosaicml-streaming")
        for shard in shards:
            _columns(shard, url)
        return [_indexed(shard) for shard in shards]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BadSampleError) as err:
        what = err.detail if isinstance(err, BadSampleError) else f"{type(err).__name__}: {err}"
        raise DatasetError(f"{url} is not a sound index of MDS shards ({what}); write the data set again or restore it") from err


def _is_mds(shard: Mapping[str, Any], version: int) -> bool:
    return version == 2 and shard["version"] == 2 and shard["format"] == "mds"


def _indexed(shard: Mapping[str, Any]) -> IndexedShard:
    infos = [info for info in (shard["raw_data"], shard["zip_data"]) if info]
    names = tuple(str(info["basename"]) for info in infos)
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"the name {name!r} leads outside of the data set")
    hashes = dict(shard["raw_data"]["hashes"])
    return IndexedShard(names=names, hashes=hashes)


def choose_files(indexed: Sequence[IndexedShard], present: set[str], whole: bool, url: str) -> list[str]:
    """Return the name of one file for each shard: the plain file if it is in `present`, else the compressed one.

    A shard with neither is left out, or raises DatasetError if `whole`, that is if the whole data set is asked for.
    """
    chosen = []
    for shard in indexed:
        name = next((name for name in shard.names if name in present), None)
        if name is not None:
            chosen.append(name)
        elif whole:
            raise DatasetError(
                f"{url} lists {shard.names[-1]}, which is not there; complete the data set or write its index again"
            )
    return chosen


def _header(blob: Blob) -> tuple[Mapping[str, Any], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the JSON in front of the rows, and the offsets of the n rows and of the end, (n + 1,). Raises BadSampleError."""
    count = blob.pread(0, 4)
    num_rows = int.from_bytes(count, "little")
    table_end = 4 * (num_rows + 2)
    if len(count) < 4 or table_end > blob.size:
        raise BadSampleError(Reason.ARCHIVE_TRUNCATED, f"{num_rows} rows do not fit into {blob.size} bytes")
    offsets = np.frombuffer(blob.pread(4, table_end - 4), "<u4").astype(np.int64)
    size = int(offsets[0]) - table_end
    if not 0 < size <= _MAX_HEADER_BYTES:
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"the first row is at byte {offsets[0]}, the offsets end at {table_end}")
    try:
        header = json.loads(blob.pread(table_end, size))
    except (ValueError, RecursionError) as err:
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"the description of the columns is damaged: {err}") from err
    if not isinstance(header, dict):
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, "the description of the columns is no object")
    return header, offsets


def _columns(header: Mapping[str, Any], url: str) -> tuple[Column, ...]:
    """Return the columns that a shard's header or its index entry describes.

    Raises BadSampleError where the description is damaged, DatasetError for an encoding that is not supported.
    """
    lists = [header.get(f"column_{part}") for part in ("names", "encodings", "sizes")]
    if not all(isinstance(part, list) for part in lists) or len({len(cast(list[Any], part)) for part in lists}) != 1:
        raise BadSampleError(
            Reason.ARCHIVE_CORRUPT, "column_names, column_encodings and column_sizes are not lists of one length"
        )
    return tuple(_column(name, encoding, size, url) for name, encoding, size in zip(*cast(list[list[Any]], lists), strict=True))


def _column(name: Any, encoding: Any, size: Any, url: str) -> Column:
    if not isinstance(name, str) or not isinstance(encoding, str) or not (size is None or (isinstance(size, int) and size >= 0)):
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"no column: name {name!r}, encoding {encoding!r}, size {size!r}")
    decode = decoder(encoding)
    if decode is None:
        raise DatasetError(
            f"{url}: the column {name!r} has the encoding {encoding!r}, which is not known; write it as json or bytes"
        )
    return Column(name=name, encoding=encoding, size=size or None, decode=decode)


def _split(data: bytes, columns: Sequence[Column]) -> list[bytes]:
    """Split a row into the bytes of each column's value. Raises BadSampleError where they do not fill the row exactly."""
    variable = sum(column.size is None for column in columns)
    head = np.frombuffer(data[: 4 * variable].ljust(4 * variable, b"\0"), "<u4").tolist()
    sizes = iter(head)
    position = 4 * variable
    values = []
    for column in columns:
        end = position + (next(sizes) if column.size is None else column.size)
        values.append(data[position:end])
        position = end
    if position != len(data):
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"the columns take {position} bytes, the row has {len(data)}")
    return values


def _decoded(column: Column, value: bytes) -> Any:
    try:
        return column.decode(value)
    except UnicodeDecodeError as err:
        raise BadSampleError(Reason.ENCODING_ERROR, f"{column.name} is not UTF-8: {err.reason} at byte {err.start}") from err
    except (ValueError, IndexError, OverflowError, RecursionError) as err:
        raise BadSampleError(Reason.SCHEMA_ERROR, f"{column.name} is no value of {column.encoding}: {err}") from err


def _check_hashes(header: Mapping[str, Any], blob: Blob, url: str) -> None:
    """Compare a shard with its hashes in the index.

    Raises BadSampleError where they differ, DatasetError where the index cannot be read.
    """
    if not header.get("hashes"):
        return
    folder, _, name = url.rpartition("/")
    index_url = posixpath.join(folder, INDEX_NAME) if folder else INDEX_NAME
    indexed = parse_index(read_url(index_url, MAX_INDEX_BYTES), index_url)
    expected = next((shard.hashes for shard in indexed if name in map(posixpath.basename, shard.names)), {})
    digests = {algorithm: hashlib.new(algorithm) for algorithm in expected if algorithm in hashlib.algorithms_guaranteed}
    if digests:
        blob.fetch_whole()
    for start in range(0, blob.size if digests else 0, COPY_BYTES):
        chunk = blob.pread(start, COPY_BYTES)
        for digest in digests.values():
            digest.update(chunk)
    for algorithm, digest in digests.items():
        if digest.hexdigest() != expected[algorithm]:
            raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"its {algorithm} is {digest.hexdigest()}, not {expected[algorithm]}")


def _unpacked(packed: Blob, packing: str, url: str) -> Blob:
    """Unpack a compressed shard into an unnamed temporary file. Closes `packed`.

    Raises BadSampleError where the data are damaged or the shard is too large.
    """
    if packing != ".snappy":
        blob, failure = unpack(packed, url, CODECS[packing])
        if failure is not None:
            del blob  # what could be unpacked is not used, and its space is given back with the last reference
            raise failure
        return blob
    unpacking = Unpacking(packed, url)
    try:
        unpacking.write(_snappy(packed))
    except BaseException as err:
        unpacking.discard()
        if isinstance(err, pa.ArrowException) or (isinstance(err, OSError) and err.errno is None):
            raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"the snappy data is damaged: {err}") from err
        raise
    finally:
        packed.close()
    return unpacking.finish()


def _snappy(packed: Blob) -> bytes:
    """Unpack one block of snappy data in memory; its length precedes it as a varint. Raises BadSampleError."""
    check_size("the snappy data", packed.size, _MAX_SNAPPY_BYTES)
    data = packed.pread(0, packed.size)
    size = shift = 0
    for byte in data[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if size > _MAX_SNAPPY_RATIO * len(data):
        raise BadSampleError(Reason.ARCHIVE_CORRUPT, f"{len(data)} bytes of snappy data cannot become {size}")
    check_size("the shard, unpacked,", size, _MAX_SNAPPY_BYTES)
    return cast(bytes, pa.Codec("snappy").decompress(data, decompressed_size=size, asbytes=True))


def _no_files(name: Any) -> bytes:
    raise BadSampleError(Reason.SCHEMA_ERROR, f"expected a medium as bytes, got the string {name!r}")
