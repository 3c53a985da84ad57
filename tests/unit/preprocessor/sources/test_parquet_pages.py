"""Headers of Parquet's pages: how much of a column comes from its dictionary, and how long a value of it may be."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor.sources.blob import Blob, open_blob
from headrace.preprocessor.sources.parquet_bounds import rows_at_once
from headrace.preprocessor.sources.parquet_pages import DictionaryUse, dictionary_use, unpacked_page_bytes

VALUES = [f"{row % 50:05d}" * (row % 50) for row in range(3000)]


def written(path: Path, values: pa.Array, **options: Any) -> tuple[pq.FileMetaData, Blob]:
    pq.write_table(pa.table({"x": values}), path, **options)
    return pq.read_metadata(path), open_blob(str(path))


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_values_and_the_longest_are_found(tmp_path: Path, compression: str, version: str) -> None:
    metadata, blob = written(tmp_path / "s.parquet", pa.array(VALUES), compression=compression, data_page_version=version)
    assert dictionary_use(metadata.row_group(0).column(0), blob) == DictionaryUse(values=3000, longest_bytes=49 * 5)


def test_values_behind_a_full_dictionary_are_not_counted(tmp_path: Path) -> None:
    noise = random.Random(0)
    values = pa.array([noise.randbytes(2000) for _ in range(5000)])  # the dictionary ends at 1 MiB, after 1,024 of them
    metadata, blob = written(tmp_path / "s.parquet", values)
    assert dictionary_use(metadata.row_group(0).column(0), blob) == DictionaryUse(values=1024, longest_bytes=2000)


def test_long_statistics_in_a_header_do_not_end_it(tmp_path: Path) -> None:
    values = pa.array([letter * 3000 for letter in "abc"] * 100)
    metadata, blob = written(tmp_path / "s.parquet", values, data_page_size=1)
    assert dictionary_use(metadata.row_group(0).column(0), blob) == DictionaryUse(values=300, longest_bytes=3000)


def test_pages_that_do_not_parse_tell_nothing(tmp_path: Path) -> None:
    metadata, _ = written(tmp_path / "s.parquet", pa.array(VALUES))
    data = (tmp_path / "s.parquet").read_bytes()
    begin = metadata.row_group(0).column(0).dictionary_page_offset
    for place, garbage in (
        (begin, b"\xff" * 40),
        (begin, bytes(40)),
        (begin + 2, b"\xfe\xff\xff\xff\x0f"),
        (begin, b"\x1c" * 400),
    ):
        (tmp_path / "bad.parquet").write_bytes(data[:place] + garbage + data[place + len(garbage) :])
        assert dictionary_use(metadata.row_group(0).column(0), open_blob(str(tmp_path / "bad.parquet"))) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_a_header_or_none(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("header") / "f"
    path.write_bytes(data)
    size = unpacked_page_bytes(open_blob(str(path)), 0)
    assert size is None or size >= 0


def test_few_rows_at_once_where_each_may_be_as_long_as_the_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.preprocessor.sources.parquet_bounds.USUAL_BYTES", 1 << 20)
    monkeypatch.setattr("headrace.preprocessor.sources.parquet_bounds.MOST_STREAM_BYTES", 1 << 18)
    shared = [bytes(10_000), bytes(9_000)] * 500  # 19 KB in the file stand for 9.5 MB
    metadata, blob = written(tmp_path / "flat.parquet", pa.array(shared))
    assert rows_at_once(metadata, 0, blob) == (1 << 18) // (19_000 + 2 * 4)
    metadata, blob = written(tmp_path / "lists.parquet", pa.array([shared]))
    assert rows_at_once(metadata, 0, blob) == 0
    noise = random.Random(0)
    metadata, blob = written(tmp_path / "pictures.parquet", pa.array([[noise.randbytes(9_000)] for _ in range(300)]))
    assert rows_at_once(metadata, 0, blob) > 50
