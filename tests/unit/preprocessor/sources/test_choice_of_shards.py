"""Which files of a folder a source takes: those of one format and of one split, said or refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DatasetError
from headrace.preprocessor.sources import list_shards
from headrace.spec import parse_spec


def filled(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return str(folder)


def taken(path: str | Path, **fields: Any) -> list[str]:
    """The names of the shards that a source takes, without its own name."""
    spec = parse_spec({"name": "test", "sources": [{"path": str(path), "name": "s", **fields}]})
    return [shard.name.removeprefix("s/") for shard in list_shards(spec)]


def refusal(path: str | Path, **fields: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        taken(path, **fields)
    message = str(caught.value)
    assert message.startswith("source 's': ")
    assert "\n" not in message
    return message.removeprefix("source 's': ")


# Formats


def test_of_tars_and_what_describes_them_the_tars_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What img2dataset writes: each caption is there twice, once without its picture."""
    folder = filled(tmp_path, *(f"{n:05}{end}" for n in range(3) for end in (".tar", ".parquet", "_stats.json")))
    assert taken(folder) == ["00000.tar", "00001.tar", "00002.tar"]
    assert f"source s: {folder}: takes its tar files (3), and leaves 00000.parquet and 2 more of other formats" in caplog.messages


@pytest.mark.parametrize(
    ("names", "said", "remedy", "left"),
    [
        (("0.tar", "0.parquet", "1.parquet"), "Parquet (0.parquet) and tar (0.tar)", "*.tar", ["0.tar"]),
        (("a/0.tar", "b/0.parquet"), "Parquet (b/0.parquet) and tar (a/0.tar)", "**/*.tar", ["a/0.tar"]),
        (
            ("a/0.tar.gz", "b/1.tar.gz", "all.jsonl"),
            "JSONL (all.jsonl) and tar (a/0.tar.gz)",
            "**/*.tar.gz",
            ["a/0.tar.gz", "b/1.tar.gz"],
        ),
        (("a.parquet", "b.jsonl"), "JSONL (b.jsonl) and Parquet (a.parquet)", "*.parquet", ["a.parquet"]),
        (("a.csv", "b.json"), "CSV (a.csv) and JSON (b.json)", "*.json", ["b.json"]),
    ],
)
def test_a_folder_of_several_formats_is_refused_where_one_does_not_describe_the_other(
    tmp_path: Path, names: tuple[str, ...], said: str, remedy: str, left: list[str]
) -> None:
    folder = filled(tmp_path, *names)
    message = refusal(folder)
    assert f"{folder} holds {said}, and a source is of one format" in message
    assert f"for example {folder}/{remedy}, or" in message
    assert taken(f"{folder}/{remedy}") == left


