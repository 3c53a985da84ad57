"""What stages and ranks do when in a planned step: all of its actions, none before its stage is free, and as long as forecast."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.reorder_service.jobs.formation import Formation
from headrace.reorder_service.jobs.job_execution import execution_of
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.page import timeline_view as page
from headrace.reorder_service.page.timeline_view import ShownStep, timeline_view
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.strategies import plan_of
from headrace.reorder_service.planning.unequal_pipelines import PipelineShape, for_pipelines, plan_for_pipelines
from headrace.spec import JobSpec, parse_spec

SAMPLES = 24
STAGES = {"encoder": 1, "llm": 2}


def job(
    execution: dict[str, Any] | None = None, replicas: int = 2, microbatches: int = 3, encoder: str = "encoder", llm: int = 2
) -> JobSpec:
    stages = {encoder: 1, "llm": llm}
    topology = {"replicas": replicas, "microbatches": microbatches, "stages": stages}
    document = {"name": "job", "sources": [{"path": "/d"}], "global_batch": SAMPLES, "topology": topology}
    return parse_spec(document | ({"execution": execution} if execution else {}))


def planned(spec: JobSpec, formation: Formation | None = None) -> tuple[PlannedStep, float]:
    """A step of samples of all sizes, and the seconds that its plan says it takes."""
    random, topology = np.random.default_rng(0), spec.topology.topology()
    costs = {unit: random.uniform(0.1, 2.0, SAMPLES) for unit in topology.stages}
    ids, execution = np.arange(SAMPLES), execution_of(spec, topology)
    execution = execution if formation is None else for_pipelines(execution)
    batch = make_batch(ids, costs, topology, 0, execution=execution)
    plan = plan_of("auto", batch, 1, None) if formation is None else plan_for_pipelines("joint", batch, formation.pipelines)
    step = PlannedStep(index=7, refs=[], sample_ids=ids, costs=costs, plan=plan, formation=formation)
    assert plan.predicted is not None
    return step, plan.predicted.iteration_s


def view(step: PlannedStep, spec: JobSpec) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads(timeline_view(ShownStep.of(step, spec, has_run=False), forecast_s=math.nan, measured_s=2.5))
    return seen


def check_rows(rows: list[dict[str, Any]], step_s: float) -> None:
    for row in rows:
        ends_s = 0.0
        for action in sorted(row["actions"], key=lambda action: action["begin_s"]):
            assert action["begin_s"] >= ends_s - 1e-3, row["name"]
            ends_s = action["end_s"]
    assert max(action["end_s"] for row in rows for action in row["actions"]) == pytest.approx(step_s, rel=1e-4)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_the_stages_of_a_pipeline(schedule: str) -> None:
    spec = job({"trainer": "pipeline", "schedule": schedule})
    step, step_s = planned(spec)
    seen = view(step, spec)
    assert (seen["step"], seen["forecast_s"], seen["measured_s"], seen["measured_costs"]) == (7, None, 2.5, False)
    assert (seen["replicas"], seen["measured_rows"]) == (2, None)
    names = [f"replica {r} {stage}" for r in (0, 1) for stage in ("encoder", "llm 0", "llm 1")]
    assert [row["name"] for row in seen["rows"]] == names
    check_rows(seen["rows"], step_s)
    kinds = {action["kind"] for row in seen["rows"] for action in row["actions"]}
    assert kinds == {"forward", "backward"} | ({"weight"} if schedule == "zero-bubble" else set())
    assert {action["unit"] for action in seen["rows"][1]["actions"]} == {"llm"}
    assert {action["microbatch"] for row in seen["rows"] for action in row["actions"]} == {0, 1, 2}


@pytest.mark.parametrize(
    ("execution", "encoder"),
    [
        ({"trainer": "colocated"}, "encoder"),
        ({"trainer": "colocated", "meet": "step"}, "encoder"),
        ({"trainer": "fsdp"}, "vision"),
    ],
    ids=["microbatch", "step", "phases"],
)
def test_ranks_that_have_all_units(execution: dict[str, Any], encoder: str) -> None:
    spec = job(execution, encoder=encoder, llm=1)
    step, step_s = planned(spec)
    seen = view(step, spec)
    assert [row["name"] for row in seen["rows"]] == ["rank 0", "rank 1"]
    check_rows(seen["rows"], step_s)
    of_first = [(action["kind"], action["unit"]) for action in seen["rows"][0]["actions"] if action["microbatch"] == 0]
    assert of_first == [("forward", encoder), ("forward", "llm"), ("backward", "llm"), ("backward", encoder)]


def test_units_that_share_ranks() -> None:
    spec = job({"trainer": "pipeline", "units": {"encoder": {"on": "llm", "dp": 4}}})
    step, step_s = planned(spec)
    seen = view(step, spec)
    assert {action["unit"] for row in seen["rows"] for action in row["actions"]} == set(STAGES)
    assert max(action["end_s"] for row in seen["rows"] for action in row["actions"]) == pytest.approx(step_s, rel=1e-4)


def test_unequal_pipelines_of_nodes() -> None:
    shapes = [{"encoder": (1.0,), "llm": (0.5, 0.5)}, {"encoder": (1.0,), "llm": (1.0,)}]
    pipelines = tuple(PipelineShape(stages=shape, microbatches=count) for shape, count in zip(shapes, (4, 2), strict=True))
    spec = job()
    step, step_s = planned(spec, Formation(generation=2, first_step=0, pipelines=pipelines))
    seen = view(step, spec)
    assert [row["name"] for row in seen["rows"]] == [
        *(f"pipeline 0 {stage}" for stage in ("encoder", "llm 0", "llm 1")),
        *(f"pipeline 1 {stage}" for stage in ("encoder", "llm")),
    ]
    check_rows(seen["rows"], step_s)


def test_of_many_replicas_the_slowest_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job(replicas=6, microbatches=2)
    step, step_s = planned(spec)
    seen = view(step, spec)
    shown = {row["name"].rpartition(" ")[0][:9] for row in seen["rows"]}
    assert (seen["replicas"], len(shown)) == (6, page.MOST_REPLICAS)
    check_rows(seen["rows"], step_s)
    monkeypatch.setattr(page, "MOST_ACTIONS", 1)
    fewer = view(step, spec)
    assert len({row["name"][:9] for row in fewer["rows"]}) == 1  # the slowest, however much it does
    check_rows(fewer["rows"], step_s)


def test_what_cannot_be_simulated_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job()
    step, _ = planned(spec)
    assert step.plan is not None
    unequal = PlannedStep(index=0, refs=[], sample_ids=step.sample_ids, costs=step.costs, plan=replace(step.plan, predicted=None))
    assert timeline_view(ShownStep.of(unequal, spec, has_run=False), forecast_s=1.0, measured_s=1.0) == "null"
    without_costs = PlannedStep(index=0, refs=[], plan=step.plan)
    assert timeline_view(ShownStep.of(without_costs, spec, has_run=False), forecast_s=1.0, measured_s=1.0) == "null"
    monkeypatch.setattr(page, "MOST_SIMULATED", 10)
    assert timeline_view(ShownStep.of(step, spec, has_run=False), forecast_s=1.0, measured_s=1.0) == "null"


def test_a_simulation_is_of_one_plan() -> None:
    spec = job()
    step, _ = planned(spec)
    seen = ShownStep.of(step, spec, has_run=False)
    assert seen.is_of(step, has_run=False)
    assert not seen.is_of(step, has_run=True)
    step.plan = planned(spec)[0].plan
    assert not seen.is_of(step, has_run=False)
