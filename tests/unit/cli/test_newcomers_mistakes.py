"""What a newcomer gets wrong: each answer is one sentence that names the thing and the remedy, with exit code 2."""

from __future__ import annotations

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
