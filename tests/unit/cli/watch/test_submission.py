"""What a job's spec becomes on its way to the service: measured costs at the widths of its trainers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.run.train import _spec_of
from headrace.cli.watch.submission import read_spec, with_coefficients
from headrace.errors import UserError
from headrace.execution_spec import ExecutionSpec, UnitExecution
from headrace.reorder_service.jobs.job_execution import check_coefficients, measured_costs
from headrace.spec import JobSpec
from headrace.trainer.pipeline.topology import PipelineTopology

HALVES = {"layers": 4, "linear_s": 0.6}
TWO_SLICES = {"llm": UnitExecution(tp=2)}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A spec that names no stages, and coefficients of its model, with slices of the LLM for two processes."""
    layers = {"vision": 2, "audio": 2, "llm": 4}
    units: dict[str, Any] = {unit: {"layers": count, "linear_s": 1.0} for unit, count in layers.items()}
    units["llm"]["slices"] = {"2": HALVES}
    (tmp_path / "coefficients.json").write_text(json.dumps({"model": "tiny", "units": units}))
    (tmp_path / "job.yaml").write_text("name: j\nsources: [{path: /data}]\n")
    return {"submit": tmp_path / "job.yaml", "coefficients": tmp_path / "coefficients.json"}


def cost_of_a_layer(spec: JobSpec) -> float:
    costs = measured_costs(spec.execution)
    assert costs is not None
    return costs.parts["llm"].layers[0].linear


def cut(spec: JobSpec, tp: int) -> JobSpec:
    """Return the spec with an LLM of `tp` slices."""
    return spec.with_execution(ExecutionSpec(units={"llm": UnitExecution(tp=tp)}))


def test_a_spec_takes_the_costs_of_whole_layers_unless_its_units_are_cut(files: dict[str, Path]) -> None:
    spec = read_spec(files["submit"])
    for tp, seconds in ((1, 1.0), (2, 0.6)):
        measured = with_coefficients(cut(spec, tp), files["coefficients"])
        check_coefficients(measured)
        assert cost_of_a_layer(measured) == seconds


def test_costs_of_slices_are_refused_for_a_job_of_whole_layers(files: dict[str, Path]) -> None:
    halves = with_coefficients(cut(read_spec(files["submit"]), 2), files["coefficients"]).execution
    whole = halves.model_copy(update={"units": {}, "trainer": "pipeline"})
    with pytest.raises(UserError, match="llm was measured at tensor-parallel width 2, but the unit's tp is 1"):
        check_coefficients(read_spec(files["submit"]).with_execution(whole))


def test_costs_of_whole_layers_are_refused_for_a_job_whose_layers_are_cut(files: dict[str, Path]) -> None:
    whole = with_coefficients(read_spec(files["submit"]), files["coefficients"]).execution
    with pytest.raises(UserError, match=r"llm was measured at tensor-parallel width 1, but the unit's tp is 2"):
        check_coefficients(cut(read_spec(files["submit"]), 2).with_execution(whole.model_copy(update={"units": TWO_SLICES})))


def test_a_job_submitted_by_its_trainers_takes_their_stages_their_execution_and_their_widths(files: dict[str, Path]) -> None:
    topology = PipelineTopology.model_validate({"schedule": "gpipe", "units": {"encoder": {}, "llm": {"pp": 3, "tp": 2}}})
    spec = _spec_of(argparse.Namespace(**files), read_spec(files["submit"]), topology)
    assert (spec.execution.schedule, spec.topology.stages) == ("gpipe", {"encoder": 1, "llm": 3})
    assert cost_of_a_layer(spec) == 0.6
    topology.check_execution(spec.execution, spec.topology.stages)


def test_costs_that_stand_in_the_spec_stay_when_the_execution_is_the_topologys(files: dict[str, Path]) -> None:
    inline = {"coefficients": json.loads(files["coefficients"].read_text())}
    files["submit"].write_text(json.dumps({"name": "j", "sources": [{"path": "/data"}], "execution": inline}))
    topology = PipelineTopology.model_validate({"schedule": "gpipe", "units": {"encoder": {}, "llm": {}}})
    spec = _spec_of(argparse.Namespace(coefficients=None), read_spec(files["submit"]), topology)
    assert (spec.execution.schedule, cost_of_a_layer(spec)) == ("gpipe", 1.0)


def test_a_width_that_was_not_measured_is_refused_with_those_that_were(files: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="llm was measured at tensor-parallel width 1, 2, but the unit's tp is 4"):
        with_coefficients(cut(read_spec(files["submit"]), 4), files["coefficients"])


def test_a_spec_that_does_not_name_its_kind_of_trainer_is_submitted_as_that_of_the_pipelines_that_train_it(
    files: dict[str, Path],
) -> None:
    files["submit"].write_text(json.dumps({"name": "j", "sources": [{"path": "/data"}], "execution": {"memory_gib": 3}}))
    topology = PipelineTopology.model_validate({"units": {"encoder": {}, "llm": {"pp": 3}}})
    spec = _spec_of(argparse.Namespace(coefficients=None), read_spec(files["submit"]), topology)
    assert (spec.execution.trainer, spec.execution.memory_gib) == ("pipeline", 3)
