"""What a process of a pipeline finds of its samples in what it is told of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import message_codec
from headrace.errors import UserError
from headrace.plan import StepPlan, Topology
from headrace.reorder_service.api.sessions import plan_events
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.jobs.sessions import EventBatch, Sessions
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.strategies import plan as make_plan
from headrace.sample import SampleRef
from headrace.spec import STRATEGIES
from headrace.trainer.pipeline.feed import replicas_of, tickets_of
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.v1 import sessions_pb2

degrees = st.integers(1, 4)


def fed(topology: PipelineTopology, plan: StepPlan) -> None:
    """Every process of the topology is told of a step of that plan, and finds the parts of all samples that it needs."""
    ids = plan.sample_ids()
    step = PlannedStep(index=0, refs=[SampleRef(sample_id=i, shard=i % 3, row=i) for i in ids])
    step.cut(plan, part_samples=2, ticket=str)
    sessions, replicas = Sessions("job"), topology.units["llm"].dp
    for rank in range(topology.world_size):
        place = topology.place(rank)
        session = sessions.open(rank, topology.world_size, replicas, replicas_of(topology, place, replicas))
        (event,) = sessions_pb2.PlanEvents.FromString(plan_events(EventBatch([step]), session)).events
        routes = Routes(message_codec.plan_value(event.plan.whole), topology.replicas)
        needed = {sample for portion in routes.portions(place.unit, place.replica) for sample in portion.samples}
        samples = tickets_of(event.plan, routes, place)
        assert needed <= {sample for of_part in samples.values() for sample in of_part}
        assert all(needed & set(of_part) for of_part in samples.values()), "no part is fetched for nothing"


def planned(strategy: str, dp: int, microbatches: int, samples: int, seed: int, own: dict[str, int] | None = None) -> StepPlan:
    rng = np.random.default_rng(seed)
    costs = {
        "vision": rng.lognormal(0, 1.2, samples) * (rng.random(samples) < 0.7) + 1e-4,
        "llm": rng.lognormal(0, 0.8, samples),
    }
    topology = Topology(replicas=dp, microbatches=microbatches, stages={"vision": 1, "llm": 1})
    return make_plan(strategy, np.arange(samples), costs, topology, seed, execution=Execution(unit_replicas=own or {}))


def topology_of(vision: int, llm: int) -> PipelineTopology:
    units: dict[str, Any] = {"vision": {"dp": vision}, "llm": {"dp": llm}}
    return PipelineTopology.model_validate({"units": units})


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=40)
@given(vision=degrees, llm=degrees, microbatches=degrees, samples=st.integers(1, 32), seed=st.integers(0, 2**32))
def test_every_process_can_be_fed_by_every_strategy_that_the_topology_takes(
    strategy: str, vision: int, llm: int, microbatches: int, samples: int, seed: int
) -> None:
    topology = topology_of(vision, llm)
    try:
        topology.check_strategy(strategy)
    except UserError:
        return
    fed(topology, planned(strategy, llm, microbatches, samples, seed))
    fed(topology, planned(strategy, llm, microbatches, samples, seed, {"vision": vision}))


def test_processes_follow_the_plan_where_a_unit_has_replicas_of_its_own() -> None:
    plan = planned("disttrain", 2, 4, 32, 0, {"vision": 3})
    routes = Routes(plan, {"vision": 3, "llm": 2})
    for replica in range(3):
        taken = [portion.samples for portion in routes.portions("vision", replica)]
        assert taken == [samples for samples in plan.unit_replicas["vision"][replica] if samples]
    with pytest.raises(ValueError, match="the plan deals unit 'vision' to 3 replicas, not to 4"):
        Routes(plan, {"vision": 4, "llm": 2})


def test_a_plan_that_sends_samples_elsewhere_is_refused_all_the_same() -> None:
    with pytest.raises(UserError, match="on another lane than in the llm: give the unit one replica, or take another strategy"):
        fed(topology_of(2, 2), planned("orchmllm", 2, 4, 32, 10))
