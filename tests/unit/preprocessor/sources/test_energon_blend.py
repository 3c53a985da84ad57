"""Metadatasets: a blend becomes sources of the job, with the shares that it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from headrace.errors import DatasetError
from headrace.preprocessor.sources import list_shards
from headrace.preprocessor.sources.metadataset import expand
from headrace.spec import JobSpec, parse_spec

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


def test_repetitions_become_copies_with_names_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "mix.yaml", {"blend_epochized": [{"path": "a", "repetitions": 2}, {"path": "b"}]})
    assert shares(expand(job({"path": path}))) == {"mix.a": None, "mix.a-2": None, "mix.b": None}


def test_fractions_keep_their_proportion_to_all_other_sources(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mix.yaml", {"blend_epochized": [{"path": "a", "repetitions": 0.5}, {"path": "b", "repetitions": 1.5}]}
    )
    spec = expand(job({"path": path, "name": "m"}, {"path": "/own"}))
    assert list(shares(spec)) == ["m.a", "m.b", "m.b-2", "m.b-3", "own", "own-2"]


def test_nested_repetitions_multiply(tmp_path: Path) -> None:
    write(tmp_path / "inner.yaml", {"blend_epochized": [{"path": "a", "repetitions": 2}]})
    path = write(tmp_path / "mix.yaml", {"blend_epochized": [{"path": "inner.yaml", "repetitions": 3}]})
    assert len(expand(job({"path": path})).sources) == 6


def test_splits_and_configs_reach_the_data_sets(tmp_path: Path) -> None:
    items = [{"path": "a"}, {"path": "b", "split_part": "train", "dataset_config": "d.yaml"}, {"path": "c.jsonl"}]
    path = write(tmp_path / "mix.yaml", {"path": "never"}, val={"blend": items})
    assert [source.path for source in expand(job({"path": f"{path}#val"})).sources] == [
        f"{tmp_path}/a#split=val&dataset_config=dataset.yaml&split_config=split.yaml",
        f"{tmp_path}/b#split=train&dataset_config=d.yaml&split_config=split.yaml",
        f"{tmp_path}/c.jsonl",
    ]


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
        ({"join": [{"path": "a"}]}, "uses 'join', which is not supported"),
        ({"blend": [{"path": "a", "subset": {"range": [0, 5]}}]}, "uses 'subset'"),
        ({"blend": [{"path": "a", "aux": {"m": "b"}}]}, "uses 'aux'"),
        ({"blend": []}, "blend must be a list of data sets"),
        ({"blend": [{"path": "a", "weight": 0}]}, "weight must be a number above 0, got 0"),
        ({"blend": [{"path": "a", "weight": "much"}]}, "weight must be a number above 0, got 'much'"),
        ({"blend_epochized": [{"path": "a", "repetitions": -1}]}, "repetitions must be a number above 0"),
        ({"blend_epochized": [{"path": "a", "repetitions": 100}]}, "would be there 100 times, more than 64"),
        ({"blend": [{"weight": 1}]}, "expected path, blend or blend_epochized"),
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
