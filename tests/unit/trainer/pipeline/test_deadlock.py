"""Every schedule of every plan in which the LLM never precedes an encoder runs to its end; what would not is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import HeadraceError, UserError
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.simulator import peak_memory
from headrace.reorder_service.planning.simulation.work import Work
from headrace.reorder_service.planning.strategies import plan as make_plan
from headrace.reorder_service.planning.strategies import plan_of, run_strategy
from headrace.schedule import Kind
from headrace.spec import parse
from headrace.trainer.pipeline.deadlock import check_order, check_rows
from headrace.trainer.pipeline.message_order import actions_of
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.topology import PipelineTopology, Place

SCHEDULES = (
    {},
    {"schedule": "gpipe"},
    {"schedule": "interleaved", "chunks": 2},
    {"schedule": "eager", "in_flight": 4},
    {"schedule": "zero-bubble"},
)


def topology_of(vision: dict[str, int], llm: dict[str, int], schedule: dict[str, object]) -> PipelineTopology:
    return parse(PipelineTopology, {**schedule, "units": {"vision": vision, "llm": llm}}, "topology")


def routes_of(plan: StepPlan, topology: PipelineTopology) -> Routes:
    return Routes(plan, topology.replicas)


@pytest.mark.parametrize("strategy", ["random", "disttrain", "entrain", "joint", "orchmllm"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.get("schedule", "1f1b"))
def test_what_the_planner_plans_runs(schedule: dict[str, object], strategy: str) -> None:
    rng = np.random.default_rng(1)
    for (encoder_dp, llm_dp), llm_pp in itertools.product([(1, 1), (2, 3), (3, 2), (2, 2), (4, 2)], [1, 3]):
        topology = topology_of({"dp": encoder_dp, "pp": 2}, {"dp": llm_dp, "pp": llm_pp}, schedule)
        planned = Topology(replicas=llm_dp, microbatches=6, stages=topology.stages)
        costs = {unit: rng.pareto(1.5, 40) + 0.1 for unit in topology.stages}
        for own in ({}, {"vision": encoder_dp}):
            plan = make_plan(strategy, np.arange(40), costs, planned, seed=1, execution=Execution(unit_replicas=own))
            for rank in range(topology.world_size):
                check_order(topology, routes_of(plan, topology), [topology.place(rank)])


def test_a_sample_that_the_llm_has_before_its_encoder_is_refused() -> None:
    topology = topology_of({}, {}, {})
    microbatches = [Microbatch(units={"vision": (seen,), "llm": (read,)}) for seen, read in ((1, 0), (2, 1), (0, 2))]
    planned = Topology(replicas=1, microbatches=3, stages=topology.stages)
    plan = StepPlan(strategy="by hand", seed=0, topology=planned, replicas=[microbatches])
    with pytest.raises(HeadraceError, match=r"'1f1b' wait for itself: the \w+ of microbatch \d on stage 0 of"):
        check_order(topology, routes_of(plan, topology), [topology.place(0)])


def test_it_is_refused_too_where_the_sample_changes_its_replica() -> None:
    topology = topology_of({"dp": 2}, {"dp": 2}, {})
    first, second = (
        [Microbatch(units={"vision": tuple(seen), "llm": tuple(read)}) for seen, read in of_replica]
        for of_replica in ([([0], [0]), ([1], [1]), ([9], [2])], [([3], [3, 9]), ([4], [4]), ([2], [])])
    )
    planned = Topology(replicas=2, microbatches=3, stages=topology.stages)
    routes = routes_of(StepPlan(strategy="by hand", seed=0, topology=planned, replicas=[first, second]), topology)
    assert routes.crosses
    for rank in range(topology.world_size):
        with pytest.raises(HeadraceError, match="'1f1b' wait for itself"):
            check_order(topology, routes, [topology.place(rank)])


def test_a_plan_that_names_how_deep_it_runs_is_run_so() -> None:
    topology = topology_of({"pp": 2}, {"pp": 2}, {"schedule": "eager"})
    planned = Topology(replicas=1, microbatches=6, stages=topology.stages)
    plan = make_plan("random", np.arange(6), dict.fromkeys(topology.stages, np.ones(6)), planned, seed=0)

    def opening(in_flight: int | None) -> int:
        actions = actions_of(topology, routes_of(replace(plan, in_flight=in_flight), topology), "vision", 0)[0]
        return [action.kind for action in actions].index(Kind.BACKWARD)

    assert [opening(in_flight) for in_flight in (None, 4, 5)] == [6, 4, 5]


@pytest.mark.parametrize("frozen_llm", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.get("schedule", "1f1b"))
def test_more_rows_than_a_stage_may_keep_are_refused_where_the_simulator_finds_them(
    schedule: dict[str, object], frozen_llm: bool
) -> None:
    rng = np.random.default_rng(2)
    rows = {unit: rng.integers(1, 50, 40) for unit in ("vision", "llm")}
    stages = {"vision": 2, "llm": 3}
    how = Execution(
        **({"schedule": "1f1b"} | schedule),
        backward_factors={"llm": 2.0 - frozen_llm},
        weight_gradient_factors={"llm": 1.0 - frozen_llm},
    )
    memory = {unit: rows[unit] * stages[unit] for unit in stages}
    planned = Topology(replicas=2, microbatches=6, stages=stages)
    batch = make_batch(np.arange(40), {u: r.astype(float) for u, r in rows.items()}, planned, 1, execution=how, memory=memory)
    plan, (_, slots) = plan_of("entrain", batch), run_strategy("entrain", batch)
    expected = peak_memory(Work.of(batch, slots))

    def check(replica: int, stage: int, limit: int) -> None:
        unit, index = ("vision", stage) if stage < 2 else ("llm", stage - 2)
        llm = {"dp": 2, "pp": 3, "max_rows": limit, "frozen": frozen_llm}
        topology = topology_of({"dp": 2, "pp": 2, "max_rows": limit}, llm, schedule)
        routes = routes_of(plan, topology)
        num_rows: dict[Kind, dict[int, int]] = {Kind.FORWARD: {}, Kind.BACKWARD: {}}
        for portion in routes.portions(unit, replica):
            for kind, microbatch in ((Kind.FORWARD, portion.forward), (Kind.BACKWARD, portion.backward)):
                before = num_rows[kind].get(microbatch, 0)
                num_rows[kind][microbatch] = before + int(rows[unit][list(portion.samples)].sum())
        actions = actions_of(topology, routes, unit, replica)[index]
        check_rows(topology, Place(unit, replica, index, 0), actions, num_rows.__getitem__)

    for replica, stage in itertools.product(range(2), range(5)):
        most = math.ceil(expected[replica, stage] - 1e-9)
        check(replica, stage, most)
        with pytest.raises(UserError, match=rf"replica {replica} would keep \d+ rows .* more than the max_rows {most - 1} "):
            check(replica, stage, most - 1)
