"""`headrace orchestrate`: from a data set and a cluster to a placement, its files and its commands."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import yaml

from headrace.cli.costs.cost_table import read_cost_table
from headrace.cli.main import main
from headrace.cli.orchestrate import orchestrate as orchestrate_command
from headrace.cli.orchestrate.placement_files import write_files
from headrace.cli.orchestrate.placement_problem import placement_problem
from headrace.cli.planning.outcome import Outcome
from headrace.cli.planning.planning_options import problem_of
from headrace.cli.run import train
from headrace.published_models import PLANNED_MODELS
from headrace.reorder_service.jobs.job_execution import check_coefficients, execution_of
from headrace.reorder_service.planning.orchestration.candidate import Candidate, UnitGrid
from headrace.reorder_service.planning.orchestration.judge import draw_batches, judge, sharing_of
from headrace.reorder_service.planning.orchestration.stage_cuts import first_layers
from headrace.reorder_service.planning.strategies import plan_of
from headrace.spec import load_spec_yaml
from headrace.trainer.pipeline.topology import PipelineTopology, load_topology_yaml
from tests.kustomization import kustomized

EXAMPLE = str(Path(__file__).parents[4] / "examples" / "data")
OF_CLUSTER = ["--gpus", "8", "--device", "a40", "--batches", "2", "--limit", "64"]
PIPELINES = [*OF_CLUSTER, "--global-batch", "16", "--allow-small-batch"]
MODEL = "qwen2.5-vl-3b"
PRINTED = "printed.txt"


def orchestrate(capsys: pytest.CaptureFixture[str], out: Path, *options: str) -> dict[str, Any]:
    assert main(["orchestrate", "--data", EXAMPLE, "--out", str(out), "--format", "json", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The report and the folder of a placement in pipelines, with what was printed."""
    out = tmp_path_factory.mktemp("placed")
    options = ["--placements", "disaggregated", "--searches", "megatron", "--checkpointing", "vision", "--tp", "vision=1"]
    with (out / PRINTED).open("w") as printed, contextlib.redirect_stdout(printed):
        assert main(["orchestrate", "--model", MODEL, "--data", EXAMPLE, "--out", str(out), *PIPELINES, *options]) == 0
    return json.loads((out / "placement.json").read_text()), out


def test_the_job_is_planned_for_the_placement(pipelines: tuple[dict[str, Any], Path]) -> None:
    report, out = pipelines
    job = load_spec_yaml(out / "job-execution.yaml")
    check_coefficients(job)
    best = report["searches"][0]
    units = best["units"]
    assert job.topology.replicas == units["llm"]["dp"]
    assert job.topology.stages == {unit: grid["pp"] for unit, grid in units.items()}
    assert (job.execution.trainer, job.global_batch, job.topology.microbatches) == ("pipeline", 16, best["microbatches"])
    execution = execution_of(job, job.topology.topology())
    assert execution.backward_factors == {"vision": 3.0, "llm": 2.0}, "vision runs its forward again"
    assert execution.unit_replicas == {u: g["dp"] for u, g in units.items() if g["dp"] != units["llm"]["dp"]}
    assert [source.path for source in job.sources] == [EXAMPLE]


def test_the_topology_has_the_processes_of_the_placement(pipelines: tuple[dict[str, Any], Path]) -> None:
    report, out = pipelines
    topology = load_topology_yaml(out / "topology.yaml")
    assert topology.world_size == report["processes"] == report["searches"][0]["gpus"] <= 8
    topology.check(topology.world_size, PLANNED_MODELS[MODEL])
    job = load_spec_yaml(out / "job-execution.yaml")
    topology.check_execution(job.execution, job.topology.stages)
    assert PipelineTopology.of_job(job).world_size == topology.world_size


def test_the_commands_can_be_read(pipelines: tuple[dict[str, Any], Path]) -> None:
    report, out = pipelines
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    emulate = shlex.split(report["commands"]["emulate"])
    assert emulate[:2] == ["headrace", "train"]
    args = parser.parse_args(emulate[2:])
    assert args.emulate == str(out / "costs.parquet")
    assert args.microbatches == report["searches"][0]["microbatches"], "it is the best that is emulated"
    table = read_cost_table(args.emulate)
    assert len(table.sample_ids) == 2 * args.global_batch == 32
    commands = report["commands"]
    assert shlex.split(commands["launch"])[-2:] == ["bash", str(out / "torchrun.sh")]
    assert shlex.split(commands["slurm"])[-2:] == [str(out / "headrace.sbatch"), str(out / "job-execution.yaml")]
    assert shlex.split(commands["kubernetes"])[-2:] == ["--kustomize", str(out)]


