"""`--baselines` of `headrace simulate` and `headrace compare`: other systems on as many GPUs, below the strategies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.planning.baseline_rows import BASELINE_NAMES
from headrace.reorder_service.planning.strategies.baselines import BASELINES

COSTS = Path(__file__).parents[3] / "data" / "costs"
SMALL = ["--replicas", "2", "--microbatches", "8"]
SIMULATE = ["simulate", str(COSTS / "llava_512.parquet"), "--batch", "64", *SMALL, "--no-pictures", "--strategies", "joint"]


def test_the_names_of_the_help_are_those_that_there_are() -> None:
    assert tuple(BASELINES) == BASELINE_NAMES


def test_simulate_puts_all_beside_the_best_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "--baselines", "all", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    random, joint = report["strategies"]
    assert [row["baseline"] for row in report["baselines"]] == list(BASELINE_NAMES)
    for row in report["baselines"]:
        assert row["speedup"] == pytest.approx(random["iteration_s"] / row["iteration_s"])
        assert row["best_over_it"] == pytest.approx(row["iteration_s"] / joint["iteration_s"])
        assert 0 < row["bubble"] < 1
    assert main([*SIMULATE, "--baselines", "ratio, fsdp,ratio"]) == 0
    out = capsys.readouterr().out
    first = [line.split()[0] for line in out.splitlines() if line.split()]
    assert [word for word in first if word in BASELINE_NAMES] == ["ratio", "fsdp"]
    assert "SIMULATED baselines" in out


def test_compare_takes_the_mean_of_all_batches_and_leaves_out_what_has_no_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = str(COSTS / "omni_2048.parquet")
    compare = ["compare", table, "--limit", "128", "--global-batch", "64", *SMALL, "--out", str(tmp_path)]
    assert main([*compare, "--baselines", "megatron,megatron-balanced,dip", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert [row["baseline"] for row in report["baselines"]] == ["megatron", "dip"]
    assert err.startswith("megatron-balanced is left out: vision, audio do not depend on each other")


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_an_unknown_baseline_is_one_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(COSTS / "llava_512.parquet"), "--baselines", "dap"]) == 2
    err = capsys.readouterr().err
    assert err == f"headrace {command}: no baseline 'dap'; there are {', '.join(BASELINE_NAMES)}, and all\n"


def test_baselines_are_not_compared_with_shared_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "--baselines", "fsdp", "--on-llm", "encoder"]) == 2
    assert "--baselines are of pipelines whose units have GPUs of their own" in capsys.readouterr().err


def test_the_llms_own_balance_is_a_strategy_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE[:-1], "llm-only", "--format", "json"]) == 0
    assert [row["strategy"] for row in json.loads(capsys.readouterr().out)["strategies"]] == ["random", "llm-only"]
