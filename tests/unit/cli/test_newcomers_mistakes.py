"""What a newcomer gets wrong: each answer is one sentence that names the thing and the remedy, with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says on standard error, which is one line."""
    try:
        code: object = main(list(arguments))
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1), said
    return said


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], "there is no 'trian'; did you mean train? `headrace --help` says more"),
        (["job", "sumbit", "job.yaml"], "there is no 'sumbit'; did you mean submit? `headrace job --help` says more"),
        (
            ["job", "submit", "job.yaml", "--endpont", "127.0.0.1:1"],
            "headrace job submit: unrecognized arguments: --endpont 127.0.0.1:1; did you mean --endpoint? "
            "`headrace job submit --help` says more",
        ),
        (
            ["plan", "costs.jsonl", "--nothing-like-it=3"],
            "headrace plan: unrecognized arguments: --nothing-like-it=3; `headrace plan",
        ),
        (["nonsense"], "invalid choice: 'nonsense' (choose from "),
    ],
)
def test_a_misspelt_command_or_option(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert sentence in answer(capsys, *arguments)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "job.yaml: a job spec is a mapping of fields, lines such as `field: value`; got nothing"),
        ("first", "job.yaml: a job spec is a mapping of fields, lines such as `field: value`; got only 'first'"),
        ("- name: first", "job.yaml: a job spec is a mapping of fields, lines such as `field: value`; got a list"),
        ("name: a\nsources: [{path: .}]\nglobal_bach: 4", "job.yaml: global_bach: there is no such field, got 4; did you mean"),
        ("name: a\nsources: [{path: .}]\nglobal_batch: -4", "job.yaml: global_batch: must be greater than or equal to 1, got -4"),
    ],
)
def test_a_wrong_job_spec_is_named(here: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str) -> None:
    (here / "job.yaml").write_text(text)
    assert sentence in answer(capsys, "inspect", "--spec", "job.yaml")


def test_a_pattern_that_matches_no_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys, "inspect", f"{here}/*.tar")
    assert f"no file matches {here}/*.tar; mend the pattern, or name the folder" in said


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("127.0.0.1", ": it has no port"),
        ("127.0.0.1:70700", ": ports are 0 to 65535"),
        ("http://127.0.0.1:7070/", ": leave out http:// and what follows the port"),
    ],
)
@pytest.mark.parametrize("command", [["reorder", "--listen"], ["job", "list", "--endpoint"], ["preprocessor", "--endpoint"]])
def test_an_address_that_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str], endpoint: str, why: str
) -> None:
    for name in ("HEADRACE_CLUSTER_TOKEN", "HEADRACE_CLUSTER_TOKEN_FILE", "HEADRACE_TLS"):
        monkeypatch.delenv(name, raising=False)
    said = answer(capsys, *command, endpoint)
    assert f"endpoint '{endpoint}' is not HOST:PORT, for example 127.0.0.1:7070{why}" in said


@pytest.mark.parametrize("option", ["--threads", "--budget-mib", "--decode-mib", "--cache-gib"])
def test_an_amount_that_is_none(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert f"headrace preprocessor: {option} must be at least 1, got -1" in answer(capsys, "preprocessor", option, "-1")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one' in the environment, and must be a whole number from 0 on"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1' in the environment, and must be a whole number from 0 on"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment, and must be a whole number from 1 on"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0' in the environment, and must be a whole number from 1 on"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 in the environment, but WORLD_SIZE says that there are 2: ranks count"),
        ({"RANK": "1"}, "RANK is 1 in the environment, but WORLD_SIZE says that there is 1: ranks count from 0"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 in the environment, but RANK is not set: each process needs its own, 0 to 1"),
        ({"RANK": " ", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2 in the environment, but RANK is not set: each process needs its own"),
    ],
)
def test_a_rank_that_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = answer(capsys, "train", "--job", "x", "--endpoint", "127.0.0.1:1")
    assert f"headrace train: {sentence}" in said
    assert "torchrun" in said


def test_commands_that_have_no_ranks_do_not_mind_the_variables_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert main(["experiment", "--list"]) == 0


@pytest.mark.parametrize("name", ["", "a/b", "a" * 300, "prüfung", "-begins-otherwise", "two words", "line\nend"])
def test_a_name_that_no_job_can_have(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (here / "job.yaml").write_text(json.dumps({"name": name, "sources": [{"path": "."}]}))
    said = answer(capsys, "inspect", "--spec", "job.yaml")
    assert "job.yaml: name: must be at most 63 letters, digits, '.', '_' or '-', beginning with a letter or digit, got" in said


def test_a_name_may_have_capitals(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job.yaml").write_text("name: My-Job_1.a\nsources: [{path: nowhere}]\n")
    assert "nowhere" in answer(capsys, "inspect", "--spec", "job.yaml"), "the name is taken: what is wrong is the path"