def test_the_launch_files_start_the_processes_of_the_placement(pipelines: tuple[dict[str, Any], Path]) -> None:
    """What their shells and Kubernetes make of them is told by the tests of `launch_files`."""
    report, out = pipelines
    nodes = -(-report["processes"] // 4)
    assert f"--nnodes {nodes} " in (out / "torchrun.sh").read_text()
    documents = kustomized(out)
    [jobset] = [document for document in documents if document["kind"] == "JobSet"]
    assert jobset["spec"]["replicatedJobs"][1]["template"]["spec"]["parallelism"] == nodes
    [config] = [document for document in documents if document["kind"] == "ConfigMap"]
    assert config["data"] == {
        "job.yaml": (out / "job-execution.yaml").read_text(),
        "topology.yaml": (out / "topology.yaml").read_text(),
    }
    assert {str(out / name) for name in ("torchrun.sh", "headrace.sbatch", "jobset.yaml", "kustomization.yaml")} <= set(
        report["files"]
    )


def test_the_report_says_what_loses_and_where_time_and_memory_go(pipelines: tuple[dict[str, Any], Path]) -> None:
    report, _ = pipelines
    ours, theirs = report["searches"]
    assert (ours["search"], theirs["search"]) == ("headrace", "megatron")
    assert ours["units"]["vision"]["tp"] == theirs["units"]["vision"]["tp"] == 1, "nothing else was allowed"
    assert ours["speedup"] >= 1 == theirs["speedup"]
    assert ours["samples_per_s"] == pytest.approx(16 / ours["step_s"])
    assert sum(report["time"].values()) == pytest.approx(1)
    assert len(report["ranks"]) == sum(grid["pp"] for grid in ours["units"].values())
    assert max(rank["total_gib"] for rank in report["ranks"]) == pytest.approx(ours["memory_gib"])
    assert 0 < len(report["alternatives"]) <= 10
    assert all(row["loses"] for row in report["alternatives"])
    assert any("samples with recordings are left out" in note for note in report["notes"])


def test_the_memory_of_every_stage_is_told_over_the_step(pipelines: tuple[dict[str, Any], Path]) -> None:
    report, _ = pipelines
    stages = report["memory_over_step"]["stages"]
    assert [(one["unit"], one["stage"]) for one in stages] == [(rank["unit"], rank["stage"]) for rank in report["ranks"]]
    for one, rank in zip(stages, report["ranks"], strict=True):
        assert len(one["time_s"]) == len(one["gradients_gib"]) == len(one["activations_gib"])
        assert one["peak_gib"] <= rank["total_gib"] * 1.000001, "the table has the most of all global batches"
        state = one["weights_gib"] + one["optimizer_gib"]
        varying = [gradients + held for gradients, held in zip(one["gradients_gib"], one["activations_gib"], strict=True)]
        assert state + max(varying) == pytest.approx(one["peak_gib"], rel=1e-4)
        assert one["time_s"][-1] == pytest.approx(report["memory_over_step"]["step_s"], rel=1e-5)


def test_the_picture_is_drawn(pipelines: tuple[dict[str, Any], Path]) -> None:
    report, out = pipelines
    assert report["picture"] == str(out / "placement.png")
    assert matplotlib.image.imread(report["picture"]).shape[1] > 1000


def test_colocated_ranks_get_a_job_of_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = orchestrate(capsys, tmp_path, "--model", "1b", *PIPELINES, "--placements", "colocated", "--searches", "megatron")
    assert report["searches"][0]["placement"] == "colocated"
    job = load_spec_yaml(tmp_path / "job-execution.yaml")
    check_coefficients(job)
    assert (job.execution.trainer, job.topology.replicas, job.model) == ("colocated", 8, "1b")
    assert set(job.topology.stages) == {"vision", "audio", "llm"}
    assert not (tmp_path / "topology.yaml").exists()
    assert "LOOP=YOUR_LOOP.py" in report["commands"]["launch"]
    [curve] = report["memory_over_step"]["stages"]
    assert curve["peak_gib"] <= report["ranks"][0]["total_gib"] * 1.000001


@pytest.mark.parametrize(("placement", "sharing"), [("nested", "nested"), ("encoders-first", "colocated")])
def test_encoders_on_the_llms_gpus_are_said_in_the_job(
    placement: str, sharing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "1b", *PIPELINES, "--batches", "1", "--placements", placement, "--searches", ""]
    report = orchestrate(capsys, tmp_path, *options)
    assert report["searches"][0]["placement"] == placement
    assert [row["placement"] for row in report["placements"]] == [placement]
    assert (report["bubble_bound_s"] is None) == (placement != "nested")
    execution = yaml.safe_load((tmp_path / "job-execution.yaml").read_text())["execution"]
    topology = yaml.safe_load((tmp_path / "topology.yaml").read_text())
    assert execution["sharing"] == topology["sharing"] == sharing
    assert execution["units"]["vision"]["on"] == topology["units"]["vision"]["on"] == "llm"
    sizes = topology["units"].values()
    assert {size["dp"] * size["tp"] * size["pp"] for size in sizes} == {report["processes"]}
    assert "on" not in topology["units"]["llm"]
    assert matplotlib.image.imread(report["picture"]).shape[1] > 1000
    assert f"--on-llm vision,audio --sharing {sharing} --tp " in report["commands"]["emulate"]


def test_pieces_of_passes_are_said_in_the_job_the_topology_and_the_command(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    orchestrate_command.add_arguments(parser)
    problem = placement_problem(parser.parse_args(["--model", "1b", "--data", EXAMPLE, *PIPELINES]))
    on_all = UnitGrid(dp=8, tp=1, pp=1)
    grids = {"vision": on_all, "audio": on_all, "llm": UnitGrid(dp=2, tp=1, pp=4)}
    candidate = Candidate(search="test", grids=grids, microbatches=4, placement="nested", pieces=2)
    batches = draw_batches(problem.demand, 1, 0)
    judged = judge(problem.demand, candidate, batches)
    files = write_files(tmp_path, problem, judged, judged, batches)
    job = load_spec_yaml(tmp_path / "job-execution.yaml")
    sharing = execution_of(job, job.topology.topology()).sharing
    assert sharing is not None
    assert sharing == sharing_of(candidate)
    assert {unit: job.execution.units[unit].pieces for unit in ("vision", "audio")} == {"vision": 2, "audio": 2}
    [llm] = [unit for unit in problem.demand.units if unit.name == "llm"]
    topology = load_topology_yaml(tmp_path / "topology.yaml")
    assert topology.units["llm"].cuts == job.execution.units["llm"].cuts == first_layers(llm, 4)
    topology.check_execution(job.execution, job.topology.stages)
    assert PipelineTopology.of_job(job).units["vision"].pieces == topology.units["vision"].pieces == 2
    emulating = argparse.ArgumentParser()
    train.add_arguments(emulating)
    args = emulating.parse_args(shlex.split(files.emulate)[2:])
    emulated = problem_of(args, read_cost_table(args.emulate), args.strategy).batch.execution.sharing
    assert emulated is not None
    assert (emulated.pieces, emulated.slices) == (sharing.pieces, sharing.slices)


def test_the_tables_name_every_search_and_every_unit(pipelines: tuple[dict[str, Any], Path]) -> None:
    printed = (pipelines[1] / PRINTED).read_text()
    for words in ("headrace", "megatron", "vision", "llm", "why it loses", "optimizer", "torchrun", "Simulated, not measured"):
        assert words in printed


def test_what_is_emulated_is_forecast_as_it_was_judged_by_measured_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two devices, where transfers take next to nothing: a backward of half a forward makes the step shorter for both."""
    backward = {"input_gradients": 0.3, "weight_gradients": 0.2, "rerun": 1.0}
    layers = {"layers": 4, "linear_s": 3e-5, "backward": backward}
    (tmp_path / "costs.json").write_text(
        json.dumps(
            {"model": "tiny", "measured_on": {"dtype": "fp32"}, "units": {"vision": {**layers, "layers": 2}, "llm": layers}}
        )
    )
    machine = {"preset": "a40", "nodes": 1, "gpus_per_node": 2}
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(machine))
    where = ["--cluster", str(tmp_path / "machine.yaml"), "--coefficients", str(tmp_path / "costs.json")]
    options = ["--model", "tiny", *where, "--placements", "disaggregated", "--searches", "megatron", "--max-pixels", "50176"]
    data = str(Path(EXAMPLE) / "charts-*.tar")
    assert main(["orchestrate", "--data", data, "--out", str(tmp_path), *options, "--batches", "1", "--global-batch", "16"]) == 0
    report = json.loads((tmp_path / "placement.json").read_text())
    assert "--precision fp32" in (tmp_path / "torchrun.sh").read_text()
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(shlex.split(report["commands"]["emulate"])[2:])
    batch = problem_of(args, read_cost_table(args.emulate), args.strategy).batch
    outcome = Outcome.of(plan_of(args.strategy, batch), batch)
    assert outcome.predicted.iteration_s == pytest.approx(report["steps_s"][0], rel=0.01)


def test_a_cluster_of_one_s_own_is_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(yaml.safe_dump({"preset": "h100", "nodes": 2, "gpus_per_node": 2, "efficiency": 0.4}))
    options = ["--cluster", str(cluster), "--batches", "1", "--limit", "32", "--searches", "megatron", "--placements", "all"]
    report = orchestrate(capsys, tmp_path, "--model", "1b", *options)
    assert report["cluster"] == {"name": str(cluster), "gpus": 4, "nodes": 2, "memory_gib": 80}
    assert {row["placement"] for row in report["placements"]} == {"disaggregated", "colocated", "encoders-first", "nested"}
    assert report["time"]["services"] == 0, "they have cores of their own"


def test_services_on_the_trainers_cores_are_in_the_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = {"preset": "a40", "nodes": 1, "gpus_per_node": 2, "cores_per_node": 2}
    (tmp_path / "costs.json").write_text(
        json.dumps(
            {"model": "tiny", "units": {"vision": {"layers": 2, "linear_s": 4e-5}, "llm": {"layers": 4, "linear_s": 3e-5}}}
        )
    )
    found = []
    for each_s in (0.0, 0.01):
        (tmp_path / "machine.yaml").write_text(yaml.safe_dump(machine | {"service_s_per_sample": each_s}))
        options = ["--cluster", str(tmp_path / "machine.yaml"), "--coefficients", str(tmp_path / "costs.json"), "--batches", "1"]
        options += ["--placements", "disaggregated", "--searches", "", "--global-batch", "16", "--max-pixels", "50176"]
        options += ["--data", str(Path(EXAMPLE) / "charts-*.tar")]
        found.append(orchestrate(capsys, tmp_path, "--model", "tiny", *options))
    alone, beside = (report["searches"][0]["step_s"] for report in found)
    assert alone < beside <= alone + 16 * 0.01 / 2 * 1.001, "at most what services take, spread over both cores"
    assert found[0]["time"]["services"] == pytest.approx(0, abs=1e-9)
    assert 0 < found[1]["time"]["services"] <= 16 * 0.01 / 2 / beside * 1.001


def test_a_small_batch_is_taken_where_gpus_are_shared_or_it_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", MODEL, *OF_CLUSTER, "--global-batch", "8", "--searches", ""]
    shared = orchestrate(capsys, tmp_path, *options, "--placements", "colocated")
    assert not any("b_min" in note for note in shared["notes"])
    accepted = orchestrate(capsys, tmp_path, *options, "--allow-small-batch", "--placements", "disaggregated")
    assert any(note.startswith("the global batch of 8 samples is below") for note in accepted["notes"])


def test_the_default_batch_is_b_min_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    orchestrate_command.add_arguments(parser)
    asked = ["--model", MODEL, "--data", EXAMPLE, *OF_CLUSTER]
    least = placement_problem(parser.parse_args(asked)).demand.global_batch
    assert least > 4 * 8, "four samples of each GPU are too few of these data"
    capsys.readouterr()
    assert main(["orchestrate", *asked, "--global-batch", str(least - 1)]) == 2
    assert f"is below {least}, from which on" in capsys.readouterr().err


def test_only_those_replicas_slices_and_stages_are_taken_that_are_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grids = ["--dp", "1,2", "--tp", "llm=1,vision=1:2", "--pp", "llm=2:3"]
    report = orchestrate(capsys, tmp_path, "--model", MODEL, *PIPELINES, "--batches", "1", *grids)
    rows = [*report["searches"], *report["alternatives"], *report["placements"]]
    assert len({row["placement"] for row in rows}) > 1
    for row in rows:
        vision, llm = row["units"]["vision"], row["units"]["llm"]
        assert (vision["dp"] in (1, 2), vision["tp"] in (1, 2)) == (True, True), row
        assert (llm["dp"] in (1, 2), llm["tp"], llm["pp"] in (2, 3)) == (True, 1, True), row
