"""Files of rows that name media in others: JSON arrays, CSV, packed JSONL, and the usual names of media columns."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.preprocessor.sources import Shard, json_array, open_shard
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec
from tests.examples import with_examples


def opened(path: Path, **fields: Any) -> Shard:
    return open_shard(str(path), SourceSpec(path=str(path.parent), **fields))


def rows(path: Path, **fields: Any) -> list[Any]:
    """The fields of each row, or the reason for which it is refused."""
    with opened(path, **fields) as shard:
        return [_row(shard, row) for row in range(shard.num_rows)]


def _row(shard: Shard, row: int) -> Any:
    try:
        return shard.read(row).fields
    except BadSampleError as err:
        return err.reason


def written(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def damage(path: Path) -> list[Reason]:
    with opened(path) as shard:
        return [item.reason for item in shard.rejected]


# JSON


NASTY = st.text(st.sampled_from('"\\{}[],: \né\u2028x'), max_size=12)
VALUES = st.recursive(
    NASTY | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NASTY, inner, max_size=3),
    max_leaves=8,
)


@with_examples(30)
@given(
    st.lists(st.dictionaries(NASTY, VALUES, max_size=3), max_size=8),
    st.sampled_from([None, 1]),
    st.integers(2, 40),
    st.booleans(),
)
def test_items_of_an_array_are_those_that_json_finds(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], indent: int | None, chunk: int, ascii_only: bool
) -> None:
    text = json.dumps(items, indent=indent, ensure_ascii=ascii_only)
    path = written(tmp_path_factory.mktemp("json") / "a.json", f"\n {text} \n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_CHUNK_BYTES", chunk)
        with opened(path) as shard:
            assert shard.rejected == ()
            assert [shard.key(row) for row in range(shard.num_rows)] == [str(number) for number in range(len(items))]
            for row in random.Random(0).sample(range(len(items)), len(items)):
                assert shard.read(row).fields == items[row]


@given(st.text(st.sampled_from('"\\{}[],a'), max_size=30), st.integers(2, 7))
def test_any_bytes_behind_a_bracket_are_items_or_damage(tmp_path_factory: pytest.TempPathFactory, text: str, chunk: int) -> None:
    path = written(tmp_path_factory.mktemp("json") / "a.json", f"[{text}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_CHUNK_BYTES", chunk)
        small = [rows(path), damage(path)]
    assert small == [rows(path), damage(path)], "whatever the size of a chunk"


def test_bad_items_are_refused_by_row(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", b'\xef\xbb\xbf[{"text": "a"}, 5, {"text": "\xff"}, {"text" "b"}, {"text": "c"},]')
    expected = [
        {"text": "a"},
        Reason.SCHEMA_ERROR,
        Reason.ENCODING_ERROR,
        Reason.SCHEMA_ERROR,
        {"text": "c"},
        Reason.SCHEMA_ERROR,
    ]
    assert rows(path) == expected
    assert damage(path) == []


@pytest.mark.parametrize(
    ("text", "left", "reason"),
    [
        ('[{"text": "a"}, {"text": "b', 1, Reason.ARCHIVE_TRUNCATED),
        ('[{"text": "a"}, {"text": "b"}', 1, Reason.ARCHIVE_TRUNCATED),
        ("[", 0, Reason.ARCHIVE_TRUNCATED),
        ('[{"text": "a"}] and more', 1, Reason.ARCHIVE_CORRUPT),
        ('[{"text": "a"}]]', 1, Reason.ARCHIVE_CORRUPT),
        ("", 0, Reason.EMPTY_ARCHIVE),
        (" \n ", 0, Reason.EMPTY_ARCHIVE),
        ('{\n "images": [],\n "annotations": []\n}', 0, Reason.SCHEMA_ERROR),
        ('"text"', 0, Reason.SCHEMA_ERROR),
        ("\x00\x01", 0, Reason.SCHEMA_ERROR),
    ],
)
def test_a_damaged_array_gives_what_comes_before(tmp_path: Path, text: str, left: int, reason: Reason) -> None:
    path = written(tmp_path / "a.json", text)
    assert rows(path) == [{"text": "a"}] * left
    assert damage(path) == [reason]


def test_an_empty_array_has_no_row(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", " [ \n ] ")
    assert rows(path) == damage(path) == []


def test_a_huge_item_is_refused_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.preprocessor.sources.row_files.MAX_ANNOTATION_BYTES", 100)
    path = written(tmp_path / "a.json", json.dumps([{"text": "x" * 100}, {"text": "y"}]))
    assert rows(path) == [Reason.TOO_LARGE, {"text": "y"}]


def test_lines_in_a_json_file_are_lines(tmp_path: Path) -> None:
    """What NeMo's manifests and many data sets of the Hub hold."""
    path = written(tmp_path / "a.json", '{"text": "a"}\n\nnot json\n{"text": "b"}')
    assert rows(path) == [{"text": "a"}, Reason.SCHEMA_ERROR, {"text": "b"}]
    with opened(path) as shard:
        assert shard.key(2) == "3"


