"""The job spec: what it takes, what it gives by default, and how it says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.errors import SpecError
from headrace.mapping import MAPPING_PRESETS
from headrace.spec import STRATEGIES, JobSpec, load_spec_json, load_spec_yaml, parse_spec

MINIMAL: dict[str, Any] = {"name": "job", "sources": [{"path": "/data/set"}]}


def test_a_name_and_a_source_are_enough() -> None:
    spec = parse_spec(MINIMAL)
    assert (spec.global_batch, spec.strategy, spec.model, spec.seed, spec.window) == (32, "auto", "tiny", 0, 4)
    assert (spec.epochs, spec.steps) == (None, None)
    assert (spec.image.patch, spec.image.merge, spec.audio.mel_bins, spec.audio.sample_rate) == (14, 2, 128, 16_000)
    topology = spec.topology.topology()
    assert (topology.replicas, topology.microbatches, topology.num_stages) == (1, 4, 4)


@pytest.mark.parametrize(
    ("path", "name"),
    [("/data/set", "set"), ("/data/set/", "set"), ("s3://bucket/a/b.parquet", "b.parquet"), ("/", "data"), ("d/*.tar", "*.tar")],
)
def test_a_source_is_named_after_its_path(path: str, name: str) -> None:
    assert parse_spec({**MINIMAL, "sources": [{"path": path}]}).sources[0].name == name


def test_a_mapping_is_a_preset_or_fields() -> None:
    sources = [{"path": "a", "mapping": "llava"}, {"path": "b", "mapping": {"text": "caption"}}, {"path": "c"}]
    spec = parse_spec({**MINIMAL, "sources": sources})
    assert spec.sources[0].mapping == MAPPING_PRESETS["llava"]
    assert spec.sources[1].mapping.text == "caption"
    assert spec.sources[2].mapping == MAPPING_PRESETS["auto"]


FULL: dict[str, Any] = {
    "name": "full-1.0",
    "sources": [
        {"path": "/a", "name": "ä", "weight": 0.3, "mapping": {"text": "t", "user_roles": ["human"]}},
        {"path": "s3://b/c", "weight": 2, "mapping": "cauldron"},
    ],
    "global_batch": 7,
    "epochs": 3,
    "steps": 11,
    "seed": 2**63 - 1,
    "shuffle_shards": 1,
    "strategy": "random",
    "topology": {"replicas": 2, "microbatches": 3, "stages": {"encoder": 2, "llm": 5}},
    "image": {"max_pixels": 50_176, "background": [0, 1, 2]},
    "audio": {"max_seconds": 30.5},
    "text": {"max_tokens": 100},
    "model": "tiny",
}


@pytest.mark.parametrize("document", [MINIMAL, FULL])
def test_json_and_yaml_give_the_same_spec_back(document: dict[str, Any], tmp_path: Path) -> None:
    spec = parse_spec(document)
    assert load_spec_json(spec.to_json()) == spec
    assert load_spec_json(load_spec_json(spec.to_json()).to_json()).to_json() == spec.to_json()
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    assert load_spec_yaml(path) == spec


def shared(cp: int | str, **topology: Any) -> dict[str, Any]:
    """Of a job on four FSDP ranks that share the LLM's sequences."""
    stages = {"vision": 1, "audio": 1, "llm": 1}
    execution = {"trainer": "fsdp", "units": {"llm": {"cp": cp}}}
    return {"execution": execution, "topology": {"replicas": 4, "stages": stages, **topology}}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"name": ""}, "name", "63 letters"),
    ({"name": "a/b"}, "name", "63 letters"),
    ({"name": "a\n"}, "name", "63 letters"),
    ({"sources": []}, "sources", "at least 1"),
    ({"sources": [{"path": "a"}, {"path": "b/a"}]}, "job spec", "different names"),
    ({"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "job spec", "every source has a weight"),
    ({"sources": [{"path": "a", "weight": 0}]}, "sources.0.weight", "greater than 0"),
    ({"sources": [{"path": "a", "weight": float("inf")}]}, "sources.0.weight", "finite"),
    ({"sources": [{"path": "a", "weight": float("nan")}]}, "sources.0.weight", "finite"),
    ({"sources": [{"path": "a", "name": "x/y"}]}, "sources.0", "'/'"),
    ({"sources": [{"path": "a", "mapping": "nope"}]}, "sources.0.mapping", "no mapping 'nope'"),
    ({"sources": [{"paht": "a"}]}, "sources.0.path", "required"),
    ({"image": {"fit": "anyres", "side": 384, "merge": 1}, "mrope": True}, "job spec", "set another image.fit"),
    ({"global_batch": 0}, "global_batch", "greater than or equal to 1"),
    ({"global_batch": "many"}, "global_batch", "integer"),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"steps": 0}, "steps", "greater than or equal to 1"),
    ({"pack_tokens": 1 << 25}, "pack_tokens", "less than or equal to 16777216"),
    ({"pack_tokens": 512}, "job spec", "below text.max_tokens (32768)"),
    ({"pad_to_max_length": True}, "job spec", "pad_to_max_length is set without pack_tokens"),
    ({"topology": {"stages": {"encoder": 1, "vision": 1, "llm": 1}}}, "topology.stages", "audio"),
    ({"strategy": "magic"}, "strategy", "no strategy 'magic'; there are random, disttrain"),
    ({"model": "huge"}, "model", "no model 'huge'"),
    ({"topology": {"replicas": 0}}, "topology.replicas", "greater than or equal to 1"),
    ({"topology": {"stages": {"llm": 1}}}, "topology.stages", "encoder"),
    ({"topology": {"stages": {"vision": 1, "llm": 1, "generator": 1}}}, "job spec", "or take model tiny-generator or 9b"),
    ({"image": {"max_pixels": 10}}, "image", "max_pixels (10)"),
    ({"audio": {"hop_s": float("inf")}}, "audio.hop_s", "finite"),
    ({"strategy": "orchmllm", "execution": {"trainer": "colocated"}}, "job spec", "on one: set strategy to 'auto'"),
    (
        {"strategy": "entrain", "execution": {"trainer": "fsdp"}, "topology": {"stages": {"vision": 1, "llm": 1}}},
        "job spec",
        "`trainer: fsdp` takes strategy auto or orchmllm or random or llm-only, got 'entrain': change it",
    ),
    (
        shared(3),
        "job spec",
        "'llm' has cp 3, which does not divide the 4 FSDP ranks (topology.replicas): take a divisor, or auto",
    ),
    ({**shared(2), "strategy": "random"}, "job spec", "cp 2 of the llm, but strategy 'random' puts a sequence on one rank"),
    (
        {**shared("auto"), "pack_tokens": 32768},
        "job spec",
        "but pack_tokens (32768) plans packs, and sequences are shared singly",
    ),
    ({**shared(2), "orchmllm": {"forms": {"llm": "padded"}}}, "job spec", "but orchmllm.forms has 'padded' of the llm"),
    ({**shared(2, speeds=[1, 1, 2, 1])}, "job spec", "but topology.speeds gives ranks unequal work"),
    ({"text": {"template": "alpaca"}}, "text.template", "chatml"),
    ({"globalbatch": 4}, "globalbatch", "no such field"),
    ({"global_batch": 10**10}, "global_batch", "less than or equal to 1048576"),
    ({"epochs": 10**18}, "epochs", "less than or equal to 1000000"),
    ({"steps": 10**10}, "steps", "less than or equal to 1000000000"),
    ({"window": 10**6}, "window", "less than or equal to 1024"),
    ({"window": 1024, "global_batch": 8192}, "job spec", "8388608 samples planned ahead, and at most 4194304"),
    ({"part_samples": 10**9}, "part_samples", "less than or equal to 4096"),
    ({"shuffle_shards": 10**9}, "shuffle_shards", "less than or equal to 65536"),
    ({"sources": [{"path": f"/{n}"} for n in range(1025)]}, "sources", "at most 1024"),
    ({"sources": [{"path": "/" * 5000}]}, "sources.0.path", "at most 4096"),
    ({"sources": [{"path": "/a", "name": "n" * 256}]}, "sources.0.name", "at most 255"),
    ({"sources": [{"path": "n" * 256}]}, "sources.0", "at most 255"),
    ({"topology": {"replicas": 10**9}}, "topology.replicas", "less than or equal to 16384"),
    ({"topology": {"microbatches": 10**9}}, "topology.microbatches", "less than or equal to 4096"),
    ({"topology": {"stages": {"encoder": 1, "llm": 10**8}}}, "topology.stages.llm", "less than or equal to 256"),
    ({"topology": {"replicas": 16384, "microbatches": 4096}}, "topology", "x 4 stages are 268435456, and at most 2097152"),
    ({"image": {"patch": 10**6}}, "image.patch", "less than or equal to 256"),
    ({"image": {"merge": 10**6}}, "image.merge", "less than or equal to 64"),
    ({"image": {"max_pixels": 10**12}}, "image.max_pixels", "less than or equal to 67108864"),
    ({"image": {"max_source_pixels": 10**12}}, "image.max_source_pixels", "less than or equal to 1073741824"),
    ({"audio": {"sample_rate": 10**9}}, "audio.sample_rate", "less than or equal to 384000"),
    ({"audio": {"mel_bins": 10**6}}, "audio.mel_bins", "less than or equal to 1024"),
    ({"audio": {"hop_s": 1e-9}}, "audio.hop_s", "greater than or equal to 0.001"),
    ({"audio": {"window_s": 100}}, "audio.window_s", "less than or equal to 1"),
    ({"audio": {"max_seconds": 5, "min_seconds": 6}}, "audio", "min_seconds (6) is above max_seconds (5)"),
    ({"audio": {"max_seconds": 1e9}}, "audio.max_seconds", "less than or equal to 86400"),
    ({"audio": {"max_seconds": 20_000, "sample_rate": 48_000}}, "audio", "960000000 values, and at most 268435456"),
    ({"text": {"max_tokens": 10**9}}, "text.max_tokens", "less than or equal to 16777216"),
    ({"global_batch": True}, "global_batch", "a number or a text, got true"),
    ({"sources": [{"path": "/a", "weight": False}]}, "sources.0.weight", "a number or a text, got false"),
    ({"topology": {"stages": {"encoder": 1, "llm": True}}}, "topology.stages.llm", "valid integer"),
]


