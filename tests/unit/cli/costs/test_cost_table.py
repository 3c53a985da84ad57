"""Cost tables: what is read from Parquet and JSONL, what is refused with which sentence, and what is written."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.cli.costs.cost_table import CostTableWriter, in_pipeline_order, is_cost_table, read_cost_table
from headrace.errors import UserError

COSTS = Path(__file__).parents[3] / "data" / "costs"
GOOD: dict[str, list[Any]] = {"sample_id": [7, 3, 5], "cost_llm": [1.5, 2.0, 0.0], "cost_encoder": [0.5, 0.0, 4.0]}


def write(folder: Path, columns: dict[str, Any], kind: str = "parquet") -> str:
    path = folder / f"costs.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_both_formats_give_the_same_table(tmp_path: Path, kind: str) -> None:
    more = {"memory_llm": [1, 2, 3], "memory_encoder": [4, 5, 6], "tokens": [10, 20, 30], "name": ["a", "b", "c"]}
    table = read_cost_table(write(tmp_path, GOOD | more, kind))
    assert table.sample_ids.tolist() == [7, 3, 5]
    assert table.units == ("encoder", "llm"), "in pipeline order, whatever the order of the columns"
    assert {unit: column.tolist() for unit, column in table.costs.items()} == {
        "encoder": [0.5, 0.0, 4.0],
        "llm": [1.5, 2.0, 0.0],
    }
    assert table.memory is not None
    assert table.memory["encoder"].tolist() == [4.0, 5.0, 6.0]
    assert table.tokens is not None
    assert table.tokens.tolist() == [10, 20, 30]
    assert table.transfer_bytes is None
    assert table.totals() == {"encoder": 4.5, "llm": 3.5}


def test_rows_are_taken_from_every_column(tmp_path: Path) -> None:
    columns = GOOD | {"bytes_llm": [1, 2, 3], "bytes_encoder": [4, 5, 6], "tokens": [10, 20, 30]}
    table = read_cost_table(write(tmp_path, columns)).take(np.array([2, 0]))
    assert table.transfer_bytes is not None
    assert table.tokens is not None
    found = (table.sample_ids, table.costs["llm"], table.transfer_bytes["encoder"], table.tokens)
    assert [column.tolist() for column in found] == [[5, 7], [0.0, 1.5], [6.0, 4.0], [30, 10]]


def test_standard_input_is_jsonl(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b'{"sample_id": 1, "cost_llm": 2}\n\n{"sample_id": 0, "cost_llm": 3.5, "comment": "else"}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    table = read_cost_table("-")
    assert (table.sample_ids.tolist(), table.costs["llm"].tolist()) == ([1, 0], [2.0, 3.5])


def test_encoders_come_first_and_the_generator_last() -> None:
    assert in_pipeline_order(["generator", "llm", "vision", "audio"]) == ["vision", "audio", "llm", "generator"]


@pytest.mark.parametrize("path", sorted(COSTS.glob("*.parquet")), ids=lambda path: path.stem)
def test_the_sample_tables_are_read(path: Path) -> None:
    table = read_cost_table(str(path))
    assert len(table.sample_ids) == int(path.stem.rsplit("_", 1)[1])
    assert is_cost_table(str(path))


INTS = pa.array([1, 2, 3])


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (GOOD | {"cost_llm": [1.0, -2.0, 0.0]}, "row 1 (sample 3): cost_llm must be finite and not negative, got -2.0"),
        (GOOD | {"cost_encoder": [1.0, 2.0, float("nan")]}, "row 2 (sample 5): cost_encoder must be finite"),
        (GOOD | {"cost_encoder": [float("inf"), 2.0, 3.0]}, "row 0 (sample 7): cost_encoder must be finite"),
        (
            GOOD | {"cost_llm": [1.0, 1e308, 1e308]},
            "costs.parquet, row 1 (sample 3): cost_llm is too large to add up, got 1e+308",
        ),
        (GOOD | {"cost_llm": ["1", "2", "3"]}, "cost_llm must be numbers (float64), not string"),
        (GOOD | {"cost_llm": [True, False, True]}, "cost_llm must be numbers (float64), not bool"),
        (GOOD | {"cost_llm": [1.0, None, 3.0]}, "row 1: cost_llm must not be empty"),
        (GOOD | {"sample_id": [1, None, 3]}, "row 1: sample_id must not be empty"),
        (GOOD | {"sample_id": [4, 9, 4]}, "sample ids must differ, but rows 0 and 2 both have 4"),
        (GOOD | {"sample_id": [1.0, 2.0, 3.0]}, "sample_id must be whole numbers (int64), not double"),
        (GOOD | {"sample_id": pa.array([1, 2, 2**63], pa.uint64())}, "a sample_id does not fit into 64 bits"),
        (GOOD | {"tokens": [5, -1, 5]}, "row 1: tokens must not be negative, got -1"),
        (GOOD | {"memory_llm": [1.0, 2.0, 3.0]}, "has memory_llm for the units encoder, llm; give one for each of them or none"),
        (GOOD | {"bytes_audio": [1.0, 2.0, 3.0]}, "has bytes_audio for the units encoder, llm"),
        (GOOD | {"cost_": [1.0, 2.0, 3.0]}, "the column 'cost_' names no unit"),
        ({"sample_id": INTS, "price": INTS}, "has no column of costs; name one cost_<unit> per unit"),
        ({"cost_llm": INTS}, "has no column 'sample_id'"),
        ({"text": INTS}, "has no column 'sample_id'"),
        ({"sample_id": INTS[:0], "cost_llm": INTS[:0]}, "has no row"),
    ],
)
def test_a_parquet_table_that_breaks_a_rule_is_refused(tmp_path: Path, columns: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        read_cost_table(write(tmp_path, columns))
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no row"),
        ("nonsense\n", "line 1: not JSON"),
        ('{"sample_id": 1, "cost_llm": 1}\n[]\n', "line 2: every line must be one JSON object, not list"),
        ('{"sample_id": 1, "cost_llm": 1}\n{"sample_id": 2}\n', "line 2: 'cost_llm' must be in every line or in none"),
        ('{"sample_id": 1, "cost_llm": "1"}\n', 'line 1: cost_llm must be a number, got "1"'),
        ('{"sample_id": 1, "cost_llm": true}\n', "line 1: cost_llm must be a number, got true"),
        ('{"sample_id": 1, "cost_llm": null}\n', "line 1: cost_llm must be a number, got null"),
        ('{"sample_id": 1.0, "cost_llm": 1}\n', "line 1: sample_id must be a whole number, got 1.0"),
        ('{"sample_id": 9223372036854775808, "cost_llm": 1}\n', "a sample_id does not fit into 64 bits"),
        ('{"sample_id": 1, "cost_llm": NaN}\n', "row 0 (sample 1): cost_llm must be finite and not negative, got nan"),
        (f'{{"sample_id": 1, "cost_llm": 1{"0" * 400}}}\n', "a cost_llm does not fit into 64 bits"),
        ('{"sample_id": 1}\n', "has no column of costs"),
        ('{"text": "a"}\n', "has no column 'sample_id'"),
    ],
)
def test_jsonl_that_breaks_a_rule_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "costs.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as refusal:
        read_cost_table(str(path))
    assert sentence in str(refusal.value)


def test_what_is_no_table_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "costs.csv").touch()
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "text.parquet").write_text("not Parquet")
    (tmp_path / "cut.parquet").write_bytes((COSTS / "llava_512.parquet").read_bytes()[:5000])
    twice = pa.Table.from_arrays([INTS, INTS, INTS], names=["sample_id", "cost_llm", "cost_llm"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    expected = {
        "nowhere.parquet": "No such file",
        "nowhere.jsonl": "cannot read",
        "costs.csv": "give a .parquet or a .jsonl file",
        "folder.parquet": "is a folder; ",
        "text.parquet": "is no Parquet file that can be read",
        "cut.parquet": "is no Parquet file that can be read",
        "twice.parquet": "more than one column 'cost_llm'",
    }
    for name, sentence in expected.items():
        with pytest.raises(UserError) as refusal:
            read_cost_table(str(tmp_path / name))
        assert sentence in str(refusal.value), name
        assert "\n" not in str(refusal.value)


def test_a_data_set_is_no_cost_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"images": [1], "texts": ["a"]}), tmp_path / "shard.parquet")
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "list.jsonl").write_text("3\n")
    (tmp_path / "costs.jsonl").write_text('{"cost_llm": 1}\n')
    found = {name: is_cost_table(str(tmp_path / name)) for name in ("shard.parquet", "lines.jsonl", "list.jsonl", "costs.jsonl")}
    assert [name for name, is_table in found.items() if is_table] == ["costs.jsonl"]
    assert not is_cost_table(str(tmp_path))
    assert not is_cost_table("s3://bucket/costs.parquet")


def test_a_written_table_is_read_again_and_names_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "costs.parquet"
    with CostTableWriter(path) as writer:
        for start in (0.0, 10.0):
            column = {"encoder": np.array([start, start + 1]), "llm": np.array([1.0, 2.0])}
            writer.add([f"{start}/a", f"{start}/b"], np.array([4, 5]), column, column, column)
        assert not path.exists(), "the file is there once it is whole"
    table = read_cost_table(str(path))
    assert (table.time_unit, table.memory_unit) == ("s", "bytes")
    assert table.sample_ids.tolist() == [0, 1, 2, 3]
    assert table.costs["encoder"].tolist() == [0.0, 1.0, 10.0, 11.0]
    assert pq.read_table(path)["name"].to_pylist() == ["0.0/a", "0.0/b", "10.0/a", "10.0/b"]
    assert [item.name for item in path.parent.iterdir()] == ["costs.parquet"]


def test_a_table_that_is_broken_off_or_empty_leaves_no_file(tmp_path: Path) -> None:
    with CostTableWriter(tmp_path / "empty.parquet"):
        pass
    column = {"llm": np.array([1.0])}
    writer = CostTableWriter(tmp_path / "cut.parquet")
    writer.add(["a"], np.array([1]), column, column, column)
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("file/costs.parquet", r"cannot write to .*file/costs\.parquet: Not a directory; name another file"),
        ("new/costs.parquet", r"cannot write to .*new/costs\.parquet: No such file or directory; name another file"),
        ("folder.parquet", r"cannot write to .*folder\.parquet: Is a directory; name another file"),
        ("costs.csv", r"must end in \.parquet, got .*costs\.csv"),
    ],
)
def test_where_no_table_can_be_written_that_is_said(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(UserError, match=sentence):
        CostTableWriter(tmp_path / name)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "folder.parquet"]