def test_formats_that_often_describe_others_count_where_there_is_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a.jsonl", "a.jsonl.gz", "b.json", "c.csv"]
    folder = filled(tmp_path, *names)
    assert taken(folder) == ["a.jsonl"]
    assert "takes its JSONL files (1), and leaves a.jsonl.gz and 2 more of other formats" in caplog.text
    for path in names:
        assert taken(f"{folder}/{path}") == [path]


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (("a.json", "dataset_infos.json", "sub/index.json", "config.json"), ["a.json"]),
        (("data-00000-of-00001.arrow", "state.json", "dataset_info.json", "cache-0a1b.arrow"), ["data-00000-of-00001.arrow"]),
        (("metadata.csv", "1.jpg", "2.jpg"), ["metadata.csv"]),
        (("a.tar.zst", "b.tar.bz2"), ["a.tar.zst", "b.tar.bz2"]),
        (("llava.json", "images/1.jpg"), ["llava.json"]),
        (("a.tsv",), ["a.tsv"]),
        (("a.ndjson", "b.jsonl.gz"), ["a.ndjson", "b.jsonl.gz"]),
        (("c4.0.json.gz", "c4.1.json.gz"), ["c4.0.json.gz", "c4.1.json.gz"]),
        (("shard.00000.csv", "shard.00000.csv.meta", "index.json"), ["shard.00000.csv"]),
        (("shard.00000.json.zstd", "shard.00000.json.meta.zstd", "index.json"), ["shard.00000.json.zstd"]),
    ],
)
def test_descriptions_are_no_shards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...], left: list[str]
) -> None:
    assert taken(filled(tmp_path, *names)) == left
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("x.lance/data/0.lance", "x.lance/_versions/v.json"),
            "holds a Lance data set (x.lance/data/0.lance): name its own folder",
        ),
        (("index.json", "chunk-0-0.bin"), "is no sound index of LitData chunks"),
        (("chunk-0-0.bin",), "beside chunk-0-0.bin; such shards need their index"),
        (("a.tfrecord-00000-of-00002",), "holds TFRecord"),
        (("images.zip",), "holds zip (images.zip), which is not read: unpack them"),
        (("train/cat/1.jpg", "train/dog/2.JPG"), "the names of folders are not taken for texts"),
        (("1.jpg", "1.json", "2.jpg", "2.json"), "holds a file for each medium (1.json for 1.jpg)"),
        (("a/1.png", "a/1.txt"), "holds a file for each medium (a/1.txt for a/1.png)"),
        (("00000.parquet", "00000/000000001.jpg"), "00000.parquet, which only describes media in files (00000/000000001.jpg)"),
        (("notes.txt",), "holds no shard; shards are files that end in .tar"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    assert said in refusal(filled(tmp_path, *names))


# Splits


@pytest.mark.parametrize(
    ("names", "split", "left"),
    [
        (
            ("data/test-00000-of-1.parquet", "data/train-00000-of-1.parquet", "data/validation-00000-of-1.parquet"),
            "train",
            ["data/train-00000-of-1.parquet"],
        ),
        (("train/0.tar", "train/1.tar", "val/0.tar"), "train", ["train/0.tar", "train/1.tar"]),
        (("coco-train-000.tar", "vg-train-000.tar", "coco-val-000.tar"), "train", ["coco-train-000.tar", "vg-train-000.tar"]),
        (("TRAIN.jsonl", "dev.jsonl"), "train", ["TRAIN.jsonl"]),
        (("train_sft-0.parquet", "test_sft-0.parquet"), "train_sft", ["train_sft-0.parquet"]),
        (("train/data-0.arrow", "train/state.json", "test/data-0.arrow", "dataset_dict.json"), "train", ["train/data-0.arrow"]),
    ],
)
def test_the_training_split_is_taken_beside_evaluation_splits_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...], split: str, left: list[str]
) -> None:
    folder = filled(tmp_path, *names)
    assert taken(folder) == left
    assert len(caplog.messages) == 1
    assert f"takes the split {split} ({len(left)} of {len([n for n in names if '.json' not in n or 'jsonl' in n])}" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_names_of_files_command_no_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken(filled(tmp_path, "train-0.tar", "test-\x1b[2J\n0.tar"))
    assert r"test-\x1b[2J\n0.tar" in caplog.messages[0]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("0.tar", "test-0.tar"), "no split (0.tar), test (test-0.tar): choose one with the source's split"),
        (("train/0.tar", "0.tar", "val/0.tar"), "no split (0.tar), train (train/0.tar), val (val/0.tar)"),
        (("test/0.tar", "val/0.tar"), "test (test/0.tar), val (val/0.tar)"),
        (("train_sft-0.tar", "train_gen-0.tar", "test_sft-0.tar"), "for example `split: train_gen`"),
    ],
)
def test_where_no_single_split_is_for_training_one_is_to_be_chosen(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    folder = filled(tmp_path, *names)
    assert said in refusal(folder)
    assert taken(folder, split="all") == sorted(names)


@pytest.mark.parametrize(
    "names",
    [
        ("test/0.tar", "test/1.tar"),
        ("train-0.tar", "more.tar"),
        ("text-0.tar", "value-0.tar", "testimony.tar", "developers.tar", "latest-0.tar"),
    ],
)
def test_one_split_and_other_names_are_a_data_set(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert taken(filled(tmp_path, *names)) == sorted(names)


@pytest.mark.parametrize(
    ("split", "left"),
    [
        ("train", ["train-0.tar"]),
        ("validation", ["val/0.tar"]),
        ("val", ["val/0.tar"]),
        ("dev", ["val/0.tar"]),
        ("test", ["test_a.tar", "test_b.tar"]),
        ("test_a", ["test_a.tar"]),
        ("extra", ["extra/0.tar"]),
        ("more", ["more-00000-of-00001.tar"]),
    ],
)
def test_a_source_chooses_its_split(tmp_path: Path, caplog: pytest.LogCaptureFixture, split: str, left: list[str]) -> None:
    names = ("train-0.tar", "val/0.tar", "test_a.tar", "test_b.tar", "extra/0.tar", "more-00000-of-00001.tar")
    assert taken(filled(tmp_path, *names), split=split) == left
    assert caplog.messages == []


def test_a_split_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    folder = filled(tmp_path, "train-0.tar", "test-0.tar")
    assert "has no split 'gold'; there are test (test-0.tar), train (train-0.tar)" in refusal(folder, split="gold")
    assert "has no split 'test'; there are train (train-0.tar)" in refusal(f"{folder}/train-0.tar", split="test")


def test_a_split_behind_a_number_sign_counts_for_any_folder(tmp_path: Path) -> None:
    folder = filled(tmp_path, "train-0.tar", "val-0.tar")
    assert taken(f"{folder}#val") == ["val-0.tar"]
    assert "name different splits" in refusal(f"{folder}#val", split="train")


def test_the_list_of_splits_is_short_however_many_there_are(tmp_path: Path) -> None:
    names = [f"test_{chr(97 + n)}.tar" for n in range(26)]
    assert "and 18 more: choose one" in refusal(filled(tmp_path, *names))


# README.md of the Hub


CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/gold-*
  - split: test
    path: ["data/rest.parquet"]
---
# A data set
"""


def test_a_hub_card_says_which_files_are_of_which_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = filled(tmp_path, "data/gold-0.parquet", "data/gold-1.parquet", "data/rest.parquet", "old/x.parquet")
    (tmp_path / "README.md").write_text(CARD)
    assert taken(folder) == ["data/gold-0.parquet", "data/gold-1.parquet"]
    assert "takes the split train (2 of 3 shards), and leaves test (data/rest.parquet)" in caplog.text
    assert taken(folder, split="test") == ["data/rest.parquet"]
    assert len(taken(folder, split="all")) == 4


def card(*configs: dict[str, Any]) -> str:
    return f"---\n{json.dumps({'configs': configs})}\n---\n"


ENGLISH = {"config_name": "en", "data_files": "en/*.parquet"}
GERMAN = {"config_name": "de", "data_files": [{"split": "train", "path": "de/**"}]}


@pytest.mark.parametrize(
    ("configs", "left"),
    [
        ([ENGLISH], ["en/0.parquet"]),
        ([GERMAN], ["de/0.parquet", "de/x/1.parquet"]),
        ([ENGLISH, GERMAN | {"default": True}], ["de/0.parquet", "de/x/1.parquet"]),
        ([ENGLISH | {"config_name": "default"}, GERMAN], ["en/0.parquet"]),
        ([{"config_name": "en", "data_dir": "en", "data_files": "*.parquet"}], ["en/0.parquet"]),
        ([{"config_name": "en", "data_files": {"train": ["en/0.parquet", "de/0.parquet"]}}], ["de/0.parquet", "en/0.parquet"]),
        ([{"config_name": "en", "data_files": "de"}], ["de/0.parquet", "de/x/1.parquet"]),
        ([{"config_name": "en", "data_dir": "en", "default": True}, {"config_name": "de", "data_dir": "de"}], ["en/0.parquet"]),
        ([{"config_name": "en", "data_files": 5}], ["de/0.parquet", "de/x/1.parquet", "en/0.parquet"]),
    ],
)
def test_of_several_configurations_the_default_one_is_taken(
    tmp_path: Path, configs: list[dict[str, Any]], left: list[str]
) -> None:
    folder = filled(tmp_path, "en/0.parquet", "de/0.parquet", "de/x/1.parquet")
    (tmp_path / "README.md").write_text(card(*configs))
    assert taken(folder) == left


def test_configurations_without_a_default_are_refused_by_their_names(tmp_path: Path) -> None:
    folder = filled(tmp_path, "en/0.parquet", "de/0.parquet")
    (tmp_path / "README.md").write_text(card(ENGLISH, GERMAN))
    assert "has several configurations, en, de, and none is the default: name the files of one, or say `split: all`" in refusal(
        folder
    )
    assert taken(folder, split="all") == ["de/0.parquet", "en/0.parquet"]
    assert taken(f"{folder}/en") == ["0.parquet"]


@pytest.mark.parametrize("text", ["", "# text", "---\n", "---\n: [\n---\n", "---\n- a\n---\n", "---\nconfigs: 5\n---\n", "\xff"])
def test_a_readme_that_says_nothing_changes_nothing(tmp_path: Path, text: str) -> None:
    folder = filled(tmp_path, "a.parquet", "b.parquet")
    (tmp_path / "README.md").write_text(text, encoding="latin-1")
    assert taken(folder) == ["a.parquet", "b.parquet"]


def test_stars_of_a_strange_card_end(tmp_path: Path) -> None:
    folder = filled(tmp_path, "a" * 200 + ".parquet", "b.parquet")
    (tmp_path / "README.md").write_text(card({"config_name": "x", "data_files": ["*a" * 60 + "*c.parquet", "b.parquet"]}))
    assert taken(folder) == ["b.parquet"]


def test_a_card_that_names_ever_so_many_patterns_or_itself(tmp_path: Path) -> None:
    folder = filled(tmp_path, "a.parquet")
    (tmp_path / "README.md").write_text(card({"data_files": [f"*{number}" for number in range(65)]}))
    assert "has 65 patterns of files, more than 64" in refusal(folder)
    (tmp_path / "README.md").write_text(card({"data_files": [f"{number}.parquet" for number in range(9999)]}))
    assert "declares files (0.parquet), and no shard is one of them" in refusal(folder)
    (tmp_path / "README.md").write_text(card({"data_files": "/".join(["**", "x"] * 20)}))
    assert "a pattern of more than 32 parts" in refusal(folder)
    laughs = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9) if n else 'ha'}]\n" for n in range(30))
    (tmp_path / "README.md").write_text(
        f"---\n{laughs}configs:\n- {{config_name: *x29, data_dir: *x29, data_files: a.parquet}}\n---\n"
    )
    assert taken(folder) == ["a.parquet"]


# Other kinds of folders


def test_a_snapshot_of_the_hub_is_a_folder_of_links(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--org--name"
    filled(repository, "blobs/0a", "blobs/0b")
    snapshot = repository / "snapshots" / "rev" / "data"
    snapshot.mkdir(parents=True)
    for blob, name in {"0a": "train-0.parquet", "0b": "test-0.parquet"}.items():
        (snapshot / name).symlink_to(f"../../../blobs/{blob}")
    assert taken(snapshot.parent) == ["data/train-0.parquet"]
    assert taken(repository) == ["snapshots/rev/data/train-0.parquet"]
    filled(repository, "snapshots/newer/0.parquet")
    assert f"2 snapshots of one data set: name one, such as {repository}/snapshots/newer" in refusal(repository)


def test_a_media_root_is_a_folder_and_of_use(tmp_path: Path) -> None:
    folder = filled(tmp_path, "rows/a.jsonl", "tars/a.tar")
    assert taken(f"{folder}/rows", media_root=folder) == ["a.jsonl"]
    assert f"media_root {folder}/none is no folder; name the one" in refusal(f"{folder}/rows", media_root=f"{folder}/none")
    assert "tar shards hold their media; leave media_root out" in refusal(f"{folder}/tars", media_root=folder)


def test_splits_of_mds_are_folders_with_an_index_each(tmp_path: Path) -> None:
    for split in ("train", "val"):
        filled(tmp_path, f"{split}/shard.00000.mds")
        info = {"basename": "shard.00000.mds", "bytes": 1, "hashes": {}}
        columns = {"column_names": ["text"], "column_encodings": ["str"], "column_sizes": [None]}
        shard = {"version": 2, "format": "mds", "raw_data": info, "zip_data": None, **columns}
        (tmp_path / split / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    assert taken(tmp_path) == ["train/shard.00000.mds"]
    assert taken(tmp_path, split="val") == ["val/shard.00000.mds"]


def test_the_split_of_an_energon_data_set(tmp_path: Path) -> None:
    folder = filled(tmp_path, "a.tar", "b.tar", "c.tar", ".nv-meta/.info.json")
    (tmp_path / ".nv-meta" / "split.yaml").write_text("split_parts: {train: [a.tar], val: [b.tar], none: []}")
    assert taken(folder) == ["a.tar"]
    assert taken(folder, split="val") == taken(f"{folder}#val") == ["b.tar"]
    assert taken(folder, split="all") == ["a.tar", "b.tar"]
    assert "has no split 'test'; there are train, val, none" in refusal(folder, split="test")
