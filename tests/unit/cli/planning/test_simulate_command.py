"""`headrace simulate`: the table of all strategies, and what it writes beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from headrace.cli.main import main
from headrace.reorder_service.planning import STRATEGIES

COSTS = Path(__file__).parents[3] / "data" / "costs"
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
    report = simulate(folder, capsys, "--batch", "48", "--microbatches", "4", "--num-stages", "4")
    rows = {row["strategy"]: row for row in report["strategies"]}
    assert list(rows) == list(STRATEGIES)
    assert (report["samples"], sum(report["stages"].values())) == (48, 4)
    for name, row in rows.items():
        assert row["speedup"] == pytest.approx(rows["random"]["iteration_s"] / row["iteration_s"])
        assert row["over_bound"] == pytest.approx(row["iteration_s"] / row["lower_bound_s"])
        assert row["over_bound"] >= 1
        assert 0 <= row["bubble"] < 1
        assert set(row["spread"]) == {"encoder", "llm"}
        assert min(row["peak_memory"], row["planning_s"]) > 0
        assert matplotlib.image.imread(row["picture"]).shape[1] > 1000
        drawn = row.get("chosen", name)
        assert json.loads(Path(row["trace"]).read_text())["otherData"]["strategy"] == drawn
        assert (Path(row["picture"]).name, Path(row["trace"]).name) == (f"timeline-{drawn}.png", f"trace-{drawn}.json")
        assert (row["fits"], 0 < row["filled"] <= 8) == (True, True)
    assert not (folder / "timeline-auto.png").exists(), "it would be the picture of the strategy that it took"
    assert (rows["random"]["deferred"], rows["random"]["moved"], rows["random"]["filled"]) == (0, 0, 8)
    assert rows["orchmllm"]["moved"] > 0
    assert [name for name, row in rows.items() if "chosen" in row] == ["auto"]
    assert rows["auto"]["chosen"] in rows
    assert rows["auto"]["iteration_s"] == min(row["iteration_s"] for row in rows.values())


def test_what_is_over_the_memory_limit_is_marked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = simulate(folder, capsys, "--no-pictures")["strategies"]
    peaks = sorted(row["peak_memory"] for row in free)
    middle = (peaks[0] + peaks[-1]) / 2
    report = simulate(folder, capsys, "--no-pictures", "--memory-limit", str(middle), "--strategies", "random,disttrain,entrain")
    assert report["memory_limit"] == middle
    assert all(row["fits"] and row["peak_memory"] <= middle for row in report["strategies"]), "the limit makes other plans"
    assert main(["simulate", HARD, *SMALL, "--no-pictures", "--memory-limit", "0.001"]) == 0
    out, err = capsys.readouterr()
    assert out.count(", over the limit") == len(STRATEGIES)
    assert err.startswith("nothing fits into --memory-limit 0.001: the fullest stage needs ")
    assert err.count("\n") == 1


def test_the_report_says_how_it_was_made_and_can_do_without_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--no-pictures", "--strategies", "disttrain", "--seed", "3", "--schedule", "gpipe"]
    report = simulate(tmp_path / "none", capsys, *options)
    assert {key: value for key, value in report.items() if key != "strategies"} == {
        "samples": 128,
        "replicas": 2,
        "microbatches": 8,
        "stages": {"encoder": 3, "llm": 5},
        "schedule": "gpipe",
        "seed": 3,
    }
    assert not any("picture" in row or "trace" in row for row in report["strategies"])
    assert not (tmp_path / "none").exists()


def test_units_with_replicas_of_their_own_are_simulated_drawn_and_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--batch", "48", "--microbatches", "4", "--strategies", "joint", "--encoder-stages", "1", "--llm-stages", "3"]
    seconds = {}
    for dp, drawn in ((1, ["--no-pictures"]), (3, [])):
        report = simulate(tmp_path, capsys, *options, "--dp", f"encoder={dp}", *drawn)
        assert report["dp"] == {"encoder": dp}
        (joint,) = (row for row in report["strategies"] if row["strategy"] == "joint")
        seconds[dp] = joint["iteration_s"]
    assert seconds[1] > 2 * seconds[3], "the encoder is what takes longest here"
    trace = json.loads(Path(joint["trace"]).read_text())
    taken = {(event["pid"], event["args"]["unit"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    assert taken == {(0, "encoder"), (1, "encoder"), (2, "encoder"), (0, "llm"), (1, "llm")}


def test_packs_are_named_where_they_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "short.jsonl"
    row = {"cost_encoder": 1, "cost_llm": 1, "tokens": 45}
    table.write_text("".join(json.dumps({"sample_id": i, **row}) + "\n" for i in range(12)))
    options = ["--pack-tokens", "100", "--replicas", "2", "--microbatches", "8"]
    assert main(["simulate", str(table), *options, "--no-pictures", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(out)[name] for name in ("samples", "packs", "pack_fill")] == [12, 6, 0.9]
    assert err.startswith("6 packs cannot fill 16 microbatches: some stay empty; ")
    assert main(["plan", str(table), *options]) == 0
    out = capsys.readouterr().out
    assert "12 samples in 6 packs (90% full)" in out
    assert "of 6 packs" in out


@pytest.mark.parametrize("columns", ["20", "200"])
def test_a_narrow_terminal_cuts_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["simulate", HARD, *SMALL, "--no-pictures", "--strategies", "disttrain"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    [row] = [line.split() for line in out.splitlines() if line.startswith("random")]
    assert len(row) == 13, "eleven cells, one of three words"


def test_random_is_always_there_to_compare_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = simulate(folder, capsys, "--no-pictures", "--strategies", "disttrain", "--schedule", "gpipe")
    assert [row["strategy"] for row in report["strategies"]] == ["random", "disttrain"]


def test_a_strategy_whose_plan_cannot_run_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--strategies", "disttrain,entrain", "--schedule", "eager", "--in-flight", "1", "--whole-backward"]
    assert main(["simulate", HARD, *SMALL, "--format", "json", "--no-pictures", *options]) == 0
    out, err = capsys.readouterr()
    assert [row["strategy"] for row in json.loads(out)["strategies"]] == ["random", "disttrain"]
    assert err.startswith("entrain is left out: the plan makes schedule 'eager' wait for itself")


def test_eager_goes_as_deep_as_the_memory_limit_allows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--no-pictures", "--schedule", "eager", "--strategies", "disttrain,entrain,joint"]
    peaks, seconds = [], []
    for limit in ("3", "6"):
        rows = simulate(folder, capsys, *options, "--memory-limit", limit)["strategies"]
        assert all(row["fits"] for row in rows)
        peaks.append([row["peak_memory"] for row in rows])
        seconds.append([row["iteration_s"] for row in rows])
    assert all(tight < wide for tight, wide in zip(*peaks, strict=True))
    assert all(tight > wide for tight, wide in zip(*seconds, strict=True))


def test_the_threshold_of_entrain_can_be_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--no-pictures", "--strategies", "disttrain,entrain"]
    few, half = (simulate(folder, capsys, *options, "--coarse-quantile", quantile)["strategies"] for quantile in ("0.9", "0.5"))
    assert [row["iteration_s"] for row in few][:2] == [row["iteration_s"] for row in half][:2]
    assert few[2]["iteration_s"] != half[2]["iteration_s"]


def test_the_table_says_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--batch", "32", "--replicas", "2", "--microbatches", "4"]
    assert main(["simulate", HARD, *small, "--strategies", "random, disttrain", "--out", str(folder)]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert "32 samples; stages: encoder 3, llm 5" in out
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
                "--no-pictures",
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


def test_what_is_asked_of_orchmllm_reaches_its_plans_and_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    omni = str(COSTS / "omni_2048.parquet")

    def rows(*options: str) -> dict[str, Any]:
        strategies = ["--strategies", "disttrain,orchmllm", "--replicas", "16", "--microbatches", "1", "--num-stages", "3"]
        assert main(["simulate", omni, "--batch", "512", *strategies, "--no-pictures", "--format", "json", *options]) == 0
        return {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["strategies"]}

    plain, on_nodes, padded = rows(), rows("--orchmllm", "ranks-per-node=4"), rows("--orchmllm", "vision=padded,lambda=0.5")
    assert "heaviest_between_nodes" not in plain["orchmllm"]
    assert on_nodes["disttrain"]["heaviest_between_nodes"] == {"vision": 0, "audio": 0}, "no sample changes its replica"
    assert min(on_nodes["orchmllm"]["heaviest_between_nodes"].values()) > 0
    for name, row in plain.items():
        assert on_nodes[name]["spread"] == pytest.approx(row["spread"]), "nodes change nothing about the batches"
        assert (padded[name]["spread"]["vision"] == pytest.approx(row["spread"]["vision"])) == (name != "orchmllm")
        assert padded[name]["spread"]["audio"] == pytest.approx(row["spread"]["audio"])


def test_uneven_stages_and_exchanges_of_weights_and_gradients_lengthen_the_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = ["--stages", "encoder=4,llm=2", "--strategies", "random", "--no-pictures"]

    def step_s(*options: str) -> float:
        return float(simulate(folder, capsys, *of, *options)["strategies"][0]["iteration_s"])

    plain = step_s()
    assert step_s("--stage-loads", "llm=1:1") == pytest.approx(plain)
    assert step_s("--stage-loads", "llm=1:3") > 1.2 * plain
    assert step_s("--exchange", "encoder=0:7.5,llm=0:0") == pytest.approx(plain + 7.5), "its backward ends the step"
    assert step_s("--exchange", "llm=2.5:0") <= plain + 2.5


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--stage-loads", "llm=1:2:3", "--stage-loads gives 'llm' 3 times, but it has 5 stages"),
        ("--stage-loads", "llm=0:0:0:0:0", "--stage-loads gives 'llm' no time at all"),
        ("--exchange", "llm=1", "--exchange gives 'llm' 1 times, and takes two: before and after its microbatches"),
        ("--exchange", "llm=1:-2", "--exchange must look like llm=1:1.5 with times of at least 0, got 'llm=1:-2'"),
        ("--exchange", "llm", "--exchange must look like llm=1:1.5 with times of at least 0, got 'llm'"),
        ("--exchange", "=1:1", "--exchange must look like llm=1:1.5 with times of at least 0, got '=1:1'"),
        ("--exchange", "llm=1:1,llm=2:2", "--exchange names 'llm' twice"),
        ("--exchange", "vision=1:1", "--exchange names 'vision', which is no unit of the pipeline (encoder, llm)"),
    ],
)
def test_times_of_stages_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str, sentence: str
) -> None:
    assert main(["simulate", HARD, *SMALL, "--stages", "encoder=3,llm=5", option, value]) == 2
    assert sentence in capsys.readouterr().err


def test_times_of_stages_need_stages_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", HARD, *SMALL, "--stage-loads", "llm=1:2:1:1:1"]) == 2
    assert "--stage-loads needs to know the stages: give them by unit, with --stages" in capsys.readouterr().err
