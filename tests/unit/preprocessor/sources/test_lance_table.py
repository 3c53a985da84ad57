"""Lance data sets: what is damaged, changed meanwhile or elsewhere. tests/layouts has what pylance itself writes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.errors import DatasetError
from headrace.preprocessor.access import Access, granting
from headrace.preprocessor.sources import list_shards, open_shard
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import JobSpec, parse_spec


def write(rows: pa.Table, path: Path, **options: Any) -> Any:
    """The data set as the library sees it."""
    import lance  # not where tests are collected: it warns where a process that has it is forked

    return lance.write_dataset(rows, path, **options)


def job(path: Path, **source: object) -> JobSpec:
    return parse_spec({"name": "j", "sources": [{"path": str(path), **source}]})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A data set of ten rows in three fragments, with a fourth row deleted."""
    path = tmp_path / "x.lance"
    rows = {"text": [f"text {number}" for number in range(10)], "number": range(10)}
    write(pa.table(rows), path, max_rows_per_file=4).delete("number = 3")
    return path


def read(spec: JobSpec) -> list[str]:
    texts = []
    for info in list_shards(spec):
        with open_shard(info.url, spec.sources[0]) as shard:
            texts += [shard.read(row).fields["text"] for row in range(shard.num_rows)]
    return sorted(texts)


def test_a_fragment_is_a_shard_and_rows_are_read_in_any_order(table: Path) -> None:
    spec = job(table)
    shards = [open_shard(info.url, spec.sources[0]) for info in list_shards(spec)]
    assert sorted(shard.num_rows for shard in shards) == [2, 3, 4]
    (four,) = (shard for shard in shards if shard.num_rows == 4)
    assert [four.read(row).fields["number"] for row in (3, 0, 2)] == [7, 4, 6]
    assert len(read(spec)) == 9


def test_rows_can_be_filtered_by_a_column(table: Path) -> None:
    assert read(job(table, filter={"fields": {"number": {"min": 7}}})) == ["text 7", "text 8", "text 9"]


def test_a_fragment_that_a_newer_version_has_not_is_told(table: Path) -> None:
    spec = job(table)
    (first, *_) = list_shards(spec)
    write(pa.table({"text": ["new"]}), table, mode="overwrite")
    with pytest.raises(DatasetError, match=r"is in no fragment of the latest version of .*: submit the job again"):
        open_shard(first.url, spec.sources[0])
    assert read(spec) == ["new"]


def test_rows_of_a_cut_file_are_refused(table: Path) -> None:
    spec = job(table)
    for file in (table / "data").iterdir():
        file.write_bytes(file.read_bytes()[:-40])
    (first, *_) = list_shards(spec)
    with (
        open_shard(first.url, spec.sources[0]) as shard,
        pytest.raises(BadSampleError, match="the row does not decode") as caught,
    ):
        shard.read(0)
    assert caught.value.reason is Reason.ARCHIVE_CORRUPT


def test_a_damaged_manifest_is_told(table: Path) -> None:
    for file in (table / "_versions").glob("*.manifest"):
        file.write_bytes(b"nothing of the kind")
    with pytest.raises(DatasetError, match=r"cannot read the Lance data set .*x\.lance: "):
        list_shards(job(table))


def test_files_that_lie_elsewhere_are_not_read(table: Path, tmp_path: Path) -> None:
    spec = job(table)
    (first, *_) = list_shards(spec)
    elsewhere = tmp_path / "elsewhere.lance"
    Path(first.url).rename(elsewhere)
    Path(first.url).symlink_to(elsewhere)
    with granting(Access.of([table], [])), pytest.raises(DatasetError, match="is not for this process to read"):
        list_shards(spec)
    assert len(list_shards(spec)) == 3


def test_without_pylance_the_sentence_says_what_to_do(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(DatasetError, match=r"which needs pylance on the preprocessor: pip install headrace\[lance\]"):
        list_shards(job(table))


def test_a_folder_around_a_data_set_is_refused(table: Path) -> None:
    with pytest.raises(DatasetError, match=r"holds a Lance data set \(x\.lance/data/.*\): name its own folder"):
        list_shards(job(table.parent))
