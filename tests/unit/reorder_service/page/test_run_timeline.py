"""What stages and ranks did when in a committed step, beside its plan: as their ranks have measured it, on one axis."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace import message_codec
from headrace.measured import ALL_UNITS, MeasuredWork, Ran
from headrace.reorder_service.jobs.formation import Formation
from headrace.reorder_service.jobs.job_execution import execution_of
from headrace.reorder_service.jobs.planned_step import PlannedStep, RankCommit
from headrace.reorder_service.page import run_timeline as page
from headrace.reorder_service.page.run_timeline import RunTimeline, has_begins
from headrace.reorder_service.page.timeline_view import ShownStep, timeline_view
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.strategies import plan_of
from headrace.reorder_service.planning.unequal_pipelines import PipelineShape, for_pipelines, plan_for_pipelines
from headrace.schedule import Kind
from headrace.spec import JobSpec, parse_spec
from headrace.v1 import sessions_pb2

NOON = 1_800_000_000.0
F, B = Kind.FORWARD, Kind.BACKWARD


def job(replicas: int = 1) -> JobSpec:
    topology = {"replicas": replicas, "microbatches": 2, "stages": {"vision": 1, "llm": 2}}
    return parse_spec({"name": "job", "sources": [{"path": "/d"}], "global_batch": 8, "topology": topology})


def planned(replicas: int = 1, formation: Formation | None = None) -> PlannedStep:
    spec = job(replicas)
    ids, costs = np.arange(8), {unit: np.ones(8) for unit in ("vision", "llm")}
    execution = execution_of(spec, spec.topology.topology())
    execution = execution if formation is None else for_pipelines(execution)
    batch = make_batch(ids, costs, spec.topology.topology(), 0, execution=execution)
    plan = plan_of("auto", batch, 1, None) if formation is None else plan_for_pipelines("joint", batch, formation.pipelines)
    return PlannedStep(index=3, refs=[], sample_ids=ids, costs=costs, plan=plan, formation=formation)


def work(
    unit: str, stage: int, kind: Kind, *ran: tuple[float, float], clock_s: float = NOON, replica: int = 0, chunk: int = 0
) -> MeasuredWork:
    """Begins and seconds of the microbatches 0, 1, ..., on a host whose clock has 0 at `clock_s`."""
    actions = [Ran(k, chunk, begin_s, seconds) for k, (begin_s, seconds) in enumerate(ran)]
    return MeasuredWork.of(actions, clock_s, unit=unit, replica=replica, stage=stage, kind=kind)


def committed(step: PlannedStep, *of_ranks: Sequence[MeasuredWork], step_s: float = 2.0) -> PlannedStep:
    """The step with commits as they come over the wire."""
    for rank, works in enumerate(of_ranks):
        sent = [message_codec.measured_message(one).SerializeToString() for one in works]
        taken = tuple(message_codec.measured_value(sessions_pb2.MeasuredWork.FromString(one)) for one in sent)
        step.commits[rank] = RankCommit(rejected=(), loss=math.nan, step_s=step_s, data_wait_s=0.0, measured=taken)
    return step


def run_of(step: PlannedStep, *planned_rows: str) -> RunTimeline:
    run = RunTimeline.of(step, planned_rows)
    assert run is not None
    return run


def drawn(run: RunTimeline) -> dict[str, list[tuple[str, int, float, float]]]:
    def of(action: dict[str, Any]) -> tuple[str, int, float, float]:
        return action["kind"], action["microbatch"], action["begin_s"], action["end_s"]

    return {name: [of(action) for action in actions] for name, actions in run.rows}


def test_hosts_of_other_boot_times_are_on_one_axis_which_begins_with_the_first_action_of_all() -> None:
    vision = [work("vision", 0, F, (50.0, 0.25), (50.25, 0.5)), work("vision", 0, B, (51.5, 0.25))]
    llm = [work("llm", 0, F, (900.5, 0.5), clock_s=NOON - 850.0), work("llm", 0, B, (901.25, 0.25), clock_s=NOON - 850.0)]
    run = run_of(committed(planned(), vision, llm), "vision", "llm 0", "llm 1")
    assert run.aligned_by == page.BY_CLOCK
    assert drawn(run) == {
        "vision": [("forward", 0, 0.0, 0.25), ("forward", 1, 0.25, 0.75), ("backward", 0, 1.5, 1.75)],
        "llm 0": [("forward", 0, 0.5, 1.0), ("backward", 0, 1.25, 1.5)],
    }


def test_where_the_clocks_cannot_be_right_each_row_begins_with_its_first_action() -> None:
    vision, llm = [work("vision", 0, F, (5.0, 1.0))], [work("llm", 0, F, (5.5, 1.0), clock_s=NOON + 3_600.0)]
    run = run_of(committed(planned(), vision, llm), "vision", "llm 0")
    assert run.aligned_by == page.BY_FIRST_ACTION
    assert drawn(run) == {"vision": [("forward", 0, 0.0, 1.0)], "llm 0": [("forward", 0, 0.0, 1.0)]}


def test_chunks_of_a_stage_are_told_apart() -> None:
    works = [work("llm", 1, F, (0.0, 0.25)), work("llm", 1, F, (0.5, 0.25), chunk=1)]
    [(_, actions)] = run_of(committed(planned(), works), "llm 1").rows
    assert [action.get("chunk", 0) for action in actions] == [0, 1]


def test_ranks_with_all_units_show_their_microbatches() -> None:
    of_ranks = [[work(ALL_UNITS, 0, F, (float(rank), 0.5), (rank + 0.5, 0.25), replica=rank)] for rank in (0, 1)]
    run = run_of(committed(planned(), *of_ranks), "rank 0", "rank 1")
    assert drawn(run)["rank 1"] == [("whole", 0, 1.0, 1.5), ("whole", 1, 1.5, 1.75)]
    of_stages = run_of(committed(planned(replicas=2), *of_ranks), "replica 1 vision", "replica 1 llm 0")
    assert list(drawn(of_stages)) == ["replica 1 all units"], "such ranks may train what is planned for a pipeline"


def test_ranks_that_tell_their_units_apart_show_them_in_one_row() -> None:
    phases = [("vision", F, 0.0), ("llm", F, 1.0), ("llm", B, 2.0), ("vision", B, 4.0)]
    of_ranks = [[work(unit, 0, kind, (begin_s + rank, 0.5), replica=rank) for unit, kind, begin_s in phases] for rank in (0, 1)]
    run = run_of(committed(planned(), *of_ranks), "rank 1")
    [(name, actions)] = run.rows
    assert name == "rank 1"
    assert [(action["unit"], action["kind"], action["begin_s"]) for action in actions] == [
        ("vision", "forward", 1.0),
        ("llm", "forward", 2.0),
        ("llm", "backward", 3.0),
        ("vision", "backward", 5.0),
    ]


def test_the_wait_for_sums_of_gradients_is_drawn_behind_the_actions() -> None:
    forward, backward = work("llm", 0, F, (0.0, 0.5)), work("llm", 0, B, (1.0, 0.5))
    backward = replace(backward, reduction_begin_s=0.75, reduction_s=0.25)
    [(_, actions)] = run_of(committed(planned(), [forward, backward]), "llm 0").rows
    assert [action["kind"] for action in actions] == ["forward", "backward", "reduction"]
    assert actions[-1] == {"kind": "reduction", "unit": "llm", "begin_s": 1.75, "end_s": 2.0}
    strange = replace(backward, reduction_begin_s=math.inf)
    [(_, actions)] = run_of(committed(planned(), [strange]), "llm 0").rows
    assert [action["kind"] for action in actions] == ["backward"]


def test_only_rows_of_replicas_that_the_plan_shows_are_shown() -> None:
    of_ranks = [[work("vision", 0, F, (float(r), 1.0), replica=r)] for r in range(3)]
    step = committed(planned(replicas=3), *of_ranks)
    assert drawn(run_of(step, "replica 2 vision")) == {"replica 2 vision": [("forward", 0, 2.0, 3.0)]}
    assert RunTimeline.of(step, ["replica 7 vision"]) is None


@pytest.mark.parametrize(
    ("own", "shown", "names"),
    [
        (1, "replica 1 vision", ["vision"]),
        (2, "replica 1 vision", ["replica 0 vision"]),
        (8, "replica 3 vision", ["replica 6 vision", "replica 7 vision"]),
    ],
)
def test_a_unit_in_another_number_of_replicas_shows_those_that_work_for_the_plans(own: int, shown: str, names: list[str]) -> None:
    of_ranks = [[work("vision", 0, F, (float(r), 1.0), replica=r)] for r in range(own)]
    assert list(drawn(run_of(committed(planned(replicas=4), *of_ranks), shown))) == names


def test_pipelines_of_nodes_have_stages_of_their_own() -> None:
    shapes: list[dict[str, tuple[float, ...]]] = [{"vision": (1.0,), "llm": (0.5, 0.5)}, {"vision": (1.0,), "llm": (1.0,)}]
    pipelines = tuple(PipelineShape(stages=shape, microbatches=2) for shape in shapes)
    step = planned(2, Formation(generation=2, first_step=0, pipelines=pipelines))
    works = [work("llm", 0, F, (float(p), 1.0), replica=p) for p in (0, 1)]
    names = ["pipeline 0 llm 0", "pipeline 1 llm"]
    assert list(drawn(run_of(committed(step, works), *names))) == names


def test_what_an_older_trainer_says_is_no_run() -> None:
    older = MeasuredWork(unit="llm", replica=0, stage=0, kind=F, microbatches=(0,), seconds=(1.0,))
    step = committed(planned(), [older])
    assert not has_begins(step)
    assert RunTimeline.of(step, ["llm 0"]) is None


def test_strange_numbers_from_the_wire_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    good = work("llm", 0, F, (0.0, 1.0), (1.0, 0.0), (math.inf, 1.0), (2.0, math.nan))
    infinite = work("llm", 1, F, (0.0, 1.0), clock_s=math.inf)
    elsewhere = work("llm", 9, F, (0.0, 1.0), replica=-4)
    step = committed(planned(), [good, infinite, elsewhere])
    assert drawn(run_of(step, "vision", "llm 0", "llm 1")) == {"llm 0": [("forward", 0, 0.0, 1.0)]}
    many = committed(planned(), [work("llm", stage, F, *[(float(k), 0.5) for k in range(9)]) for stage in (0, 1)], step_s=99.0)
    monkeypatch.setattr(page, "MOST_ACTIONS", 12)
    assert [len(actions) for _, actions in run_of(many, "llm 0", "llm 1").rows] == [9, 3]


@pytest.mark.parametrize("has_run", [True, False])
def test_the_page_has_the_run_beside_the_plan_once_all_ranks_have_committed(has_run: bool) -> None:
    step = committed(planned(), [work("vision", 0, F, (0.0, 0.5))])
    shown = ShownStep.of(step, job(), has_run=has_run)
    seen = json.loads(timeline_view(shown, forecast_s=2.0, measured_s=2.5))
    assert [row["name"] for row in seen["rows"]] == ["vision", "llm 0", "llm 1"]
    action = {"kind": "forward", "microbatch": 0, "unit": "vision", "begin_s": 0.0, "end_s": 0.5}
    assert seen["measured_rows"] == ([{"name": "vision", "actions": [action]}] if has_run else None)
    assert seen["aligned_by"] == ("clock" if has_run else None)


def test_a_step_of_many_actions_is_told_in_few_bytes() -> None:
    """16 ranks of 200 actions each: forward and backward of 50 microbatches in two chunks."""
    random, num_bytes = np.random.default_rng(0), 0
    for rank in range(16):
        for kind in (F, B):
            begins = np.sort(random.uniform(0.0, 60.0, 100)).tolist()
            ran = [Ran(k // 2, k % 2, begin_s, 0.25) for k, begin_s in enumerate(begins)]
            works = MeasuredWork.of(ran, NOON, unit="llm", replica=rank // 8, stage=rank % 8, kind=kind)
            num_bytes += message_codec.measured_message(works).ByteSize()
    assert num_bytes < 36_000
