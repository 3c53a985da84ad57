"""Every schedule of every plan in which the LLM never precedes an encoder runs to its end; what would not is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headrace.errors import HeadraceError
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.spec import parse
from reorder_service.planning.strategies import plan as make_plan
from trainer.pipeline.order import check_order
from trainer.pipeline.routes import Routes
from trainer.pipeline.topology import PipelineTopology

SCHEDULES = ({}, {"schedule": "gpipe"}, {"schedule": "interleaved", "chunks": 2}, {"schedule": "eager", "in_flight": 4})


def topology_of(vision: dict[str, int], llm: dict[str, int], schedule: dict[str, object]) -> PipelineTopology:
    return parse(PipelineTopology, {**schedule, "units": {"vision": vision, "llm": llm}}, "topology")


def routes_of(plan: StepPlan, topology: PipelineTopology) -> Routes:
    return Routes(plan, topology.replicas)


@pytest.mark.parametrize("strategy", ["random", "disttrain", "entrain", "joint", "orchmllm"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.get("schedule", "1f1b"))
def test_what_the_planner_plans_runs(schedule: dict[str, object], strategy: str) -> None:
    rng = np.random.default_rng(1)
    for (encoder_dp, llm_dp), llm_pp in itertools.product([(1, 1), (2, 3), (3, 2), (2, 2)], [1, 3]):
        topology = topology_of({"dp": encoder_dp, "pp": 2}, {"dp": llm_dp, "pp": llm_pp}, schedule)
        planned = Topology(replicas=llm_dp, microbatches=6, stages=topology.stages)
        costs = {unit: rng.pareto(1.5, 40) + 0.1 for unit in topology.stages}
        plan = make_plan(strategy, np.arange(40), costs, planned, seed=1)
        for rank in range(topology.world_size):
            check_order(topology, routes_of(plan, topology), topology.place(rank))


def test_a_sample_that_the_llm_has_before_its_encoder_is_refused() -> None:
    topology = topology_of({}, {}, {})
    microbatches = [Microbatch(units={"vision": (seen,), "llm": (read,)}) for seen, read in ((1, 0), (2, 1), (0, 2))]
    planned = Topology(replicas=1, microbatches=3, stages=topology.stages)
    plan = StepPlan(strategy="by hand", seed=0, topology=planned, replicas=[microbatches])
    with pytest.raises(HeadraceError, match=r"'1f1b' wait for itself: the \w+ of microbatch \d on stage 0 of"):
        check_order(topology, routes_of(plan, topology), topology.place(0))
