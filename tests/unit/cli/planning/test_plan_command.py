"""`headrace plan` as its user meets it: the plan it prints, and how it refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.cli.main import main
from headrace.cli.planning.planning_options import STRATEGY_NAMES
from headrace.plan import StepPlan
from headrace.reorder_service.planning import STRATEGIES

COSTS = Path(__file__).parents[3] / "data" / "costs"
CHARTS, OMNI = str(COSTS / "chartqa_512.parquet"), str(COSTS / "omni_2048.parquet")
GENERATOR = str(COSTS / "generator_512.parquet")
SMALL = ["--replicas", "2", "--microbatches", "8", "--strategy", "disttrain"]
SHARED = [*SMALL, "--stages", "encoder=1,llm=2", "--dp", "encoder=4", "--on-llm", "encoder"]

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """plan(COSTS, OPTION...) gives the JSON object, which is all of standard output."""

    def call(costs: str, *options: str) -> dict[str, Any]:
        assert main(["plan", costs, "--format", "json", *options]) == 0
        document = json.loads(capsys.readouterr().out)
        assert isinstance(document, dict)
        return document

    return call


def write(folder: Path, columns: dict[str, Any]) -> str:
    path = folder / "costs.parquet"
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_prints_a_whole_plan(plan: Plan, strategy: str) -> None:
    document = plan(CHARTS, "--strategy", strategy, "--batch", "96", "--replicas", "2", "--microbatches", "6")
    assert document.pop("planning_s") > 0
    step = StepPlan.from_json(document)
    step.check()
    assert step.sample_ids() == list(range(96))
    assert step.to_json() == document
    assert (step.strategy, step.topology.replicas, step.topology.microbatches) == (strategy, 2, 6)
    assert bool(step.chosen) == (strategy == "auto")
    assert 0 < document["predicted"]["lower_bound_s"] <= document["predicted"]["iteration_s"]


def test_orchmllm_knows_forms_and_nodes_and_the_table_says_what_crosses_nodes(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL, "--strategy", "orchmllm", "--replicas", "4"]
    padded = plan(OMNI, *options, "--orchmllm", "audio=fourth, lambda=0.5, tolerance=0.1, ranks-per-node=2")
    assert padded["replicas"] != plan(OMNI, *options)["replicas"]
    assert main(["plan", OMNI, *options, "--orchmllm", "ranks-per-node=2"]) == 0
    assert "at most from one rank" in capsys.readouterr().out


def test_the_same_arguments_give_the_same_plan(plan: Plan) -> None:
    first, second = (plan(CHARTS, *SMALL, "--strategy", "joint") for _ in range(2))
    del first["planning_s"], second["planning_s"]
    assert first == second


def test_a_unit_with_replicas_of_its_own_gets_its_samples_dealt_to_them(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SMALL, "--dp", "encoder=3", "--encoder-stages", "1", "--llm-stages", "2"]
    step = StepPlan.from_json(plan(CHARTS, *options))
    step.check()
    assert [len(replica) for replica in step.unit_replicas["encoder"]] == [8, 8, 8]
    assert not StepPlan.from_json(plan(CHARTS, *SMALL, "--dp", "encoder=2")).unit_replicas
    assert main(["plan", CHARTS, *options]) == 0
    assert "2 replicas x 8 microbatches, encoder 3 replicas" in capsys.readouterr().out


def test_encoders_on_the_ranks_of_the_llm_take_longer_than_on_ranks_beside_them(plan: Plan) -> None:
    pipelines = [CHARTS, "--replicas", "2", "--dp", "encoder=4", "--encoder-stages", "1", "--llm-stages", "2", "--crossing"]
    shared = ["--on-llm", "encoder"]
    apart, nested, colocated, cut = (
        plan(*pipelines, "--strategy", "entrain", *options)["predicted"]["iteration_s"]
        for options in ([], shared, [*shared, "--sharing", "colocated"], [*shared, "--pieces", "encoder=4"])
    )
    assert apart < nested < 2 * apart
    assert apart < colocated < 2 * apart
    assert apart < cut != nested


def test_stages_are_those_of_the_flags(plan: Plan) -> None:
    found = plan(CHARTS, *SMALL, "--encoder-stages", "1", "--llm-stages", "2")
    assert found["topology"]["stages"] == {"encoder": 1, "llm": 2}
    found = plan(GENERATOR, *SMALL, "--encoder-stages", "1", "--llm-stages", "2", "--generator-stages", "3")
    assert found["topology"]["stages"] == {"encoder": 1, "llm": 2, "generator": 3}
    found = plan(OMNI, *SMALL, "--stages", "llm=5,audio=1,vision=2")
    assert list(found["topology"]["stages"].items()) == [("vision", 2), ("audio", 1), ("llm", 5)]


@pytest.mark.parametrize(("family", "encoder"), [("synthchart", 3), ("chartqa", 4), ("cocoqa", 5), ("llava", 4)])
def test_without_flags_eight_stages_follow_the_costs(plan: Plan, family: str, encoder: int) -> None:
    found = plan(str(COSTS / f"{family}_512.parquet"))
    assert found["topology"]["stages"] == {"encoder": encoder, "llm": 8 - encoder}


def test_stages_are_dealt_for_what_is_frozen(plan: Plan) -> None:
    table = str(COSTS / "llava_512.parquet")
    frozen = plan(table, "--frozen", "encoder")
    assert frozen["topology"]["stages"] == {"encoder": 2, "llm": 6}
    even = plan(table, "--frozen", "encoder", "--stages", "encoder=4,llm=4")
    assert even["predicted"]["iteration_s"] > 1.3 * frozen["predicted"]["iteration_s"]
    bounded = plan(table, "--frozen", "encoder", "--layers", "encoder=24,llm=5")
    assert bounded["topology"]["stages"] == {"encoder": 3, "llm": 5}


def test_a_table_on_standard_input_is_planned(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"sample_id": 10 * i, "cost_llm": i + 1.0} for i in range(9)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(map(json.dumps, rows)).encode())))
    found = plan("-", "--replicas", "1", "--microbatches", "3", "--stages", "llm=2")
    assert StepPlan.from_json(found).sample_ids() == [row["sample_id"] for row in rows]


def test_what_runs_slower_is_predicted_slower(plan: Plan, tmp_path: Path) -> None:
    columns = pq.read_table(CHARTS).to_pydict()
    table = write(tmp_path, columns | {f"bytes_{unit}": [8.0] * 512 for unit in ("encoder", "llm")})

    def step(*options: str) -> float:
        return float(plan(table, *SMALL, *options)["predicted"]["iteration_s"])

    plain = step()
    assert step("--frozen", "encoder") < plain
    assert step("--checkpointing", "encoder,llm") > plain
    assert step("--latency", "0.1") > plain
    assert step("--bandwidth", "1000") > plain
    assert step("--schedule", "gpipe") != pytest.approx(plain, rel=1e-9)
    assert step("--schedule", "interleaved", "--chunks", "2") < plain
    assert step("--schedule", "zero-bubble") < plain


def test_packed_samples_stay_together(plan: Plan, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 60, 80)
    table = write(
        tmp_path, {"sample_id": np.arange(80), "cost_encoder": rng.random(80), "cost_llm": rng.random(80), "tokens": tokens}
    )
    step = StepPlan.from_json(plan(table, *SMALL, "--pack-tokens", "100"))
    step.check()
    assert step.sample_ids() == list(range(80))
    assert sum(len(m.sample_ids) > 1 for replica in step.replicas for m in replica) > 8, (
        "microbatches hold packs, packs hold samples"
    )


def test_the_plan_goes_to_a_file_too(plan: Plan, tmp_path: Path) -> None:
    printed = plan(CHARTS, *SMALL, "--out", str(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text()) == printed


def test_the_table_sums_the_plan_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", CHARTS, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "512 samples planned by disttrain" in out
    assert "2 replicas x 8 microbatches" in out
    assert "encoder 4, llm 4" in out
    assert "Microbatches of replica" in out
    assert err == ""


def test_the_help_names_every_strategy_and_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(STRATEGY_NAMES.replace(" or ", ", ").split(", ")) == set(STRATEGIES)
    for command in ("plan", "simulate"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert STRATEGY_NAMES in " ".join(out.split())
        assert f"  headrace {command} costs.parquet" in out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["nowhere.parquet"], "cannot read nowhere.parquet"),
        ([CHARTS, "--strategy", "magic"], "no strategy 'magic'; there are random, disttrain"),
        ([CHARTS, "--replicas", "0"], "--replicas must be at least 1, got 0"),
        ([CHARTS, "--microbatches", "0"], "--microbatches must be at least 1, got 0"),
        ([CHARTS, "--encoder-stages", "0", "--llm-stages", "1"], "--encoder-stages must be at least 1, got 0"),
        ([CHARTS, "--encoder-stages", "1"], "--llm-stages is missing"),
        (
            [CHARTS, "--encoder-stages", "1", "--llm-stages", "1", "--generator-stages", "1"],
            "chartqa_512.parquet lacks cost_generator",
        ),
        ([CHARTS, "--num-stages", "1"], "--num-stages must be at least 1 per unit (encoder, llm), got 1"),
        ([CHARTS, "--num-stages", "4", "--stages", "encoder=1,llm=1"], "not several of them"),
        ([CHARTS, "--stages", "encoder=1,audio=2,llm=1"], "lacks cost_audio; it has cost_encoder, cost_llm"),
        ([CHARTS, "--stages", "llm=1"], "the stages leave out encoder"),
        ([CHARTS, "--stages", "encoder=1,llm"], "--stages must look like vision=2,llm=5"),
        ([CHARTS, "--stages", "encoder=1,llm=0"], "got 'llm=0'"),
        ([CHARTS, "--stages", "llm=1,llm=2"], "--stages names 'llm' twice"),
        ([OMNI, "--encoder-stages", "2", "--llm-stages", "5"], "use --stages vision=1,audio=1,llm=1"),
        ([CHARTS, "--stages", "encoder=33,llm=4", "--layers", "encoder=32,llm=28"], "'encoder' has 32 layers, too few for 33"),
        ([CHARTS, "--layers", "vision=32"], "--layers names 'vision'"),
        ([CHARTS, "--dp", "vision=3"], "--dp names 'vision', which is no unit of the pipeline (encoder, llm)"),
        ([CHARTS, "--dp", "encoder=0"], "--dp must look like vision=2,llm=5"),
        ([CHARTS, "--dp", "llm=3"], "--replicas says how many 'llm' has, so --dp must not name it: take llm=3 away"),
        ([CHARTS, "--frozen", "vision"], "--frozen names 'vision'"),
        ([CHARTS, "--checkpointing", "x"], "--checkpointing names 'x'"),
        ([CHARTS, "--orchmllm", "vision=padded"], "--orchmllm names 'vision', which is neither one of lambda, tolerance, "),
        ([CHARTS, "--orchmllm", "llm=fifth"], "--orchmllm: forms are no_padding, padded, third, fourth, got {'llm': 'fifth'}"),
        ([CHARTS, "--orchmllm", "llm=third,llm=third"], "--orchmllm names 'llm' twice"),
        ([CHARTS, "--orchmllm", "lambda=1,lambda=2"], "--orchmllm names 'lambda' twice"),
        ([CHARTS, "--orchmllm", "lambda=much"], "--orchmllm lambda must be a number, like audio=fourth,"),
        ([CHARTS, "--orchmllm", "ranks-per-node=1.5"], "--orchmllm ranks-per-node must be a whole number, like"),
        ([CHARTS, "--orchmllm", "tolerance=0"], "--orchmllm: tolerance must be finite and positive, got 0.0"),
        ([CHARTS, "--on-llm", "x"], "--on-llm names 'x'"),
        ([CHARTS, "--pieces", "x=2"], "--pieces names 'x'"),
        (
            [CHARTS, "--on-llm", "encoder", "--encoder-stages", "4", "--llm-stages", "4", "--pieces", "encoder=2"],
            "--on-llm: unit 'encoder' has 2 pieces, pp 4 and chunks 1, but only a unit on the ranks of the llm is",
        ),
        ([CHARTS, "--tp", "llm=2"], "--tp, --sharing and --pieces go with --on-llm"),
        ([CHARTS, "--pieces", "encoder=2"], "--tp, --sharing and --pieces go with --on-llm"),
        ([CHARTS, *SHARED, "--pieces", "llm=2"], "--on-llm: unit 'llm' has 2 pieces, pp 2 and chunks 1, but only a unit on the"),
        ([OMNI, "--on-llm", "vision", "--tp", "audio=2"], "--tp is for 'llm' and the units of --on-llm: take audio=2 away"),
        (
            [CHARTS, *SMALL, "--on-llm", "encoder", "--tp", "llm=2"],
            "--on-llm: unit 'encoder' is on the ranks of the llm, whose dp x tp x pp is",
        ),
        ([CHARTS, "--schedule", "best"], "no schedule 'best'; there are 1f1b"),
        ([CHARTS, "--chunks", "2"], "--chunks 2 needs --schedule interleaved, got 1f1b"),
        ([CHARTS, "--chunks", "0"], "--chunks must be at least 1, got 0"),
        ([CHARTS, "--in-flight", "0", "--schedule", "eager"], "--in-flight must be at least 1, got 0"),
        ([CHARTS, "--in-flight", "4"], "--in-flight 4 needs --schedule eager, got 1f1b"),
        ([CHARTS, "--latency", "-1"], "--latency must be finite and not negative"),
        ([CHARTS, "--bandwidth", "5"], "chartqa_512.parquet a bytes_<unit> column per unit"),
        ([CHARTS, "--coarse-quantile", "1.5"], "--coarse-quantile must be from 0 to 1, got 1.5"),
        ([CHARTS, "--memory-limit", "0"], "--memory-limit must be positive, got 0.0"),
        ([CHARTS, "--bandwidth", "nan"], "--bandwidth must be positive, got nan"),
        ([CHARTS, "--pack-tokens", "9"], "chartqa_512.parquet a column 'tokens'"),
        ([CHARTS, "--batch", "513"], "--global-batch must be from 1 to the 512 rows of"),
        ([CHARTS, "--seed", "-1"], "--seed must be from 0"),
        ([CHARTS, *SMALL, "--out", "nowhere/plan.json"], "cannot write to nowhere/plan.json"),
        (["no-llm.parquet"], "has no unit 'llm' (it has vision)"),
        (["negative.parquet"], "row 1 (sample 1): cost_llm must be finite and not negative, got -1.0"),
        (["large.parquet"], "large.parquet, row 0 (sample 0): cost_llm is too large to add up"),
        (["long.parquet", "--pack-tokens", "9"], "long.parquet: sample 1 has 10 tokens"),
    ],
    ids=lambda value: " ".join(Path(part).name for part in value) if isinstance(value, list) else "",
)
def test_what_the_user_can_fix_is_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = np.arange(2)
    pq.write_table(pa.table({"sample_id": ids, "cost_vision": [1.0, 1.0]}), "no-llm.parquet")
    pq.write_table(pa.table({"sample_id": ids, "cost_llm": [1.0, -1.0]}), "negative.parquet")
    pq.write_table(pa.table({"sample_id": ids, "cost_llm": [1e300, 1.0]}), "large.parquet")
    pq.write_table(pa.table({"sample_id": ids, "cost_llm": [1.0, 1.0], "tokens": [9, 10]}), "long.parquet")
    assert main(["plan", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace plan: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_arguments_are_read_without_the_planner() -> None:
    heavy = "{'numba', 'matplotlib', 'torch', 'PIL'}"
    commands = ", ".join(f"headrace.cli.planning.{name}" for name in ("plan", "simulate", "compare"))
    code = f"import sys, {commands}; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