# Packed files


def packed(data: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def zstd(data: bytes) -> bytes:
    return packed(data, "zstd")


def bz2(data: bytes) -> bytes:
    return packed(data, "bz2")


@pytest.mark.parametrize(("end", "pack"), [("gz", gzip.compress), ("zst", zstd), ("zstd", zstd), ("bz2", bz2)])
def test_packed_lines(tmp_path: Path, end: str, pack: Any) -> None:
    texts = [f"{number} {random.Random(number).randbytes(2000).hex()}" for number in range(1500)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path = written(tmp_path / f"a.jsonl.{end}", pack(lines))
    with opened(path) as shard:
        assert shard.num_rows == 1500
        assert shard.read(1234).fields == {"text": texts[1234]}
    cut = written(tmp_path / f"b.jsonl.{end}", path.read_bytes()[: path.stat().st_size // 2])
    with opened(cut) as shard:
        assert [item.reason in (Reason.ARCHIVE_TRUNCATED, Reason.ARCHIVE_CORRUPT) for item in shard.rejected] == [True]
        assert 0 < shard.num_rows < 1500
        assert shard.read(0).fields == {"text": texts[0]}
    assert damage(written(tmp_path / f"c.jsonl.{end}", b"plain")) == [Reason.ARCHIVE_CORRUPT]


@pytest.mark.parametrize("text", ['{"text": "a", "n": "1"}\n', '[{"text": "a", "n": "1"}]', "text,n\na,1\n", "text\tn\na\t1\n"])
def test_other_packed_rows(tmp_path: Path, text: str) -> None:
    """Also C4's lines, under the name .json.gz."""
    end = {"{": "json", "[": "json"}.get(text[0], "tsv" if "\t" in text else "csv")
    assert rows(written(tmp_path / f"a.{end}.gz", gzip.compress(text.encode()))) == [{"text": "a", "n": "1"}]


# CSV


def csv_text(records: list[list[str]], separator: str = ",", end: str = "\n") -> str:
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=separator, lineterminator=end).writerows(records)
    return buffer.getvalue()


CELLS = st.text(st.sampled_from('",\t\n;é \u2028\x85x'), max_size=6)


@given(
    st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=8),
    st.sampled_from([(",", "csv"), ("\t", "tsv")]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_records_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, records: list[list[str]], kind: tuple[str, str], end: str
) -> None:
    separator, suffix = kind
    text = csv_text([["text", "image"], *records], separator, end)
    path = written(tmp_path_factory.mktemp("csv") / f"a.{suffix}", text)
    expected: list[Any] = [{"text": first or None, "image": second or None} for first, second in records]
    if separator == "\t":
        joined = [any(mark in "".join(record) for mark in "\t\n") for record in records]
        expected = [Reason.SCHEMA_ERROR if is_joined else row for is_joined, row in zip(joined, expected, strict=True)]
    assert rows(path) == expected
    assert damage(path) == []


def test_bad_records_are_refused_by_row(tmp_path: Path) -> None:
    lines = [
        b"\xef\xbb\xbf,text,image",
        b"0,a,1.jpg",
        b"1,b",
        b"",
        b"2,c,2.jpg,more",
        b'3,"d" e,3.jpg',
        b"4,\xff,4.jpg",
        b'5,"f, ""g""\nh",5.jpg',
        b'6,"not closed,6.jpg',
        b"7,",
    ]
    assert rows(written(tmp_path / "a.csv", b"\n".join(lines))) == [
        {"text": "a", "image": "1.jpg"},
        Reason.SCHEMA_ERROR,
        Reason.SCHEMA_ERROR,
        Reason.SCHEMA_ERROR,
        Reason.ENCODING_ERROR,
        {"text": 'f, "g"\nh', "image": "5.jpg"},
        Reason.SCHEMA_ERROR,
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Reason.EMPTY_ARCHIVE),
        (b"\n\n", Reason.EMPTY_ARCHIVE),
        (b"text,image,text\na,b,c\n", Reason.SCHEMA_ERROR),
        (b'text,"image\n', Reason.SCHEMA_ERROR),
        (b"text,\xff\na,b\n", Reason.ENCODING_ERROR),
    ],
)
def test_a_file_without_a_sound_header_is_refused(tmp_path: Path, data: bytes, reason: Reason) -> None:
    path = written(tmp_path / "a.csv", data)
    assert rows(path) == []
    assert damage(path) == [reason]


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.preprocessor.sources.csv_rows.MAX_ANNOTATION_BYTES", 100)
    monkeypatch.setattr("headrace.preprocessor.sources.csv_rows._CHUNK_BYTES", 40)
    monkeypatch.setattr("headrace.preprocessor.sources.row_files.MAX_ANNOTATION_BYTES", 100)
    path = written(tmp_path / "a.csv", "text,n\n" + "x" * 250 + "\na,1\n")
    assert rows(path) == [Reason.TOO_LARGE, Reason.TOO_LARGE, Reason.SCHEMA_ERROR, {"text": "a", "n": "1"}]


@pytest.mark.parametrize("end", ["", ".gz"])
def test_shards_of_mosaic_have_no_quotation_marks(tmp_path: Path, end: str) -> None:
    """Their writer joins values as they are, and refuses those with separators in them."""
    data = b'text,n\n"a" b,1\n"c,2\nd""e,3\n'
    path = written(tmp_path / f"shard.00000.csv{end}", gzip.compress(data) if end else data)
    assert rows(path)[0] is Reason.SCHEMA_ERROR
    written(tmp_path / f"shard.00000.csv.meta{end}", b"offsets")
    assert rows(path) == [{"text": '"a" b', "n": "1"}, {"text": '"c', "n": "2"}, {"text": 'd""e', "n": "3"}]


# Names of media


def test_image_folder_and_audio_folder(tmp_path: Path) -> None:
    """The metadata of Hugging Face's ImageFolder and AudioFolder, as its documentation has them."""
    images = written(
        tmp_path / "i/metadata.jsonl", '{"file_name": "0.png", "text": "a cat"}\n{"file_names": ["1.png", "2.png"]}\n'
    )
    assert rows(images) == [{"image": "0.png", "text": "a cat"}, {"images": ["1.png", "2.png"]}]
    audio = written(tmp_path / "a/metadata.csv", "file_name,transcription\ndata/1.mp3,hello\n")
    assert rows(audio) == [{"audio": "data/1.mp3", "text": "hello"}]
    named = written(tmp_path / "n/metadata.jsonl", '{"input_file_name": "0.png", "image_file_name": "1.png", "text": "t"}')
    assert rows(named) == [{"input": "0.png", "image": "1.png", "text": "t"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"file_name": "0.mp4", "text": "a film is no image"},
        {"file_name": "0.png", "image": "there is one already"},
        {"filename": "0.png", "xfile_name": "1.png"},
        {"file_name": None},
        {"file_name": 5},
        {"transcription": "t", "caption": "c"},
    ],
)
def test_other_columns_keep_their_names(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert rows(written(tmp_path / "metadata.jsonl", json.dumps(fields))) == [fields]


def test_columns_keep_their_names_in_files_of_other_names(tmp_path: Path) -> None:
    fields = {"file_name": "0.png", "transcription": "t"}
    assert rows(written(tmp_path / "train.jsonl", json.dumps(fields))) == [fields]


@pytest.mark.parametrize("mapping", [{"images": "file_name"}, {"ignore": ["file_name"]}, {"text": "file_name"}])
def test_what_a_mapping_names_keeps_its_name(tmp_path: Path, mapping: dict[str, Any]) -> None:
    fields = {"file_name": "0.png", "text": "t"}
    assert rows(written(tmp_path / "metadata.jsonl", json.dumps(fields)), mapping=mapping) == [fields]


def test_a_manifest_of_nemo(tmp_path: Path) -> None:
    lines = [
        {"audio_filepath": "/data/1.wav", "duration": 2.5, "text": "one"},
        {"audio_filepath": "2.wav", "duration": 2.5, "offset": 0.0, "text": "two"},
        {"audio_filepath": "2.wav", "duration": 2.5, "offset": 1.5, "text": "a part"},
        {"audio_filepath": "3.wav", "audio": "4.wav", "offset": 1.5},
    ]
    path = written(tmp_path / "manifest.json", "".join(json.dumps(line) + "\n" for line in lines))
    assert rows(path) == [
        {"audio": "/data/1.wav", "duration": 2.5, "text": "one", "offset": 0},
        {"audio": "2.wav", "duration": 2.5, "offset": 0.0, "text": "two"},
        {"audio": "2.wav", "duration": 2.5, "offset": 1.5, "text": "a part"},
        lines[3],
    ]
    assert rows(path, mapping={"audios": "audio_filepath"}) == lines


@pytest.mark.parametrize("end", ["parquet", "arrow"])
def test_tables_may_name_files_too(tmp_path: Path, end: str) -> None:
    """What `datasets` writes of pictures that it does not embed: their paths without bytes."""
    records: list[dict[str, Any]] = [
        {"image": {"bytes": None, "path": "1.jpg"}, "mask": {"bytes": None, "path": "m.jpg"}, "text": "a"},
        {"image": {"bytes": b"held", "path": "2.jpg"}, "mask": None, "text": "b"},
        {"image": {"bytes": None, "path": None}, "mask": None, "text": "c"},
    ]
    table = pa.Table.from_pylist(records)
    path = written(tmp_path / f"a.{end}", b"")
    if end == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    written(tmp_path / "pictures/1.jpg", b"a picture")
    assert rows(path) == [Reason.MISSING_MEDIA, *records[1:]]
    found = {"image": {"bytes": b"a picture", "path": "1.jpg"}}
    assert rows(path, media_root=str(tmp_path / "pictures")) == [records[0] | found, *records[1:]]


def test_img2datasets_rows_without_an_image_are_no_captions(tmp_path: Path) -> None:
    row = {"url": "u", "key": "0", "caption": "c", "error_message": None, "status": "success", "jpg": b"x"}
    failed = row | {"status": "failed_to_download", "error_message": "404", "jpg": None}
    pq.write_table(pa.Table.from_pylist([row, failed]), tmp_path / "0.parquet")
    assert rows(tmp_path / "0.parquet") == [row, Reason.MISSING_MEDIA]


def test_the_metadata_of_an_image_folder_may_be_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"file_name": ["1.png"], "text": ["one"]}), tmp_path / "metadata.parquet")
    assert rows(tmp_path / "metadata.parquet") == [{"image": "1.png", "text": "one"}]
