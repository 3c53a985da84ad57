"""The options that say what is read and how: a job's settings, single ones, and what they refuse before anything is read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.costs.reading_options import USUAL_PIXELS, add_reading_arguments, changed_mapping, reading_spec
from headrace.cli.demo import demo
from headrace.cli.main import _parse, main
from headrace.errors import UserError
from headrace.mapping import MAPPING_PRESETS, MappingSpec
from headrace.source_spec import SourceSpec
from headrace.spec import JobSpec

JOB: dict[str, Any] = {
    "name": "films",
    "sources": [
        {"path": "/data/films", "weight": 2, "mapping": {"text": "title", "ignore": ["mp4"]}},
        {"path": "/data/talk", "name": "speech", "weight": 1},
    ],
    "global_batch": 512,
    "image": {"patch": 16, "max_pixels": 50_000},
    "audio": {"mel_bins": 80},
    "text": {"template": "llama3", "max_tokens": 999},
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


def spec_of(*options: str) -> JobSpec:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", nargs="?")
    add_reading_arguments(parser)
    args = parser.parse_args(options)
    return reading_spec(args, {"name": "tried", "global_batch": 8}, {"path": args.path})


def test_of_a_job_the_sources_and_what_a_sample_becomes_are_taken(job: Path) -> None:
    spec = spec_of("--spec", str(job))
    assert [(source.name, source.weight) for source in spec.sources] == [("films", 2), ("speech", 1)]
    assert spec.sources[0].mapping == MappingSpec(text="title", ignore=("mp4",))
    assert (spec.image.patch, spec.image.max_pixels, spec.audio.mel_bins) == (16, 50_000, 80)
    assert (spec.text.template, spec.text.max_tokens) == ("llama3", 999)
    assert (spec.name, spec.global_batch) == ("tried", 8), "the rest is the command's"


def test_the_path_chooses_a_source_of_the_job(job: Path) -> None:
    assert [source.name for source in spec_of("--spec", str(job), "speech").sources] == ["speech"]


def test_single_options_change_the_job(job: Path) -> None:
    options = ["--template", "chatml", "--max-pixels", "60000", "--mapping", "images=jpg"]
    spec = spec_of("--spec", str(job), *options)
    assert (spec.text.template, spec.text.max_tokens, spec.image.max_pixels) == ("chatml", 999, 60_000)
    assert [source.mapping for source in spec.sources] == [
        MappingSpec(text="title", images="jpg", ignore=("mp4",)),
        MappingSpec(images="jpg"),
    ]


def test_the_demo_runs_a_jobs_sources_and_sections_and_keeps_its_own_small_pictures_else(job: Path) -> None:
    spec = demo._spec(_parse(["demo", "--spec", str(job), "--global-batch", "4"]))
    assert (spec.name, spec.global_batch, spec.image.max_pixels, spec.text.template) == ("demo", 4, 50_000, "llama3")
    assert [source.weight for source in spec.sources] == [2, 1]
    assert demo._spec(_parse(["demo", "/data/films"])).image.max_pixels == demo.MAX_PIXELS
    assert demo._spec(_parse(["demo", "/data/films", "--max-pixels", "90000"])).image.max_pixels == 90_000
    [source] = demo._spec(_parse(["demo", "--mapping", "text=txt"])).sources
    assert (source.name, source.mapping.text) == ("data", "txt")


def test_the_split_is_the_sources(job: Path) -> None:
    assert [source.split for source in spec_of("--spec", str(job), "--split", "validation").sources] == ["validation"] * 2
    assert spec_of("/data/films").sources[0].split is None


def test_a_split_of_a_folder_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in (("train-0.jsonl", 1), ("train-1.jsonl", 2), ("validation-0.jsonl", 4)):
        (tmp_path / name).write_text('{"caption": "A film."}\n' * rows)
    found = {}
    for split in (["train"], ["validation"], ["all"], []):
        options = [option for name in split for option in ("--split", name)]
        assert main(["inspect", str(tmp_path), "--out", str(tmp_path / "out"), "--format", "json", *options]) == 0
        found["".join(split)] = json.loads(capsys.readouterr().out)["samples"]
    assert found == {"train": 3, "validation": 4, "all": 7, "": 3}


def test_without_a_job_the_path_is_read_with_the_usual_settings() -> None:
    spec = spec_of("/data/films")
    assert (spec.sources, spec.text, spec.image) == (
        (SourceSpec(path="/data/films"),),
        JobSpec.model_fields["text"].default,
        JobSpec.model_fields["image"].default,
    )
    assert spec_of("/data/films", "--tokenizer", "t.json").text.tokenizer == "t.json"


@pytest.mark.parametrize(
    ("options", "mapping"),
    [
        (["text=transcript", "images=jpg"], MappingSpec(text="transcript", images="jpg")),
        (["ignore=mp4,seg.png"], MappingSpec(ignore=("mp4", "seg.png"))),
        (["ignore=mp4", "ignore=<video>"], MappingSpec(ignore=("mp4", "<video>"))),
        (["user_roles=human, customer"], MappingSpec(user_roles=("human", "customer"))),
        (["image_placeholder=<a=b,c>"], MappingSpec(image_placeholder="<a=b,c>")),
        (["llava"], MAPPING_PRESETS["llava"]),
        (["llava", "images=jpg"], MappingSpec(text="conversations", images="jpg")),
    ],
)
def test_a_mapping_is_given_field_by_field_or_as_a_preset(options: list[str], mapping: MappingSpec) -> None:
    assert MappingSpec(**changed_mapping({}, options)) == mapping


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["lava"], "there is no such preset, only auto, caption, cauldron, llava, messages; a single field is KEY=NAME"),
        (["txt=caption"], "a mapping has no 'txt'; it has text, "),
        (["text="], "names nothing; write text=NAME"),
        (["text=a", "text=b"], "gives text twice: a and b; it takes one"),
        (["images=jpg", "llava"], "put the preset in front"),
    ],
)
def test_a_mapping_that_there_is_not_is_one_sentence_with_what_there_is(options: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        changed_mapping({}, options)
    assert sentence in str(error.value)


@pytest.mark.parametrize("command", [["inspect"], ["demo"], ["compare"], ["bench", "preprocess"]])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["job.yaml"], "job.yaml is a job spec, not a data set: give it as --spec "),
        (["--spec", "job.yaml", "cinema"], "has no source 'cinema'"),
        (["--spec", "nowhere.yaml"], "cannot read the job spec nowhere.yaml"),
        (["--spec", "wrong.yaml"], "sources.0.mapping.txt: there is no such field"),
        ([".", "--mapping", "txt=caption"], "a mapping has no 'txt'; it has text, "),
        ([".", "--template", "alpaca"], "text.template: "),
        ([".", "--max-pixels", "9"], "max_pixels (9) is below"),
    ],
)
def test_all_four_commands_refuse_before_they_read(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    options: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(job.parent)
    wrong = {**JOB, "sources": [{"path": ".", "mapping": {"txt": "caption"}}]}
    Path("wrong.yaml").write_text(yaml.safe_dump(wrong))
    assert main([*command, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headrace {command[0]}: ")
    assert (err.count("\n"), sentence in err) == (1, True), err


@pytest.mark.parametrize("command", ["inspect", "compare"])
def test_without_a_path_or_a_job_both_are_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    assert "name a data set, PATH, or a job that says what to read, --spec JOB.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "demo", "compare", "bench preprocess"])
def test_the_help_fits_into_a_hundred_columns_and_has_an_example_of_each_way(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert JobSpec.model_fields["image"].default.max_pixels == USUAL_PIXELS
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        _parse([*command.split(), "--help"])
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if len(line) > 100] == []
    assert f"headrace {command} --spec job.yaml" in told
    assert f"headrace {command} /data/" in told
    assert "--mapping " in told.partition("examples:")[2]
