"""`headrace simulate`: the table of all strategies, and what it writes beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from cli.main import main
from reorder_service.planning import STRATEGIES

COSTS = Path(__file__).parents[2] / "data" / "costs"
HARD = str(COSTS / "synthchart_512.parquet")
SMALL = ["--batch", "128", "--replicas", "2", "--microbatches", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulate")


def simulate(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["simulate", HARD, *SMALL, "--format", "json", "--out", str(folder), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def test_every_strategy_is_measured_drawn_and_traced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = simulate(folder, capsys)
    rows = {row["strategy"]: row for row in report["strategies"]}
    assert list(rows) == list(STRATEGIES)
    assert (report["samples"], report["stages"]) == (128, {"encoder": 3, "llm": 5})
    for name, row in rows.items():
        assert row["speedup"] == pytest.approx(rows["random"]["iteration_s"] / row["iteration_s"])
        assert row["over_bound"] == pytest.approx(row["iteration_s"] / row["lower_bound_s"])
        assert row["over_bound"] >= 1
        assert 0 <= row["bubble"] < 1
        assert set(row["spread"]) == {"encoder", "llm"}
        assert min(row["peak_memory"], row["planning_s"]) > 0
        assert matplotlib.image.imread(row["picture"]).shape[1] > 1000
        assert json.loads(Path(row["trace"]).read_text())["otherData"]["strategy"] == name
        assert (Path(row["picture"]).name, Path(row["trace"]).name) == (f"timeline-{name}.png", f"trace-{name}.json")
    assert rows["random"]["deferred"] == 0
    assert rows["auto"]["chosen"] in rows
    assert rows["auto"]["iteration_s"] == min(row["iteration_s"] for row in rows.values())


def test_random_is_always_there_to_compare_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = simulate(folder, capsys, "--strategies", "disttrain", "--schedule", "gpipe")
    assert [row["strategy"] for row in report["strategies"]] == ["random", "disttrain"]


def test_a_strategy_whose_plan_cannot_run_is_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--strategies", "disttrain,entrain", "--schedule", "eager", "--in-flight", "1", "--whole-backward"]
    assert main(["simulate", HARD, *SMALL, "--format", "json", "--out", str(folder), *options]) == 0
    out, err = capsys.readouterr()
    assert [row["strategy"] for row in json.loads(out)["strategies"]] == ["random", "disttrain"]
    assert err.startswith("entrain is left out: the plan makes schedule 'eager' wait for itself")


def test_the_table_says_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", HARD, *SMALL, "--strategies", "random, disttrain", "--out", str(folder)]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert "128 samples; stages: encoder 3, llm 5" in out
    assert [line[0] for line in lines if line and line[0] in STRATEGIES] == ["random", "disttrain"]
    assert str(folder) in out
    assert err == ""


def test_a_batch_that_costs_nothing_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "free.jsonl"
    table.write_text("".join(json.dumps({"sample_id": i, "cost_encoder": 0, "cost_llm": 0}) + "\n" for i in range(5)))
    assert (
        main(
            [
                "simulate",
                str(table),
                "--format",
                "json",
                "--out",
                str(tmp_path),
                "--microbatches",
                "2",
                "--strategies",
                "disttrain",
            ]
        )
        == 0
    )
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert {(row["iteration_s"], row["speedup"], row["over_bound"]) for row in rows} == {(0.0, 1.0, 1.0)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--strategies", "disttrain,magic"], "no strategy 'magic'"),
        (["--strategies", ""], "no strategy ''"),
        (["--replicas", "0"], "--replicas must be at least 1"),
        (["--out", f"{HARD}/out"], "cannot write to"),
    ],
)
def test_what_the_user_can_fix_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert main(["simulate", HARD, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace simulate: ")
    assert (err.count("\n"), sentence in err) == (1, True)
