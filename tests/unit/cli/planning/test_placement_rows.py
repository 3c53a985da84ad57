"""`headrace compare --placements`: the same batches on as many GPUs, with encoders on their own, on the LLM's, and FSDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from headrace.cli.main import main
from headrace.cli.planning.placement_rows import PLACEMENT_NAMES, PlacementRow
from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.orchestration.candidate import Placement
from headrace.reorder_service.planning.orchestration.same_gpus import gpus_of, placed

COSTS = Path(__file__).parents[3] / "data" / "costs"
COMPARE = ["compare", str(COSTS / "llava_512.parquet"), "--limit", "48", "--replicas", "2", "--microbatches", "4"]


def batch_of(stages: dict[str, int], replicas: int, microbatches: int, **execution: Any) -> Batch:
    costs = {unit: np.linspace(1.0, 2.0, 24) for unit in stages}
    topology = Topology(replicas=replicas, microbatches=microbatches, stages=stages)
    return make_batch(np.arange(24), costs, topology, 0, execution=Execution(**execution))


def row_of(iteration_s: float, bubble: float) -> PlacementRow:
    common: dict[str, Any] = {"placement": "nested", "units": {}, "gpus": 4, "microbatches": 2, "chosen": ("joint",)}
    return PlacementRow(**common, iteration_s=iteration_s, bubble=bubble, speedup=1.0, peak_memory=1.0, fits=True)


def test_the_names_of_the_help_are_those_that_there_are() -> None:
    assert sorted(PLACEMENT_NAMES) == sorted(get_args(Placement))


@pytest.mark.parametrize("placement", ["nested", "encoders-first"])
def test_the_llm_and_encoders_have_all_their_gpus_together(placement: Any) -> None:
    batch = batch_of({"vision": 1, "audio": 1, "llm": 3, "generator": 1}, 4, 8, unit_replicas={"audio": 2, "generator": 3})
    assert gpus_of(batch) == {"vision": 4, "audio": 2, "llm": 12, "generator": 3}
    shared = placed(batch, placement)
    assert shared.topology.stages == {"vision": 1, "audio": 1, "llm": 3, "generator": 1}
    assert dict(zip(shared.units, shared.unit_replicas, strict=True)) == {"vision": 18, "audio": 18, "llm": 6, "generator": 3}
    assert shared.topology.microbatches == 5, "as many samples in each as before: 32 / 6"
    assert shared.execution.sharing is not None
    assert shared.execution.sharing.guests == {"vision", "audio"}


def test_no_gpu_has_more_of_the_llm_than_before_and_no_stage_less_than_a_layer() -> None:
    batch = batch_of({"vision": 2, "llm": 3}, 5, 4)
    assert placed(batch, "nested").topology.stages["llm"] == 5, "25 GPUs are no multiple of 3 or 4"
    with pytest.raises(ValueError, match="no number of stages from 3 to 4 divides the 25 GPUs of encoders and 'llm'"):
        placed(batch, "nested", 4)
    with pytest.raises(ValueError, match="there is no encoder to share the GPUs of 'llm' with"):
        placed(batch_of({"llm": 2}, 2, 2), "nested")


def test_every_gpu_has_all_units_where_they_are_colocated() -> None:
    found = placed(batch_of({"vision": 1, "llm": 3}, 2, 6), "colocated")
    assert (found.topology.replicas, found.topology.microbatches, found.execution.colocated) == (8, 2, "microbatch")


def test_compare_puts_them_beside_gpus_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--stages", "encoder=1,llm=2", "--out", str(tmp_path)]
    assert main([*COMPARE, *options, "--placements", "all", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["placement"]: row for row in report["placements"]}
    assert list(rows) == list(PLACEMENT_NAMES)
    assert {row["gpus"] for row in rows.values()} == {6}
    for row in rows.values():
        assert row["speedup"] == pytest.approx(rows["disaggregated"]["iteration_s"] / row["iteration_s"])
        assert row["chosen"]
        assert 0 <= row["bubble"] < 1
        assert row["peak_memory"] > 0
    assert rows["nested"]["units"] == {"encoder": {"dp": 6, "pp": 1}, "llm": {"dp": 3, "pp": 2}}
    assert rows["nested"]["peak_memory"] <= rows["encoders-first"]["peak_memory"], "the latter hold a whole step of encoders"
    assert rows["colocated"]["chosen"] == "colocated"
    best = min(rows.values(), key=lambda row: row["iteration_s"])
    assert [row["placement"] for row in rows.values() if not row["loses"]] == [best["placement"]]
    for row in rows.values():
        if row is not best:
            assert row["loses"] == f"its GPUs wait {row['bubble']:.0%} of the time (the best: {best['bubble']:.0%})"


def test_what_exceeds_the_memory_loses_however_fast_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--stages", "encoder=1,llm=2", "--out", str(tmp_path), "--placements", "all", "--format", "json"]
    assert main([*COMPARE, *options]) == 0
    peaks = {row["placement"]: row["peak_memory"] for row in json.loads(capsys.readouterr().out)["placements"]}
    limit = (peaks["nested"] + peaks["encoders-first"]) / 2
    assert main([*COMPARE, *options, "--memory-limit", str(limit)]) == 0
    rows = {row["placement"]: row for row in json.loads(capsys.readouterr().out)["placements"]}
    assert (rows["encoders-first"]["fits"], rows["encoders-first"]["loses"]) == (False, "holds more than the memory limit")
    [best] = [row for row in rows.values() if not row["loses"]]
    assert best["fits"]


def test_nothing_is_called_the_best_where_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--stages", "encoder=1,llm=2", "--out", str(tmp_path), "--placements", "all", "--memory-limit", "1"]
    assert main([*COMPARE, *options, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["placements"]
    assert [(row["fits"], row["loses"]) for row in rows] == [(False, "holds more than the memory limit")] * len(rows)


@pytest.mark.parametrize(
    ("iteration_s", "bubble", "words"),
    [
        (1.0, 0.2, "is as fast"),
        (1.1, 0.28, "its GPUs wait 28% of the time (the best: 20%)"),
        (1.1, 0.1, "its microbatches take more besides their samples"),
        (1.4, 0.2, "its microbatches take more besides their samples"),
    ],
)
def test_a_longer_step_is_waiting_or_what_microbatches_take(iteration_s: float, bubble: float, words: str) -> None:
    best = row_of(1.0, 0.2)
    assert best.why_it_loses(best) == ""
    assert row_of(iteration_s, bubble).why_it_loses(best) == words


def test_what_is_asked_for_is_printed_with_where_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, "--stages", "encoder=1,llm=2", "--out", str(tmp_path), "--placements", "colocated"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "SIMULATED placements on the same 6 GPUs" in words
    assert "disaggregated encoder 2 x 1, llm 2 x 2" in words
    assert "all on every GPU (FSDP)" in words
    assert "why it loses" in words
    assert words.count("of the time (the best: ") == 1
    assert "nested" not in words
    assert "headrace orchestrate looks through all layouts" in words


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--placements", "beside"],
            "no placement 'beside'; there are disaggregated, nested, encoders-first, colocated",
        ),
        (
            ["--placements", "all", "--on-llm", "encoder"],
            "--on-llm is of one layout, and --placements compares several",
        ),
        (["--placements", "all", "--exchange", "llm=1:1"], "--exchange is of one layout, and --placements compares several"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMPARE, *options]) == 2
    assert capsys.readouterr().err.startswith(f"headrace compare: {sentence}")