@pytest.mark.parametrize(("change", "field", "words"), WRONG)
def test_an_error_is_one_sentence_that_names_the_field(change: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({**MINIMAL, **change})
    message = str(caught.value)
    assert message.startswith(f"{field}: ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "fields",
    [
        {"topology": {"replicas": 16_384, "microbatches": 16, "stages": {"encoder": 2, "llm": 6}}, "global_batch": 1 << 20},
        {"topology": {"replicas": 1, "microbatches": 1_024, "stages": {"vision": 8, "llm": 128}}},
        {"audio": {"max_seconds": 14_400, "sample_rate": 16_000}},
        {"audio": {"max_seconds": 3_600, "sample_rate": 48_000, "mel_bins": 128}},
        {"image": {"max_pixels": 16_384 * 28 * 28, "patch": 16, "reduced_scale": True}},
        {"window": 1_024, "global_batch": 4_096, "epochs": 1_000, "steps": 10_000_000, "part_samples": 1},
        {"sources": [{"path": f"s3://b/{n}.jsonl", "weight": n + 1} for n in range(1_000)]},
    ],
)
def test_what_large_runs_ask_for_is_taken(fields: dict[str, Any]) -> None:
    spec = parse_spec({**MINIMAL, **fields})
    assert load_spec_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("global_batch: 010", "010 would be read as another number"),
        ("audio: {max_seconds: 1:30:00}", "1:30:00 would be read as another number"),
        ("seed: -0_7", "-0_7 would be read"),
    ],
)
def test_a_number_that_yaml_reads_as_another_is_refused(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: j\nsources: [{{path: /d}}]\n{line}\n")
    with pytest.raises(SpecError, match=words) as caught:
        load_spec_yaml(path)
    assert "line 3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_that_are_what_they_look_like_and_texts_in_quotes_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: '010'\nsources: [{path: 0.5e1/x, name: '1:30:00'}]\nseed: 0\nglobal_batch: 1_000\nshare: 0.5\n")
    spec = load_spec_yaml(path)
    assert (spec.name, spec.sources[0].name, spec.seed, spec.global_batch, spec.share) == ("010", "1:30:00", 0, 1000, 0.5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "text.max_tokens (32768) is above execution.max_tokens (16384)"),
        ({"pack_tokens": 20_000, "text": {"max_tokens": 100}}, "pack_tokens (20000) is above execution.max_tokens (16384)"),
    ],
)
def test_a_job_whose_longest_sample_fits_no_microbatch_is_refused_but_goes_on_where_it_was_taken(
    fields: dict[str, Any], words: str
) -> None:
    document = {"name": "j", "sources": [{"path": "a"}], "execution": {"trainer": "colocated", "max_tokens": 16_384}}
    with pytest.raises(SpecError) as raised:
        parse_spec(document | fields).check_longest()
    assert words in str(raised.value)
    assert load_spec_json(json.dumps(document | fields)).execution.max_tokens == 16_384
    parse_spec(document | {"text": {"max_tokens": 16_384}}).check_longest()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_btach": 8}, "global_btach: there is no such field, got 8; did you mean global_batch?"),
        ({"image": {"max_pixel": 3}}, "image.max_pixel: there is no such field, got 3; did you mean max_pixels?"),
        ({"execution": {"units": {"llm": {"frosen": 1}}}}, "llm.frosen: there is no such field, got 1; did you mean frozen?"),
        ({"curriculum": 8}, "curriculum: there is no such field, got 8"),
    ],
)
def test_of_a_misspelt_field_the_one_that_is_meant_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({"name": "demo", "sources": [{"path": "/d"}], "global_batch": 8} | change)
    assert str(caught.value).endswith(words)


