"""What metadatasets take of Energon data sets: subsets, joins by key, media in other places."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.errors import DatasetError
from headrace.preprocessor.records.record_to_sample import Text, to_sample
from headrace.preprocessor.sources import Shard, list_shards, open_shard
from headrace.preprocessor.sources.metadataset import expand
from headrace.quarantine import BadSampleError, Reason
from headrace.spec import JobSpec, parse_spec

CAPTIONS = {"image": "jpg", "caption": "txt"}

Content = Mapping[str, bytes]


def archive(path: Path, members: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def make(
    folder: Path, shards: Mapping[str, Content], fields: Mapping[str, str] | None, kind: str = "CaptioningSample", **split: Any
) -> None:
    for name, members in shards.items():
        archive(folder / name, members)
    counts = {name: len({member.partition(".")[0] for member in members}) for name, members in shards.items()}
    described = {"sample_type": {"__module__": "megatron.energon", "__class__": kind}, "field_map": dict(fields or {})}
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    (folder / ".nv-meta").mkdir()
    for name, document in {
        ".info.yaml": {"shard_counts": counts},
        "split.yaml": {"split_parts": {"train": list(shards)}, **split},
        "dataset.yaml": described if fields else crude,
    }.items():
        (folder / ".nv-meta" / name).write_text(yaml.safe_dump(document))


def pairs(*keys: int, text: str = "") -> dict[str, bytes]:
    return {
        name: data for key in keys for name, data in {f"{key}.jpg": b"j%d" % key, f"{key}.txt": f"{text}{key}".encode()}.items()
    }


def job(folder: Path, train: Any) -> JobSpec:
    (folder / "mix.yaml").write_text(yaml.safe_dump({"splits": {"train": train}}))
    return expand(parse_spec({"name": "test", "sources": [{"path": str(folder / "mix.yaml"), "name": "s"}]}))


def shards_of(folder: Path, train: Any) -> list[Shard]:
    spec = job(folder, train)
    return [open_shard(info.url, spec.sources[info.source]) for info in list_shards(spec)]


def read(shard: Shard, row: int) -> str:
    return "|".join(
        part.text if isinstance(part, Text) else part.data.decode()
        for part in to_sample(shard.read(row), CAPTION_MAPPING).segments
    )


CAPTION_MAPPING = parse_spec({"name": "t", "sources": [{"path": "/x"}]}).sources[0].mapping


def all_of(folder: Path, train: Any) -> list[str]:
    return [read(shard, row) for shard in shards_of(folder, train) for row in range(shard.num_rows)]


def joined(*items: Mapping[str, Any], kind: str = "CaptioningSample", **others: Any) -> dict[str, Any]:
    return {"join": list(items), "joiner": {"__module__": "megatron.energon", "__class__": kind}, **others}


def test_shards_without_a_sample_of_the_subset_are_not_listed(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x.tar": pairs(0, 1), "y.tar": pairs(2, 3, 4), "z.tar": pairs(5)}, CAPTIONS)
    train = {"path": "a", "subset": {"range": [2, 4]}}
    assert [info.name for info in list_shards(job(tmp_path, train))] == ["s.a/y.tar"]
    assert all_of(tmp_path, train) == ["j2|2", "j3|3"]


def test_damaged_and_excluded_samples_are_numbered_too(tmp_path: Path) -> None:
    members = {**pairs(0, 1, 2, 3), "./1.txt": b"again"}
    make(tmp_path / "a", {"x.tar": members}, CAPTIONS, exclude=["x.tar/2"])
    (tmp_path / "a" / ".nv-meta" / ".info.yaml").write_text("shard_counts: {x.tar: 4}")
    (shard,) = shards_of(tmp_path, {"path": "a", "subset": {"range": [1, "end"]}})
    assert [shard.key(row) for row in range(shard.num_rows)] == ["3"]
    assert [item.name for item in shard.rejected] == ["1"]
    (other,) = shards_of(tmp_path, {"path": "a", "subset": {"range": [0, 1]}})
    assert other.rejected == ()


def test_a_subset_of_other_samples_than_were_counted_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x.tar": pairs(0, 1, 2)}, CAPTIONS)
    archive(tmp_path / "a" / "x.tar", pairs(0, 2))
    with pytest.raises(DatasetError, match=r"x\.tar of .* has 2 samples, and 3 where it was prepared"):
        shards_of(tmp_path, {"path": "a", "subset": {"range": ["0%", "50%"]}})


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 9], "has 2 samples, and none from 0 to 9: correct the subset's range"),
        ([1, 1], "has no sample from 1 to 1; give the subset a wider range"),
        (["0%", "10%"], "has no sample from 0 to 0"),
    ],
)
def test_a_subset_that_is_not_there(tmp_path: Path, bounds: list[Any], message: str) -> None:
    make(tmp_path / "a", {"x.tar": pairs(0, 1)}, CAPTIONS)
    with pytest.raises(DatasetError, match=message):
        list_shards(job(tmp_path, {"path": "a", "subset": {"range": bounds}}))


def test_a_subset_needs_counts(tmp_path: Path) -> None:
    for name in ("x.tar", "y.tar"):
        archive(tmp_path / "a" / name, pairs(0))
    with pytest.raises(DatasetError, match="is no prepared Energon data set"):
        list_shards(job(tmp_path, {"path": "a", "subset": {"range": [0, 1]}}))


def test_keys_are_found_in_any_shard_and_the_last_field_counts(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x.tar": pairs(0, 1), "y.tar": pairs(2)}, CAPTIONS)
    make(
        tmp_path / "b",
        {"u.tar": pairs(2, text="b"), "x.tar": pairs(1, 7, text="b"), "z.tar": pairs(0, text="b")},
        {"caption": "txt"},
    )
    assert all_of(tmp_path, joined({"path": "a"}, {"path": "b"})) == ["j0|b0", "j1|b1", "j2|b2"]


def test_media_of_both_data_sets_with_one_extension(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x.tar": {"0.jpg": b"first", "0.txt": b"t"}}, CAPTIONS)
    make(tmp_path / "b", {"x.tar": {"0.jpg": b"second"}}, {"image": "jpg"}, "ImageSample")
    assert all_of(tmp_path, joined({"path": "a"}, {"path": "b"})) == ["second|t"]


def test_a_sample_without_a_match(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x.tar": pairs(0, 1)}, CAPTIONS)
    make(tmp_path / "b", {"x.tar": pairs(1, text="b")}, {"caption": "txt"})
    assert all_of(tmp_path, joined({"path": "a"}, {"path": "b", "nonmatch": "none"})) == ["j0|0", "j1|b1"]
    (shard,) = shards_of(tmp_path, joined({"path": "a"}, {"path": "b", "nonmatch": "skip"}))
    assert [shard.key(row) for row in range(shard.num_rows)] == ["1"]
    assert [(item.reason, item.detail) for item in shard.rejected] == [
        (Reason.FILTERED, f"1 of 2 samples have no match in {tmp_path}/b, and skip it")
    ]
    with pytest.raises(DatasetError, match=r"b has no sample 0, with which .*a is joined; add it, or say `nonmatch: skip`"):
        shards_of(tmp_path, joined({"path": "a"}, {"path": "b"}))


def test_what_cannot_be_joined_is_told_when_shards_are_listed(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x.tar": pairs(0)}, CAPTIONS, exclude=["x.tar/9"])
    make(tmp_path / "crude", {"x.tar": pairs(0)}, None)
    make(tmp_path / "b", {"x.tar": pairs(0)}, {"text": "txt"}, "TextSample")
    archive(tmp_path / "plain" / "x.tar", pairs(0))
    for train, message in [
        (joined({"path": "a"}, {"path": "b"}), "joins into CaptioningSample, which has no field text"),
        (joined({"path": "b"}, {"path": "b"}, kind="OCRSample"), "joins into OCRSample, and no data set has its field image"),
        (joined({"path": "a"}, {"path": "b"}, kind="MySample"), "joins into MySample, which is code"),
        (joined({"path": "a"}, {"path": "crude"}), "has crude samples, which only code can join"),
        (joined({"path": "a"}, {"path": "plain"}), "is no prepared Energon data set, and only such can be joined"),
        (joined({"path": "a"}, {"path": "a"}, subset={"range": [0, 1]}), "a subset of a join that leaves samples out"),
    ]:
        with pytest.raises(DatasetError, match=message):
            list_shards(job(tmp_path, train))


def test_samples_that_are_spread_too_far_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x.tar": pairs(*range(20))}, CAPTIONS)
    make(tmp_path / "b", {f"{key:02d}.tar": pairs(key) for key in range(20)}, {"caption": "txt"})
    with pytest.raises(DatasetError, match=r"samples of x\.tar lie in more than 16 shards of .*b, with which it is joined"):
        shards_of(tmp_path, joined({"path": "a"}, {"path": "b"}))


def named(name: str) -> dict[str, bytes]:
    return {"0.json": f'{{"image": "{name}", "caption": "c"}}'.encode()}


def test_media_in_other_places(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x.tar": named("deep/7.jpg")}, None)
    make(tmp_path / "b", {"x.tar": pairs(1), "y.tar": {"deep/7.jpg": b"packed", "deep/7.txt": b"t"}}, None)
    (tmp_path / "files" / "deep").mkdir(parents=True)
    packed, plain = {"path": "a", "aux": {"b": "b"}}, {"path": "a", "aux": {"f": "filesystem://files"}}
    assert all_of(tmp_path, packed) == ["packed|c"]
    with pytest.raises(BadSampleError) as caught:
        all_of(tmp_path, plain)
    assert caught.value.reason is Reason.MISSING_MEDIA
    (tmp_path / "files" / "deep" / "7.jpg").write_bytes(b"plain")
    assert all_of(tmp_path, plain) == ["plain|c"]
    with pytest.raises(BadSampleError, match=r"have each a file 'deep/7\.jpg': name one under aux"):
        all_of(tmp_path, {"path": "a", "aux": {"b": "b", "f": "filesystem://files"}})


def test_a_name_cannot_lead_out_of_a_folder_of_media(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x.tar": named("../secret.jpg")}, None)
    (tmp_path / "secret.jpg").write_bytes(b"s")
    (tmp_path / "files").mkdir()
    with pytest.raises(BadSampleError) as caught:
        all_of(tmp_path, {"path": "a", "aux": {"f": "filesystem://files"}})
    assert caught.value.reason is Reason.MISSING_MEDIA


def test_a_place_that_is_no_data_set_is_told(tmp_path: Path) -> None:
    make(tmp_path / "a", {"x.tar": named("1.jpg")}, None)
    with pytest.raises(
        DatasetError, match="is no prepared Energon data set: run `energon prepare` for it, or write filesystem://"
    ):
        shards_of(tmp_path, {"path": "a", "aux": {"b": "gone"}})
    with pytest.raises(DatasetError, match="where a metadataset says that media are"):
        shards_of(tmp_path, {"path": "a", "aux": {"b": "msc://store/set"}})


def test_a_part_filter_that_is_a_list(tmp_path: Path) -> None:
    members = {**pairs(0), "0.seg.png": b"mask", "0.json": b'{"caption": "other"}'}
    make(tmp_path / "a", {"x.tar": members}, None)
    described = tmp_path / "a" / ".nv-meta" / "dataset.yaml"
    described.write_text("{__class__: CrudeWebdataset, part_filter: [jpg, txt]}")
    assert all_of(tmp_path, {"path": "a"}) == ["j0|0"]
    described.write_text("{__class__: CrudeWebdataset, part_filter: 'code.py:keep'}")
    with pytest.raises(DatasetError, match="has a part_filter that is Python code and is not run"):
        shards_of(tmp_path, {"path": "a"})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/data#rows=3", "rows are two numbers of samples"),
        ("/data#share=0.5,0.1", "a share is two numbers from 0 to 1"),
        ("/data#share=a", "a share is two numbers from 0 to 1"),
        ("/data#join=drop,x", "join is one of error, skip, none, a comma and a quoted path"),
    ],
)
def test_a_wrong_part_in_a_path_is_told(path: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        list_shards(parse_spec({"name": "test", "sources": [{"path": path}]}))


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (b'{"q": "Q", "c": ["x"], "r": 1}', "correct_choice_idx: expected the number of one of 1 choices, got 1"),
        (b'{"q": "Q", "c": [1], "r": 0}', "choices: expected a list of strings"),
    ],
)
def test_a_damaged_choice_is_refused(tmp_path: Path, annotation: bytes, message: str) -> None:
    fields = {"image": "jpg", "context": "json[q]", "choices": "json[c]", "correct_choice_idx": "json[r]"}
    make(tmp_path / "a", {"x.tar": {"0.jpg": b"j", "0.json": annotation}}, fields, "MultiChoiceVQASample")
    with pytest.raises(BadSampleError, match=message):
        all_of(tmp_path, {"path": "a"})
