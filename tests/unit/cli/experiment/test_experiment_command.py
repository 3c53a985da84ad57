"""`headrace experiment`: every experiment by name, and whether what it claims of the published rows holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.cli.experiment.experiments import EXPERIMENTS
from headrace.cli.experiment.findings import Findings, Row
from headrace.cli.main import main

LONG = {"optimus-table3", "optimus-table6", "optimus-table7", "orchmllm-fig8", "orchmllm-table2", "oobleck-table2.2"}
"""Those that take seconds."""
QUICK = [name for name in EXPERIMENTS if name not in LONG]


def report_of(capsys: pytest.CaptureFixture[str], name: str) -> dict[str, Any]:
    assert main(["experiment", name, "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def check(name: str, report: dict[str, Any]) -> None:
    """What every experiment's report says of itself, and that its claims hold; times of this machine are not judged here."""
    assert (report["experiment"], report["source"]) == (name, EXPERIMENTS[name].source)
    assert report["simulated"] == (report["kind"] == "SIMULATED")
    assert report["rows"]
    assert any(row["published"] is not None for row in report["rows"])
    assert all(note.endswith(".") for note in report["notes"]), "sentences"
    if report["kind"] != "MEASURED":
        assert [row for row in report["rows"] if row["agrees"] is False] == []


@pytest.mark.parametrize("name", QUICK)
def test_an_experiment_stands_beside_its_published_rows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, report_of(capsys, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LONG))
def test_a_long_experiment_stands_beside_its_published_rows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, report_of(capsys, name))


def test_the_table_says_that_it_is_simulated_and_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "disttrain-fig17"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SIMULATED: ")
    assert out.count("1.3 to 2.7") == 6
    words = " ".join(out.split())
    assert "(DistTrain, figure 17)" in words
    assert "MLLM-72B, over Megatron-LM: throughput 1 x; encoder 1x8x1, llm 1x8x10" in words
    assert "Times are counted operations" in words


def test_the_list_teaches_all_names_and_so_does_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)
    assert main(["experiment", "--list", "--format", "json"]) == 0
    assert [one["experiment"] for one in json.loads(capsys.readouterr().out)] == list(EXPERIMENTS)
    with pytest.raises(SystemExit):
        main(["experiment", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in EXPERIMENTS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["disttrain-fig71"], "no experiment 'disttrain-fig71'; there are disttrain-fig15, "),
        ([], "name an experiment; there are disttrain-fig15, "),
        (["--list", "optimus-table5"], "--list names all experiments, so it does not go with 'optimus-table5'"),
    ],
)
def test_what_is_no_experiment_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headrace experiment: {words}")
    assert err.count("\n") == 1


def test_a_claim_is_about_the_ends_of_a_range_and_about_equal_words() -> None:
    in_range = Row(name="", ours=1.5, published=(1.3, 2.7), within=0.0)
    assert (in_range.agrees, Row(name="", ours=1.2, published=(1.3, 2.7), within=0.1).agrees) == (True, True)
    assert Row(name="", ours=3.0, published=(1.3, 2.7), within=0.1).agrees is False
    assert Row(name="", ours="4:4", published="3:5", within=0.0).agrees is False
    assert Row(name="", ours=9.0, published=1.0).agrees is None
    assert not Findings(what="", rows=(Row(name="", ours=2.0, published=1.0, within=0.1),)).agrees
    for wrong in ({"published": None}, {"published": "words"}, {"published": 1.0, "within": -0.1}):
        with pytest.raises(ValueError, match=r"claim|words"):
            Row(**{"name": "", "ours": 1.0, "within": 0.1, **wrong})  # type: ignore[arg-type]
