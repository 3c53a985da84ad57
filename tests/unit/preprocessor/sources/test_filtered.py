"""Filters on fields leave rows out when a shard is counted, in every format alike; filters on sizes when samples are probed."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.filter_spec import FilterSpec
from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.records.filtering import unmet_condition
from headrace.preprocessor.sources import list_shards, open_shard
from headrace.quarantine import BadSampleError, Reason
from headrace.sample import SampleRef
from headrace.spec import JobSpec, parse_spec

ROWS = [
    {"text": "a", "similarity": 0.31, "NSFW": "UNLIKELY", "lang": "en"},
    {"text": "b", "similarity": 0.29, "NSFW": "UNLIKELY", "lang": "en"},
    {"text": "c", "similarity": 0.4, "NSFW": "LIKELY", "lang": "en"},
    {"text": "d", "similarity": None, "NSFW": "UNLIKELY", "lang": "en"},
    {"text": "e", "similarity": 0.3, "NSFW": "VERY_UNLIKELY", "lang": "de"},
]
FILTER = {"fields": {"similarity": {"min": 0.3}, "NSFW": {"one_of": ["UNLIKELY", "VERY_UNLIKELY"]}}}


def job(path: Path, **filters: Any) -> JobSpec:
    return parse_spec({"name": "j", "sources": [{"path": str(path), "name": "s", "filter": filters}]})


def work_of(spec: JobSpec) -> JobWork:
    work = JobWork("j", spec)
    work.shards = tuple(list_shards(spec))
    return work


def written(folder: Path, kind: str, write_tar: Callable[..., Path]) -> Path:
    if kind == "tar":
        return write_tar({f"{n}.{end}": row["text"].encode() if end == "txt" else {key: row[key] for key in row if key != "text"}
                          for n, row in enumerate(ROWS) for end in ("txt", "json")})  # fmt: skip
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, ROWS[0])
            table.writeheader()
            table.writerows(ROWS)
    return path


@pytest.mark.parametrize("kind", ["tar", "parquet", "jsonl", "csv"])
def test_rows_that_do_not_fulfil_the_conditions_are_no_rows(kind: str, tmp_path: Path, write_tar: Callable[..., Path]) -> None:
    work = work_of(job(written(tmp_path, kind, write_tar), **FILTER))
    num_rows, damage = work.index(0)
    assert num_rows == 2
    assert [(item.name, item.reason, item.detail) for item in damage] == [
        (work.shards[0].name, Reason.FILTERED, "3 of 5 samples do not fulfil filter.fields")
    ]
    refs = [SampleRef(sample_id=n, shard=0, row=n) for n in range(num_rows)]
    probes, rejected = work.probe(refs)
    assert not rejected
    assert [probe.name.rsplit("/", 1)[-1] for _, probe in probes] == ["0", "4"]
    batch, _ = work.decode_batch(refs)
    assert batch.num_rows == 2
    work.close()


def test_a_filter_that_admits_all_changes_nothing(tmp_path: Path, write_tar: Callable[..., Path]) -> None:
    path = written(tmp_path, "jsonl", write_tar)
    work = work_of(job(path, fields={"lang": {"none_of": ["fr"]}}))
    assert work.index(0) == (5, [])
    work.close()


def test_a_row_that_cannot_be_judged_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "n": 3}\n{"text": "b"}\n{"text": "c", "n": "many"}\nno json\n{"text": "d", "n": 1}')
    work = work_of(job(path, fields={"n": {"min": 2}}))
    assert work.index(0)[0] == 4
    probes, rejected = work.probe([SampleRef(sample_id=n, shard=0, row=n) for n in range(4)])
    assert [sample_id for sample_id, _ in probes] == [0]
    assert [(item.reason, item.detail) for item in rejected[:2]] == [
        (Reason.SCHEMA_ERROR, "filter.fields: n: expected a value to compare, got nothing of that name"),
        (Reason.SCHEMA_ERROR, "filter.fields: n: expected a number, got many"),
    ]
    assert rejected[2].name.endswith("/3")
    work.close()


def test_only_the_columns_of_the_filter_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    pictures = [{"bytes": np.random.default_rng(n).bytes(100_000), "path": None} for n in range(20)]
    pq.write_table(pa.table({"text": ["a"] * 20, "n": range(20), "image": pictures}), path)
    asked: list[Any] = []
    real = pq.ParquetFile.iter_batches

    def spy(self: pq.ParquetFile, *args: Any, columns: Any = None, **kwargs: Any) -> Any:
        asked.append(columns)
        return real(self, *args, columns=columns, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    with open_shard(str(path), job(path, fields={"n": {"min": 15}}).sources[0]) as shard:
        assert shard.num_rows == 5
        assert asked == [["n"]]
        assert shard.read(0).fields["n"] == 15


def test_sizes_are_judged_when_samples_are_probed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": "word " * n}) for n in (1, 9, 60)))
    work = work_of(job(path, sizes={"targets": {"min": 6, "max": 30}, "images": {"max": 0}}))
    assert work.index(0) == (3, [])
    probes, rejected = work.probe([SampleRef(sample_id=n, shard=0, row=n) for n in range(3)])
    assert [sample_id for sample_id, _ in probes] == [1]
    assert [(item.sample_id, item.reason) for item in rejected] == [(0, Reason.FILTERED), (2, Reason.FILTERED)]
    assert rejected[0].detail.endswith(" targets")
    work.close()


numbers = st.one_of(st.integers(-9, 9), st.floats(-9, 9))


@given(numbers, numbers, numbers)
def test_bounds_admit_what_is_between_them(value: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    spec = FilterSpec.model_validate({"fields": {"a.b": {"min": low, "max": high}}})
    for written_ in (value, str(value), Decimal(str(value))):
        assert (not unmet_condition({"a": {"b": written_}}, spec)) == (low <= value <= high)


@pytest.mark.parametrize(
    ("condition", "value", "admitted"),
    [
        ({"one_of": ["a", "b"]}, "a", True),
        ({"one_of": ["a", "b"]}, "c", False),
        ({"none_of": ["a"]}, "c", True),
        ({"one_of": [1]}, 1, True),
        ({"one_of": [1]}, "1", True),
        ({"one_of": ["1"]}, 1, False),
        ({"one_of": [1]}, True, False),
        ({"one_of": [True]}, True, True),
        ({"one_of": [True]}, "True", True),
        ({"one_of": [True]}, 1, False),
        ({"none_of": [False]}, False, False),
        ({"min": 0}, float("nan"), False),
        ({"max": 3, "none_of": [2]}, 2, False),
        ({"one_of": ["a"]}, None, False),
        ({"none_of": ["a"]}, None, False),
    ],
)
def test_values_are_compared_as_what_they_are(condition: dict[str, Any], value: Any, admitted: bool) -> None:
    spec = FilterSpec.model_validate({"fields": {"x": condition}})
    assert (not unmet_condition({"x": value}, spec)) == admitted


@pytest.mark.parametrize(
    ("filters", "sentence"),
    [
        ({"fields": {"x": {"min": 3, "max": 2}}}, "min (3) is above max (2), so that no sample would be left"),
        ({"fields": {"x": {}}}, "names no condition: give min, max, one_of or none_of"),
        ({"sizes": {"pixels": {"min": 3}}}, "tokens"),
        ({"fields": {"x": {"above": 3}}}, "above"),
    ],
)
def test_a_filter_that_means_nothing_is_refused_at_submission(filters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        job(Path("/data"), **filters)
    assert sentence in str(refused.value)


def test_a_filter_goes_to_preprocessors_as_it_is() -> None:
    spec = job(Path("/d"), fields={"x": {"one_of": [1, 1.5, "1", True]}}, sizes={"tokens": {"min": 4}})
    (source,) = parse_spec(json.loads(spec.to_peer_json())).sources
    assert source.filter == spec.sources[0].filter
    assert [type(item) for item in source.filter.fields["x"].one_of or ()] == [int, float, str, bool]


@pytest.mark.parametrize("value", [["und"], {"a": "und"}, b"und"])
@pytest.mark.parametrize("condition", ["one_of", "none_of"])
def test_what_no_condition_can_name_is_refused(value: Any, condition: str) -> None:
    with pytest.raises(BadSampleError, match="expected a text, a number, true or false") as refused:
        unmet_condition({"f": value}, FilterSpec.model_validate({"fields": {"f": {condition: ["und"]}}}))
    assert refused.value.reason is Reason.SCHEMA_ERROR


@pytest.mark.parametrize("value", [2**53 + 1, str(2**53 + 1)])
@pytest.mark.parametrize(("named", "is_same"), [(2**53, False), (2**53 + 1, True), (2**53 + 2, False)])
def test_whole_numbers_are_compared_to_the_last_digit(value: int | str, named: int, is_same: bool) -> None:
    spec = FilterSpec.model_validate({"fields": {"f": {"one_of": [named]}}})
    assert bool(unmet_condition({"f": value}, spec)) is not is_same
