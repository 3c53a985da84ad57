"""The shards of the remote data sets: few files on disk, each of which stands for many shards."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.preprocess.inputs import large_photos
from benchmarks.preprocess.workload import captions, write_shards

FILES = 4
"""On disk, for all shards of a set."""
ROW_GROUP = 10
_COLUMNS = {"jpg": "bytes", "txt": "str"}


class Shards:
    """A set of shards, as a server has them."""

    def __init__(self, folder: Path, num_shards: int) -> None:
        """`folder` holds the files that the shards share."""
        files = sorted(path for path in folder.iterdir())
        self._contents = list(map(_mapped, files))
        suffix = files[0].suffix
        self._numbers = {f"shard-{number:05d}{suffix}": number for number in range(num_shards)}
        self._others = {"": memoryview("".join(f'<a href="{name}">{name}</a>\n' for name in self._numbers).encode())}
        if suffix == ".mds":
            index = {"version": 2, "shards": [_entry(name, len(self._of(name))) for name in self._numbers]}
            self._others["index.json"] = memoryview(json.dumps(index).encode())
            page = bytes(self._others[""]) + b'<a href="index.json">index.json</a>'
            self._others[""] = memoryview(page)

    def content(self, name: str) -> tuple[memoryview, str] | None:
        """The content of a file and its media type; "" is the folder's page. None where there is no such file."""
        if name in self._numbers:
            return self._of(name), "application/octet-stream"
        if name in self._others:
            return self._others[name], "application/json" if name else "text/html"
        return None

    def _of(self, name: str) -> memoryview:
        return self._contents[self._numbers[name] % len(self._contents)]


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _entry(name: str, size: int) -> dict[str, object]:
    """A shard in the index of an MDS data set."""
    return {
        "version": 2,
        "format": "mds",
        "column_names": list(_COLUMNS),
        "column_encodings": list(_COLUMNS.values()),
        "column_sizes": [None, None],
        "raw_data": {"basename": name, "bytes": size, "hashes": {}},
        "zip_data": None,
        "hashes": [],
    }


def samples() -> Iterator[Mapping[str, bytes]]:
    """Photographs of 0.6 megapixels with captions, again and again."""
    pictures, texts = large_photos(), captions()
    number = 0
    while True:
        yield {"jpg": pictures[number % len(pictures)], "txt": texts[number % len(texts)]}
        number += 1


def sample_bytes() -> float:
    """Bytes of a sample's content, on average."""
    pictures, texts = large_photos(), captions()
    return sum(map(len, pictures)) / len(pictures) + sum(map(len, texts)) / len(texts)


def write_tars(folder: Path, rows: int) -> None:
    """WebDataset tars of so many samples."""
    write_shards(folder, iter(samples()), FILES * rows, FILES)


def write_parquet(folder: Path, rows: int) -> None:
    """Parquet in row groups of ROW_GROUP rows."""
    folder.mkdir(parents=True)
    source = samples()
    for number in range(FILES):
        taken = list(islice(source, rows))
        table = pa.table({"image": [one["jpg"] for one in taken], "text": [one["txt"].decode() for one in taken]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=ROW_GROUP, use_dictionary=False)


def write_mds(folder: Path, rows: int) -> None:
    """MDS shards, as MosaicML Streaming writes them."""
    folder.mkdir(parents=True)
    source = samples()
    header = json.dumps({key: value for key, value in _entry("", 0).items() if key.startswith("column")}, sort_keys=True).encode()
    for number in range(FILES):
        packed = [_row(one["jpg"], one["txt"]) for one in islice(source, rows)]
        begin = 4 * (rows + 2) + len(header)
        offsets = np.cumsum([begin, *map(len, packed)]).astype("<u4").tobytes()
        (folder / f"{number}.mds").write_bytes(b"".join([rows.to_bytes(4, "little"), offsets, header, *packed]))


def _row(jpeg: bytes, text: bytes) -> bytes:
    return np.array([len(jpeg), len(text)], "<u4").tobytes() + jpeg + text
