"""Metadatasets: a blend becomes sources of the job, with the shares that it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from headrace.errors import DatasetError
from headrace.preprocessor.sources import list_shards
from headrace.preprocessor.sources.energon_selection import Selection, parse_selection
from headrace.preprocessor.sources.metadataset import expand
from headrace.spec import JobSpec, parse_spec

OCR = {"__module__": "megatron.energon", "__class__": "OCRSample"}
ENERGON = Path(__file__).parents[3] / "data" / "energon" / "captions"


def job(*sources: dict[str, Any]) -> JobSpec:
    return parse_spec({"name": "test", "sources": list(sources)})


def write(path: Path, train: Any, **splits: Any) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": train, **splits}}
    path.write_text(yaml.safe_dump(document))
    return str(path)


def shares(spec: JobSpec) -> dict[str, float | None]:
    return {source.name: source.weight for source in spec.sources}


def test_a_job_without_a_blend_stays_as_it_is(tmp_path: Path) -> None:
    spec = job({"path": str(tmp_path)})
    assert expand(spec) is spec


def test_a_blend_becomes_weighted_sources(tmp_path: Path) -> None:
    path = write(tmp_path / "mix.yaml", {"blend": [{"path": "./coyo", "weight": 3}, {"path": "/data/docs", "weight": 1}]})
    spec = expand(job({"path": path, "mapping": "caption"}))
    assert shares(spec) == {"mix.coyo": 0.75, "mix.docs": 0.25}
    assert [source.path.partition("#")[0] for source in spec.sources] == [str(tmp_path / "coyo"), "/data/docs"]
    assert {source.mapping.text for source in spec.sources} == {"txt"}


def test_nested_blends_multiply_and_each_adds_up_to_its_share(tmp_path: Path) -> None:
    write(tmp_path / "sub" / "inner.yaml", {"blend": [{"path": "a", "weight": 30}, {"path": "../b", "weight": 10}]})
    path = write(tmp_path / "mix.yaml", {"blend": [{"path": "sub/inner.yaml", "weight": 1}, {"path": "c"}]})
    spec = expand(job({"path": path}))
    assert shares(spec) == {"mix.a": 0.375, "mix.b": 0.125, "mix.c": 0.5}
    assert [source.path.partition("#")[0] for source in spec.sources] == [str(tmp_path / name) for name in ("sub/a", "b", "c")]


def test_a_weight_of_the_source_is_shared_out(tmp_path: Path) -> None:
    path = write(tmp_path / "mix.yaml", {"blend": [{"path": "a", "weight": 3}, {"path": "b", "weight": 1}]})
    assert shares(expand(job({"path": path, "weight": 8}, {"path": "/own", "weight": 1}))) == {"mix.a": 6, "mix.b": 2, "own": 1}


def repetitions(spec: JobSpec) -> dict[str, float | None]:
    return {source.name: source.repetitions for source in spec.sources}


def test_repetitions_become_those_of_sources(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mix.yaml",
        {"blend_epochized": [{"path": "a", "repetitions": 0.33}, {"path": "b", "repetitions": 200}, {"path": "c"}]},
    )
    spec = expand(job({"path": path, "name": "m"}, {"path": "/own"}))
    assert repetitions(spec) == {"m.a": 0.33, "m.b": 200, "m.c": None, "own": None}
    assert {source.weight for source in spec.sources} == {None}


def test_nested_repetitions_multiply(tmp_path: Path) -> None:
    write(tmp_path / "inner.yaml", {"blend_epochized": [{"path": "a", "repetitions": 0.3}, {"path": "b"}]})
    path = write(tmp_path / "mix.yaml", {"blend_epochized": [{"path": "inner.yaml", "repetitions": 3}]})
    assert repetitions(expand(job({"path": path, "repetitions": 2}))) == {"mix.a": 1.8, "mix.b": 6}


def test_splits_and_configs_reach_the_data_sets(tmp_path: Path) -> None:
    items = [{"path": "a"}, {"path": "b", "split_part": "train", "dataset_config": "d.yaml"}, {"path": "c.jsonl"}]
    path = write(tmp_path / "mix.yaml", {"path": "never"}, val={"blend": items})
    assert [source.path for source in expand(job({"path": f"{path}#val"})).sources] == [
        f"{tmp_path}/a#split=val&dataset_config=dataset.yaml&split_config=split.yaml",
        f"{tmp_path}/b#split=train&dataset_config=d.yaml&split_config=split.yaml",
        f"{tmp_path}/c.jsonl",
    ]


@pytest.mark.parametrize(
    ("outer", "inner", "selected"),
    [
        (None, ["25%", "75%"], "share=0.25,0.75"),
        (["0%", "50%"], ["25%", "75%"], "share=0.25,0.5"),
        (["50%", "100%"], None, "share=0.5,1.0"),
        (None, [1422, "end"], "rows=1422,end"),
        (["0%", "50%"], [0, 1000], "rows=0,1000&share=0.0,0.5"),
    ],
)
def test_subsets_reach_the_data_sets_the_inner_one_first(tmp_path: Path, outer: Any, inner: Any, selected: str) -> None:
    item = {"path": "a.jsonl", **({"subset": {"range": inner}} if inner else {})}
    blended = {"blend": [item], **({"subset": {"range": outer}} if outer else {})}
    path = write(tmp_path / "mix.yaml", blended)
    (source,) = expand(job({"path": path})).sources
    assert source.path == f"{tmp_path}/a.jsonl#{selected}"


def test_a_join_becomes_one_source(tmp_path: Path) -> None:
    joined = [{"path": "a", "split_part": "own"}, {"path": "/data/b", "nonmatch": "skip", "dataset_config": "d.yaml"}]
    path = write(tmp_path / "mix.yaml", {"join": joined, "joiner": OCR, "split_part": "val", "subset": {"range": [0, 9]}})
    (source,) = expand(job({"path": path})).sources
    selection = parse_selection(source.path)
    assert (selection.root, selection.split, selection.joiner, selection.rows) == (f"{tmp_path}/a", "own", "OCRSample", (0, 9))
    (second,) = selection.joined
    assert (second.nonmatch, second.selection) == (
        "skip",
        Selection(root="/data/b", split="val", dataset_config="d.yaml"),
    )


def test_places_of_media_are_relative_to_the_file(tmp_path: Path) -> None:
    aux = {
        "a": "./set",
        "b": "filesystem://images",
        "c": "filesystem:///all",
        "d": "filesystem+s3://bucket/x",
        "e": "s3://bucket/y",
    }
    (source,) = expand(job({"path": write(tmp_path / "mix.yaml", {"path": "a", "aux": aux})})).sources
    assert parse_selection(source.path).aux == (
        f"{tmp_path}/set",
        f"filesystem://{tmp_path}/images",
        "filesystem:///all",
        "filesystem://s3://bucket/x",
        "s3://bucket/y",
    )


def test_the_first_version_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    datasets = [
        {"path": "a", "weight": 1, "subflavors": {"x": 1}},
        {"path": "b", "weight": 3, "shuffle_over_epochs_multiplier": 4},
    ]
    path.write_text(yaml.safe_dump({"__class__": "Metadataset", "splits": {"train": {"datasets": datasets}}}))
    assert shares(expand(job({"path": str(path)}))) == {"old.a": 0.25, "old.b": 0.75}


def test_a_remote_blend() -> None:
    with fsspec.open("memory://blends/x/mix.yaml", "w") as file:
        yaml.safe_dump({"splits": {"train": {"blend": [{"path": "../a"}, {"path": "s3://bucket/b"}]}}}, file)
    spec = expand(job({"path": "memory://blends/x/mix.yaml"}))
    assert [source.path.partition("#")[0] for source in spec.sources] == ["memory://blends/a", "s3://bucket/b"]


def test_what_a_blend_becomes_can_be_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "mix.yaml", {"blend": [{"path": str(ENERGON)}, {"path": str(ENERGON), "split_part": "val"}]})
    spec = expand(job({"path": path}))
    assert [shard.name for shard in list_shards(spec)] == [
        "mix.captions/parts/shard_0.tar",
        "mix.captions/parts/shard_1.tar",
        "mix.captions-2/parts/shard_2.tar",
    ]


def test_a_blend_that_nobody_expanded_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "mix.yaml", {"blend": [{"path": "a"}]})
    with pytest.raises(DatasetError, match="is a blend of data sets, which is expanded when a job is submitted"):
        list_shards(job({"path": path}))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"join": [{"path": "a"}]}, "has a joiner that is code and is not run; join into a class of megatron.energon"),
        ({"join": {"one": {"path": "a"}}, "joiner": OCR}, "joins data sets by names, which only code takes"),
        ({"join": [{"path": "a.jsonl"}], "joiner": OCR}, "a join has paths of WebDatasets, each with a nonmatch of error, skip"),
        ({"join": [{"path": "a", "nonmatch": "drop"}], "joiner": OCR}, "got 'a' and 'drop'"),
        ({"join": [{"path": "a", "subset": {"range": [0, 1]}}], "joiner": OCR}, "has subset inside of a join"),
        ({"join": [{"path": "a"}], "joiner": OCR, "split_config": "s.yaml"}, "has split_config for a whole join"),
        ({"path": "a", "subset": {"range": [5, 3]}}, r"two percentages or two numbers in order, got \[5, 3\]"),
        ({"path": "a", "subset": {"range": ["50%", "end"]}}, "two percentages or two numbers"),
        ({"path": "a", "subset": {"range": ["50%", "101%"]}}, "two percentages or two numbers"),
        ({"path": "a", "subset": {"part": 3}}, "a subset has a range of two"),
        ({"blend": [{"path": "a"}], "subset": {"range": [0, 5]}}, "a subset of blend by numbers of samples"),
        ({"path": "weights.yaml", "subset": {"range": [0, 5]}}, "takes a subset of .*weights.yaml by numbers"),
        ({"blend": [{"path": "a"}], "aux": {"m": "b"}}, "has aux beside blend"),
        ({"path": "weights.yaml", "aux": {"m": "b"}}, "has aux for another metadataset"),
        ({"path": "a", "aux": {"m": {"fs_path": "b"}}}, "aux is a mapping of names to paths"),
        ({"path": "a", "split": "val"}, "has an entry with split, which is not known there"),
        ({"blend": []}, "blend must be a list of data sets"),
        ({"blend": [{"path": "a", "weight": 0}]}, "weight must be a number above 0, got 0"),
        ({"blend": [{"path": "a", "weight": "much"}]}, "weight must be a number above 0, got 'much'"),
        ({"blend_epochized": [{"path": "a", "repetitions": -1}]}, "repetitions must be a number above 0"),
        ({"blend": [{"weight": 1}]}, "an entry with weight; expected path, join or a blend"),
        ({"concatenate": [{"path": "a"}]}, "an entry with concatenate"),
        ({"path": "mix.yaml"}, "nested more than 16 deep"),
        ({"path": "gone.yaml"}, "cannot read the metadataset"),
        (3, "has no split 'train'"),
        ({"blend": [{"path": "epochs.yaml"}]}, "a blend_epochized inside of a blend"),
        ({"blend_epochized": [{"path": "weights.yaml"}]}, "a blend inside of a blend_epochized"),
    ],
)
def test_what_cannot_be_expanded_is_told_in_a_sentence(tmp_path: Path, train: Any, message: str) -> None:
    write(tmp_path / "epochs.yaml", {"blend_epochized": [{"path": "a", "repetitions": 2}]})
    write(tmp_path / "weights.yaml", {"blend": [{"path": "a"}]})
    with pytest.raises(DatasetError, match=message) as caught:
        expand(job({"path": write(tmp_path / "mix.yaml", train)}))
    assert ".yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_and_none_do_not_mix(tmp_path: Path) -> None:
    weights = write(tmp_path / "weights.yaml", {"blend": [{"path": "a"}]})
    epochs = write(tmp_path / "epochs.yaml", {"blend_epochized": [{"path": "a", "repetitions": 2}]})
    with pytest.raises(DatasetError, match=r"the sources weights\.yaml, own mix weights and none"):
        expand(job({"path": weights}, {"path": "/own"}))
    with pytest.raises(DatasetError, match="repeats data sets and has a weight"):
        expand(job({"path": epochs, "weight": 1}))
