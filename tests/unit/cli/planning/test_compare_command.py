"""`headrace compare` and `headrace inspect --costs`: from a real data set to what planning gains on it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from headrace.cli.costs.cost_table import read_cost_table
from headrace.cli.main import main
from headrace.cli.planning.gain import best_of, measure
from headrace.cli.planning.problem import Problem
from headrace.plan import Topology
from headrace.reorder_service.planning import STRATEGIES
from headrace.reorder_service.planning.batch import make_batch

EXAMPLE = str(Path(__file__).parents[4] / "examples" / "data")
HARD = str(Path(__file__).parents[3] / "data" / "costs" / "synthchart_512.parquet")


def compare(capsys: pytest.CaptureFixture[str], out: Path, *options: str) -> dict[str, Any]:
    assert main(["compare", *options, "--format", "json", "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def test_a_data_set_is_compared_from_its_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = compare(capsys, tmp_path, EXAMPLE, "--limit", "64", "--replicas", "2", "--num-stages", "4")
    assert (report["batches"], report["global_batch"]) == (1, 64)
    assert sum(report["topology"]["stages"].values()) == 4
    assert report["topology"]["microbatches"] == 8, "four samples in each"
    rows = {row["strategy"]: row for row in report["strategies"]}
    assert list(rows) == list(STRATEGIES)
    assert rows["random"]["speedup"] == 1
    assert rows[report["best"]]["speedup"] == max(row["speedup"] for row in rows.values()) > 1
    assert matplotlib.image.imread(report["picture"]).shape[1] > 1000


def test_a_job_is_compared_as_it_reads_its_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    sources = [{"path": EXAMPLE, "name": "example"}, {"path": "/no/such/folder"}]
    job.write_text(yaml.safe_dump({"name": "two", "sources": sources, "text": {"max_tokens": 60}}))
    report = compare(capsys, tmp_path, "example", "--spec", str(job), "--limit", "64", "--replicas", "1", "--num-stages", "2")
    assert report["dataset"] == f"example of {job}"
    assert 0 < report["global_batch"] < 64, "longer samples are refused"


def test_a_cost_table_gives_means_over_its_global_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--limit", "100", "--global-batch", "40", "--replicas", "1", "--microbatches", "4", "--num-stages", "2"]
    report = compare(capsys, tmp_path, HARD, *options)
    assert (report["batches"], report["global_batch"]) == (2, 40), "the 20 that are left make no whole batch"
    assert all("fits" not in row for row in report["strategies"]), "no limit of memory is asked for"
    again = compare(capsys, tmp_path, HARD, *options)
    for row in (*report["strategies"], *again["strategies"]):
        del row["planning_s"]
    assert report == again, "shuffled by the seed"


def test_a_table_on_standard_input_is_spread_evenly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(json.dumps({"sample_id": i, "cost_llm": float(i >= 90)}) + "\n" for i in range(100))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(rows.encode())))
    options = ["--limit", "10", "--replicas", "1", "--microbatches", "1", "--num-stages", "1"]
    report = compare(capsys, tmp_path, "-", *options)
    assert (report["samples"], report["used"]) == (100, 10)
    assert report["strategies"][0]["iteration_s"] == 3.0, "one of the ten last rows, forward and backward"


def test_what_is_dropped_and_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--replicas", "1", "--microbatches", "4", "--num-stages", "2"]
    options = ["--limit", "100", "--global-batch", "40", *shape, "--out", str(tmp_path)]
    assert main(["compare", HARD, *options, "--memory-limit", "0.001"]) == 0
    out, err = capsys.readouterr()
    assert "80 of 512 samples used" in out
    assert out.count(", over the limit") == len(STRATEGIES)
    assert err.startswith("nothing fits into --memory-limit 0.001: ")
    report = compare(capsys, tmp_path, HARD, *options, "--memory-limit", "1000")
    assert all(row["fits"] and row["peak_memory"] <= 1000 for row in report["strategies"])
    assert [row["strategy"] for row in report["strategies"] if "chosen" in row] == ["auto"]


def test_the_batch_whose_gain_is_nearest_to_the_mean_is_the_typical_one() -> None:
    topology = Topology(replicas=2, microbatches=1, stages={"llm": 1})
    columns = ([1.0, 1, 1, 1], [9.0, 1, 9, 1], [3.0, 2, 3, 2])  # dealt in order, the replicas have 2 2, 18 2 and 6 4
    batches = [make_batch(np.arange(4), {"llm": np.array(column)}, topology, 0) for column in columns]
    problems = [Problem(samples=batch, batch=batch, packs=None) for batch in batches]
    dealt, balanced = measure("random", problems), measure("disttrain", problems)
    assert balanced.speedups_over(dealt) == pytest.approx([1.0, 1.8, 1.2])
    assert balanced.speedup_over(dealt) == pytest.approx((2 + 18 + 6) / (2 + 10 + 5))
    assert balanced.typical_batch(dealt) == 1
    assert best_of([dealt, balanced]) is balanced


def test_the_table_ends_in_plain_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", EXAMPLE, "--limit", "64", "--replicas", "2", "--num-stages", "3", "--out", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    words = " ".join(out.split())
    assert "100 GPU hours become" in words
    assert "Simulated, not measured, with the operations of model 7b. With " in words
    assert "what takes 100 GPU hours in shuffled order takes" in words
    assert err.startswith("read 64 samples, ")


def test_where_nothing_can_be_gained_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "one.jsonl"
    table.write_text('{"sample_id": 4, "cost_encoder": 1, "cost_llm": 1}\n')
    assert main(["compare", str(table), "--replicas", "1", "--num-stages", "2", "--out", str(tmp_path)]) == 0
    assert "Planning gains less than 1 % here" in " ".join(capsys.readouterr().out.split())


def test_a_table_that_costs_nothing_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "free.jsonl"
    table.write_text("".join(json.dumps({"sample_id": i, "cost_llm": 0}) + "\n" for i in range(9)))
    assert main(["compare", str(table), "--replicas", "1", "--num-stages", "1", "--out", str(tmp_path)]) == 0
    assert "All costs are zero" in " ".join(capsys.readouterr().out.split())


def test_the_cost_table_of_a_data_set_has_a_row_for_each_good_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.parquet"
    options = ["--costs", str(path), "--units", "llm,audio,vision", "--out", str(tmp_path), "--format", "json"]
    assert main(["inspect", EXAMPLE, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["costs"] == str(path)
    table = read_cost_table(str(path))
    assert table.units == ("audio", "vision", "llm"), "encoders as asked for, the LLM last"
    assert table.tokens is not None
    assert (len(table.sample_ids), int(table.tokens.sum())) == (report["samples"], report["tokens"])
    assert (table.costs["llm"] > 0).all()
    assert (table.costs["vision"] > 0).sum() == report["modalities"]["image"]
    assert (table.costs["audio"] > 0).sum() == report["modalities"]["audio"]
    assert table.memory is not None
    assert table.transfer_bytes is not None
    names = pq.read_table(path)["name"].to_pylist()
    assert len(set(names)) == len(names)
    assert all(name.startswith("data/") for name in names)
    assert main(["plan", str(path), "--format", "json", "--num-stages", "4"]) == 0


def test_a_larger_model_costs_more_and_measured_layers_take_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "measured.json"
    layers = {"vision": 2, "audio": 2, "llm": 4}
    measured.write_text(json.dumps({"units": {unit: {"layers": n, "linear_s": 0.5} for unit, n in layers.items()}}))
    totals = []
    for options in (["--model", "tiny"], ["--model", "7b"], ["--model", "tiny", "--coefficients", str(measured)]):
        path = tmp_path / "costs.parquet"
        assert main(["inspect", EXAMPLE, "--limit", "8", "--costs", str(path), "--out", str(tmp_path), *options]) == 0
        table = read_cost_table(str(path))
        totals.append(table.totals()["llm"])
    capsys.readouterr()
    assert totals[0] < totals[1]
    assert table.tokens is not None
    assert totals[2] == 2.0 * table.tokens.sum()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", "/no/such/folder"], "/no/such/folder does not exist"),
        (["compare", EXAMPLE, "--limit", "0"], "--limit must be at least 1"),
        (["compare", EXAMPLE, "--global-batch", "0"], "--global-batch must be at least 1"),
        (["compare", EXAMPLE, "--model", "9000b"], "no model '9000b'; there are tiny"),
        (["compare", EXAMPLE, "--units", "vision,llm"], "add 'audio'"),
        (["compare", EXAMPLE, "--units", "taste,llm"], "no cost for unit 'taste'"),
        (["compare", HARD, "--replicas", "0"], "--replicas must be at least 1"),
        (["compare", HARD, "--out", f"{HARD}/out"], "cannot write to"),
        (["compare", HARD, "--model", "7b"], "--model is for data sets; a cost table has its costs already"),
        (["compare", HARD, "--tokenizer", "x"], "--tokenizer is for data sets"),
        (["compare", HARD, "--mapping", "llava"], "--mapping is for data sets"),
        (["compare", HARD, "--global-batch", "10"], "--global-batch must be from 1 to the 9 samples there are, got 10"),
        (["compare", EXAMPLE, "--model", "tiny", "--stages", "encoder=1,llm=99"], "unit 'llm' has 4 layers, too few for 99"),
        (["compare", EXAMPLE, "--model", "tiny", "--units", "vision,audio,llm", "--num-stages", "99"], "more than the layers of"),
        (["inspect", EXAMPLE, "--model", "7b"], "--model says what costs are estimated from, so it needs --costs FILE"),
        (["inspect", HARD], "is a cost table, not a data set; `headrace plan`, `simulate` and `compare` read it"),
        (["inspect", EXAMPLE, "--costs", "costs.csv"], "must end in .parquet, got costs.csv"),
        (["inspect", EXAMPLE, "--costs", "new/costs.parquet"], "cannot write to new/costs.parquet: No such file"),
        (["compare", "empty"], "holds no good sample"),
        (["inspect", EXAMPLE, "--costs", f"{HARD}/costs.parquet"], "cannot write to"),
        (["inspect", EXAMPLE, "--costs", "costs.parquet", "--coefficients", "nowhere.json"], "cannot read nowhere.json"),
        (["inspect", EXAMPLE, "--costs", "costs.parquet", "--coefficients", "wrong.json"], "wrong.json: "),
        (
            ["inspect", EXAMPLE, "--costs", "costs.parquet", "--coefficients", "other.json"],
            "other.json: the coefficients have 9 layers of llm, but model '7b' has 28: measure it with `headrace profile 7b`",
        ),
    ],
    ids=lambda value: " ".join(Path(part).name for part in value) if isinstance(value, list) else "",
)
def test_what_the_user_can_fix_is_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "shard.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "wrong.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"units": {"llm": {"layers": 9, "linear_s": 1}}}')
    assert main([*arguments, "--limit", "9", *arguments[2:]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headrace {arguments[0]}: ")
    assert (err.count("\n"), sentence in err) == (1, True)
    assert not (tmp_path / "costs.parquet").exists()