def test_further_errors_are_counted() -> None:
    with pytest.raises(SpecError, match=r"\(and 1 more\)"):
        parse_spec({**MINIMAL, "seed": -1, "steps": 0})


@pytest.mark.parametrize("document", [None, [], "text", 7])
def test_what_is_no_mapping_is_no_spec(document: object) -> None:
    with pytest.raises(SpecError, match="mapping of fields"):
        parse_spec(document)


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"absent\.yaml"):
        load_spec_yaml(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\nb: 2")
    with pytest.raises(SpecError, match="not valid YAML") as caught:
        load_spec_yaml(broken)
    assert "\n" not in str(caught.value)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="cannot read"):
        load_spec_yaml(broken)
    with pytest.raises(SpecError):
        load_spec_json("{")


def test_specs_cannot_be_changed() -> None:
    spec = parse_spec(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        spec.seed = 1  # type: ignore[misc]
    assert isinstance(spec, JobSpec)


def test_every_strategy_that_is_named_exists() -> None:
    from headrace.reorder_service.planning.strategies import STRATEGIES as IMPLEMENTED

    assert set(STRATEGIES) == set(IMPLEMENTED)


@pytest.mark.parametrize("change", [{}, {"seed": 7, "topology": {"replicas": 3, "microbatches": 2}}])
def test_a_peer_is_told_no_field_that_nobody_uses(change: dict[str, Any]) -> None:
    """It may be of the release before, which knows no new field."""
    spec = parse_spec({"name": "j", "sources": [{"path": "/d"}]} | change)
    said = json.loads(spec.to_peer_json())
    assert said.keys() == {"name", "sources", *change}
    assert load_spec_json(spec.to_peer_json()) == spec
