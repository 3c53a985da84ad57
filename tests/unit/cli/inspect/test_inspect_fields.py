"""`headrace inspect` names every field and extension of a data set, what each is used as, and names that lead nowhere."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from headrace.cli.main import main
from tests.unit.cli.inspect.tars import write_tar


def picture() -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (56, 56), (90, 120, 30)).save(data, "PNG")
    return data.getvalue()


@pytest.fixture
def films(tmp_path: Path) -> Path:
    """Three samples with a film and a title; two of them have a still, one a note."""
    members: dict[str, bytes] = {}
    for n in range(3):
        members |= {f"{n}.json": json.dumps({"title": f"Film {n}.", "year": 1900 + n}).encode(), f"{n}.mp4": b"film"}
        members |= {f"{n}.jpg": picture()} if n else {f"{n}.cls": b"7"}
    write_tar(tmp_path / "films.tar", members)
    return tmp_path / "films.tar"


def inspect(capsys: pytest.CaptureFixture[str], path: Path, *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """The report, and what is on standard error."""
    named = [] if path.suffix == ".yaml" else [str(path)]
    assert main(["inspect", *named, "--out", str(path.parent / "out"), "--format", "json", *options]) == code
    out, err = capsys.readouterr()
    return json.loads(out), err


def used_as(report: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {row["name"]: row["used_as"] for row in report["fields"]}


def test_fields_and_extensions_are_counted_with_their_types_and_uses(films: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = inspect(capsys, films, "--mapping", "text=title", "--mapping", "ignore=mp4")
    assert report["fields"] == [
        {"source": "films.tar", "name": "title", "samples": 3, "types": {"text": 3}, "used_as": {"text": 3}},
        {"source": "films.tar", "name": "year", "samples": 3, "types": {"number": 3}, "used_as": {"not used": 3}},
        {"source": "films.tar", "name": "cls", "samples": 1, "types": {"member": 1}, "used_as": {"note": 1}},
        {"source": "films.tar", "name": "mp4", "samples": 3, "types": {"member": 3}, "used_as": {"ignored": 3}},
        {"source": "films.tar", "name": "jpg", "samples": 2, "types": {"member": 2}, "used_as": {"images": 2}},
    ]
    assert report["combinations"] == {"text": 1, "text+image": 2}
    assert (report["refused"], report["unfound"]) == ([], {})


def test_what_stands_in_the_way_is_seen_before_the_mapping_is_right(films: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert used_as(inspect(capsys, films)[0])["title"] == {"unknown": 3}
    assert used_as(inspect(capsys, films, "--mapping", "text=title")[0]) == {
        "title": {"text": 3},
        "year": {"not used": 3},
        "cls": {"note": 1},
        "mp4": {"refused": 3},
        "jpg": {"images": 2},
    }


def test_columns_that_are_null_count_where_they_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    medium = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({
        "caption": pa.array(["a", "b", "c"]),
        "image": pa.array([{"bytes": picture(), "path": None}, None, None], medium),
        "source": pa.array([None, None, None], pa.string()),
        "scores": pa.array([[0.5], [], [0.1, 0.2]]),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet")
    report, _ = inspect(capsys, tmp_path / "rows.parquet")
    assert {row["name"]: (row["samples"], row["types"], row["used_as"]) for row in report["fields"]} == {
        "caption": (3, {"text": 3}, {"text": 3}),
        "image": (1, {"null": 2, "{bytes, path}": 1}, {"images": 1}),
        "source": (0, {"null": 3}, {}),
        "scores": (3, {"list of number": 2, "empty list": 1}, {"not used": 3}),
    }


def test_the_table_says_the_same(films: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mapping", "text=title", "--mapping", "ignore=mp4,avi", "--out", str(films.parent / "out")]
    assert main(["inspect", str(films), *options]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    table = lines[lines.index("field type samples used as") :]
    assert table[1:6] == [
        "title text 3 text",
        "year number 3 not used",
        "cls member 1 note",
        "mp4 member 3 ignored",
        "jpg member 2 images",
    ]
    assert "warning: no sample that was looked at has avi, which the mapping of films.tar names" in lines


def test_names_that_no_sample_has_are_warned_of(films: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = inspect(capsys, films, "--mapping", "text=title", "--mapping", "ignore=mp4,seg.png,<video>")
    assert report["unfound"] == {"films.tar": ["<video>", "seg.png"]}
    assert report["samples"] == 3


def test_a_mapping_that_uses_nothing_is_an_error_behind_the_report(films: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, error = inspect(capsys, films, "--mapping", "text=transcript", "--mapping", "images=png", code=2)
    assert report["samples"] == 0
    assert error == (
        "headrace inspect: the mapping of source 'films.tar' names png, transcript, and none of the 3 samples that were looked "
        "at has any of it; they have title, year, cls, mp4, jpg\n"
    )


def test_sources_of_a_job_have_their_own_rows_and_mappings(
    films: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    captions = films.parent / "captions.jsonl"
    captions.write_text('{"caption": "a"}\n{"caption": "b", "[bold]": 1}\n')
    job = films.parent / "job.yaml"
    mapping = {"text": "title", "ignore": ["mp4", "flv"]}
    sources = [{"path": str(films), "name": "films", "mapping": mapping}, {"path": str(captions), "name": "captions"}]
    job.write_text(yaml.safe_dump({"name": "two", "sources": sources}))
    report, _ = inspect(capsys, job, "--spec", str(job))
    assert [(row["source"], row["name"]) for row in report["fields"]] == [
        *(("films", name) for name in ("title", "year", "cls", "mp4", "jpg")),
        ("captions", "caption"),
        ("captions", "[bold]"),
    ]
    assert report["unfound"] == {"films": ["flv"]}
    assert main(["inspect", "captions", "--spec", str(job), "--out", str(films.parent / "out")]) == 0
    out = capsys.readouterr().out
    assert f"captions of {job}" in out
    assert "[bold]" in out, "a name is no markup"
    assert "title" not in out
