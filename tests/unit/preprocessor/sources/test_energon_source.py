"""Energon data sets: splits, exclusions, fields by dataset.yaml, and that no code of theirs is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.errors import DatasetError
from headrace.preprocessor.decoding import SampleProcessor, probe_of
from headrace.preprocessor.records.record_to_sample import Sample, Text, to_sample
from headrace.preprocessor.sources import Shard, braces, list_shards, open_shard
from headrace.preprocessor.sources.braces import expand_braces
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec
from headrace.spec import parse_spec

ENERGON = Path(__file__).parents[3] / "data" / "energon" / "captions"

WriteTar = Callable[..., Path]
MakeSet = Callable[..., Path]


@pytest.fixture
def make_set(tmp_path: Path, write_tar: WriteTar) -> MakeSet:
    """make_set({"0.jpg": b"..."}, dataset, split): a data set of one shard, a.tar."""

    def make(members: dict[str, Any], dataset: dict[str, Any] | None = None, split: dict[str, Any] | None = None) -> Path:
        write_tar(members, name="a.tar")
        meta = tmp_path / ".nv-meta"
        meta.mkdir()
        (meta / ".info.yaml").write_text("shard_counts: {a.tar: 1}")
        (meta / "split.yaml").write_text(yaml.safe_dump(split or {"split_parts": {"train": ["a.tar"]}}))
        if dataset is not None:
            (meta / "dataset.yaml").write_text(yaml.safe_dump(dataset))
        return tmp_path

    return make


def source_of(path: Path | str, **fields: Any) -> SourceSpec:
    return parse_spec({"name": "test", "sources": [{"path": str(path), "name": "s", **fields}]}).sources[0]


def listed(path: Path | str) -> list[str]:
    return [shard.name for shard in list_shards(parse_spec({"name": "test", "sources": [{"path": str(path), "name": "s"}]}))]


def opened(folder: Path, shard: str = "a.tar", fragment: str = "", **fields: Any) -> Shard:
    return open_shard(str(folder / shard), source_of(f"{folder}{fragment}", **fields))


def only_sample(folder: Path, **fields: Any) -> Sample:
    source = source_of(folder, **fields)
    with open_shard(str(folder / "a.tar"), source) as shard:
        return to_sample(shard.read(0), source.mapping)


def texts(sample: Sample) -> list[str]:
    return [segment.text if isinstance(segment, Text) else "(medium)" for segment in sample.segments]


def described(kind: str, **field_map: str) -> dict[str, Any]:
    return {"sample_type": {"__module__": "megatron.energon", "__class__": kind}, "field_map": field_map}


def test_a_prepared_data_set(processor: SampleProcessor) -> None:
    source = source_of(ENERGON)
    assert listed(ENERGON) == ["s/parts/shard_0.tar", "s/parts/shard_1.tar"]
    with opened(ENERGON, "parts/shard_1.tar") as shard:
        assert [shard.key(row) for row in range(shard.num_rows)] == ["002", "003"]
        assert texts(to_sample(shard.read(0), source.mapping)) == ["(medium)", "Ellipse 2"]
        assert probe_of("sample", processor.size(processor.load(shard.read(1), source))).image_patches


@pytest.mark.parametrize("fragment", ["#val", "#split=val", "#split=val&dataset_config=dataset.yaml"])
def test_a_split_is_named_in_the_path(fragment: str) -> None:
    assert listed(f"{ENERGON}{fragment}") == ["s/parts/shard_2.tar"]
    with opened(ENERGON, "parts/shard_2.tar", fragment) as shard:
        assert shard.read(0).fields["caption"] == "Ellipse 4"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{ENERGON}#test", "has no split 'test'; there are train, val"),
        (f"{ENERGON}#colour=red", "after '#' stand split, dataset_config and split_config, not colour"),
        (f"{ENERGON}#split_config=other.yaml", "cannot list"),
    ],
)
def test_a_wrong_selection_is_told_in_a_sentence(path: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        listed(path)


def test_one_tar_of_a_data_set_is_a_plain_tar() -> None:
    path = str(ENERGON / "parts" / "shard_0.tar")
    assert listed(path) == ["s/shard_0.tar"]
    with open_shard(path, source_of(path)) as shard:
        assert shard.read(0).fields == {"about": {"caption": "Ellipse 0"}}


def test_a_folder_with_a_hash_in_its_name(make_set: MakeSet, tmp_path: Path) -> None:
    folder = make_set({"0.txt": b"t"}).rename(tmp_path.parent / "set#1")
    assert listed(folder) == ["s/a.tar"]


def test_excluded_shards_and_samples(make_set: MakeSet) -> None:
    split = {"split_parts": {"train": ["a.tar", "{b,c}.tar"]}, "exclude": ["{b,c}.tar", "a.tar/{1..2}"]}
    folder = make_set({f"{key}.txt": b"t" for key in range(4)}, split=split)
    assert listed(folder) == ["s/a.tar"]
    with opened(folder) as shard:
        assert [shard.key(row) for row in range(shard.num_rows)] == ["0", "3"]
        assert shard.read(1).key == "3"


def test_a_missing_shard_is_told(make_set: MakeSet) -> None:
    with pytest.raises(DatasetError, match=r"has no b\.tar, which its split 'train' lists"):
        listed(make_set({"0.txt": b"t"}, split={"split_parts": {"train": ["a.tar", "b.tar"]}}))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"split_parts": {"train": []}}, "has no shard"),
        ({"split_parts": {"train": ["../a.tar"]}}, "leads outside"),
        ({"split_parts": {"train": 3}}, "expected a list of names"),
        ({"split_parts": ["a.tar"]}, "there are none"),
        (["a.tar"], "no mapping of fields"),
    ],
)
def test_a_damaged_split_is_told(make_set: MakeSet, split: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        listed(make_set({"0.txt": b"t"}, split=split))


def test_questions_and_answers(make_set: MakeSet) -> None:
    dataset = described("VQASample", image="jpg", context="json[q]", answers="json[all][answers]", answer_weights="json[all][w]")
    annotation = {"q": "What?", "all": {"answers": ["a", "b", "c"], "w": [0.2, 0.5, 0.3]}}
    folder = make_set({"0.jpg": b"j", "0.json": annotation}, dataset)
    sample = only_sample(folder)
    assert [turn.role for turn in sample.turns] == ["user", "assistant"]
    assert texts(sample) == ["(medium)", "What?", "b"]


def test_a_question_that_places_its_image_keeps_it_there(make_set: MakeSet) -> None:
    dataset = described("VQASample", image="png,jpg", context="json[q]", answers="txt")
    folder = make_set({"0.jpg": b"j", "0.txt": b"yes", "0.json": {"q": "Is [IMG] red?"}}, dataset)
    assert texts(only_sample(folder, mapping={"image_placeholder": "[IMG]"})) == ["Is ", "(medium)", " red?", "yes"]


def test_conversations_of_a_type_of_the_user(make_set: MakeSet) -> None:
    """The class is never imported: its name and fields are enough."""
    dataset = {
        "sample_type": {"__module__": "no.such.module", "__class__": "ChatSample"},
        "field_map": {"conversations": "json", "images": "json[0][pictures]"},
    }
    turns = [{"from": "human", "value": "<image>?", "pictures": ["0.JPG"]}, {"from": "gpt", "value": "!"}]
    folder = make_set({"0.0.JPG": b"j", "0.json": turns}, dataset)
    assert texts(only_sample(folder)) == ["(medium)", "?", "!"]


@pytest.mark.parametrize("dataset", [None, {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}])
def test_crude_samples_are_those_of_any_tar(make_set: MakeSet, dataset: dict[str, Any] | None) -> None:
    assert texts(only_sample(make_set({"0.jpg": b"j", "0.txt": b"caption"}, dataset))) == ["(medium)", "caption"]


def test_the_reader_class_of_older_data_sets(make_set: MakeSet) -> None:
    dataset = {"__module__": "megatron.energon", "__class__": "OCRWebdataset", "field_map": {"image": "jpg", "text": "txt"}}
    assert texts(only_sample(make_set({"0.jpg": b"j", "0.txt": b"LETTERS"}, dataset))) == ["(medium)", "LETTERS"]


def test_code_is_refused_and_another_config_is_the_way_out(make_set: MakeSet) -> None:
    dataset = {
        "sample_type": {"__class__": "CaptioningSample"},
        "sample_loader": "sample_loader.py:load",
        "part_filter": "x.py:f",
    }
    folder = make_set({"0.jpg": b"j", "0.txt": b"t"}, dataset)
    (folder / "sample_loader.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(DatasetError, match="has a sample_loader, which is Python code and is not run; prepare a dataset_config"):
        opened(folder)
    (folder / ".nv-meta" / "crude.yaml").write_text("__class__: CrudeWebdataset")
    with opened(folder, fragment="#dataset_config=crude.yaml") as shard:
        assert shard.read(0).fields == {"txt": "t"}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"sample_type": {"__class__": "CaptioningSample"}}, "has no field_map"),
        (described("CaptioningSample", caption="json[a"), r"the field_map has 'json\[a'"),
        (
            described("ImageClassificationSample", image="jpg"),
            "samples of ImageClassificationSample, which have no text to learn",
        ),
    ],
)
def test_a_damaged_description_is_told(make_set: MakeSet, dataset: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        opened(make_set({"0.txt": b"t"}, dataset))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"0.json": {"caption": "c"}}, Reason.SCHEMA_ERROR),  # no jpg
        ({"0.jpg": b"j", "0.json": {"other": "c"}}, Reason.SCHEMA_ERROR),
        ({"0.jpg": b"j", "0.json": b"{"}, Reason.SCHEMA_ERROR),
        ({"0.jpg": b"j", "0.json": b"\xff"}, Reason.ENCODING_ERROR),
    ],
)
def test_a_damaged_sample_is_quarantined(make_set: MakeSet, members: dict[str, Any], reason: Reason) -> None:
    with opened(make_set(members, described("CaptioningSample", image="jpg", caption="json[caption]"))) as shard:
        assert shard.num_rows == 1
        with pytest.raises(BadSampleError) as caught:
            shard.read(0)
        assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("s_{08..11}.tar", ["s_08.tar", "s_09.tar", "s_10.tar", "s_11.tar"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{a,b{1..2}}.tar", ["a.tar", "b1.tar", "b2.tar"]),
        ("{a}{0..1}", ["{a}0", "{a}1"]),
        ("{a{0..1}", ["{a{0..1}"]),
        ("{a,b}{c,d}", ["ac", "ad", "bc", "bd"]),
    ],
)
def test_braces(pattern: str, names: list[str]) -> None:
    assert expand_braces(pattern) == names


@pytest.mark.parametrize("pattern", ["{0..99999999}", "{0..999}{0..999}{0..999}"])
def test_braces_have_a_bound(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(braces, "MAX_NAMES", 1000)
    with pytest.raises(ValueError, match="more than 1000 names"):
        expand_braces(pattern)
    assert len(expand_braces("{1..1000}")) == 1000


def test_info_as_json_and_split_as_json(make_set: MakeSet) -> None:
    folder = make_set({"0.txt": b"t"})
    meta = folder / ".nv-meta"
    (meta / ".info.yaml").rename(meta / ".info.json")
    (meta / "split.yaml").unlink()
    (meta / "split.json").write_text(json.dumps({"split_parts": {"train": ["a.tar"]}, "exclude": ["a.tar/0"]}))
    assert listed(folder) == ["s/a.tar"]
    with opened(folder) as shard:
        assert shard.num_rows == 0
