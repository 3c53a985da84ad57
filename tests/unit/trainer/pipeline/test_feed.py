"""What a process of a pipeline finds of its samples in what it is told of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import message_codec
from headrace.plan import StepPlan, Topology
from headrace.reorder_service.api.sessions import plan_events
from headrace.reorder_service.jobs.planned_step import PlannedStep
from headrace.reorder_service.jobs.sessions import EventBatch, Sessions
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.strategies import plan as make_plan
from headrace.sample import Probe, SampleRef
from headrace.spec import STRATEGIES, parse_spec
from headrace.trainer.pipeline.feed import StepFeed, packs_of, replicas_of, tickets_of
from headrace.trainer.pipeline.routes import Routes
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.v1 import sessions_pb2
from tests.examples import with_examples

degrees = st.integers(1, 4)
CROSSING = ("orchmllm", "auto")


def fed(topology: PipelineTopology, plan: StepPlan) -> None:
    """Every process of the topology is told of a step of that plan, and finds the parts of all samples that it needs."""
    ids = plan.sample_ids()
    step = PlannedStep(index=0, refs=[SampleRef(sample_id=i, shard=i % 3, row=i) for i in ids])
    step.probes = dict.fromkeys(ids, Probe(name="n", num_tokens=1, num_targets=1))
    step.cut(plan, part_samples=2, ticket=str)
    sessions, replicas = Sessions("job"), topology.units["llm"].dp
    for rank in range(topology.world_size):
        place = topology.place(rank)
        session = sessions.open(rank, topology.world_size, replicas, replicas_of(topology, place, replicas), unit=place.unit)
        (event,) = sessions_pb2.PlanEvents.FromString(plan_events(EventBatch([step]), session)).events
        routes = Routes(message_codec.plan_value(event.plan.whole), topology.replicas)
        needed = {sample for portion in routes.portions(place.unit, place.replica) for sample in portion.samples}
        samples = tickets_of(event.plan, routes, place)
        assert needed <= {sample for of_part in samples.values() for sample in of_part}
        assert all(needed & set(of_part) for of_part in samples.values()), "no part is fetched for nothing"


def told(step: PlannedStep, topology: PipelineTopology, rank: int) -> sessions_pb2.PlanEvent:
    """What the reorder service sends one process of a step."""
    replicas = topology.units["llm"].dp
    session = Sessions("job").open(rank, topology.world_size, replicas, replicas_of(topology, topology.place(rank), replicas))
    (event,) = sessions_pb2.PlanEvents.FromString(plan_events(EventBatch([step]), session)).events
    return event


def packed_step(strategy: str, dp: int, microbatches: int, lengths: list[int], seed: int) -> PlannedStep:
    """A planned step of samples in packs of at most 64 tokens."""
    document = {"name": "job", "sources": [{"path": "/d"}], "pack_tokens": 64, "text": {"max_tokens": 64}, "strategy": strategy}
    topology = {"replicas": dp, "microbatches": microbatches, "stages": {"vision": 1, "llm": 1}}
    spec = parse_spec(document | {"topology": topology, "seed": seed})
    rng = np.random.default_rng(seed)
    ids = range(len(lengths))
    step = PlannedStep(index=0, refs=[SampleRef(sample_id=i, shard=int(rng.integers(3)), row=i) for i in ids])
    step.probes = {
        i: Probe(name=f"n{i}", num_tokens=lengths[i], num_targets=1, image_patches=(4,) * int(rng.integers(3))) for i in ids
    }
    step.sample_ids = np.arange(len(lengths))
    step.cut(step.make_plan(spec, spec.topology, vocab=9, generation=1), part_samples=2, ticket=str)
    return step


def planned(strategy: str, dp: int, microbatches: int, samples: int, seed: int, own: dict[str, int] | None = None) -> StepPlan:
    rng = np.random.default_rng(seed)
    costs = {
        "vision": rng.lognormal(0, 1.2, samples) * (rng.random(samples) < 0.7) + 1e-4,
        "llm": rng.lognormal(0, 0.8, samples),
    }
    stages = {"vision": 1, "llm": 1}
    topology = Topology(replicas=dp, microbatches=microbatches, stages=stages)
    execution = Execution(may_cross_replicas=strategy in CROSSING, unit_replicas=own or {})
    return make_plan(strategy, np.arange(samples), costs, topology, seed, execution=execution)


def topology_of(vision: int, llm: int) -> PipelineTopology:
    units: dict[str, Any] = {"vision": {"dp": vision}, "llm": {"dp": llm}}
    return PipelineTopology.model_validate({"units": units})


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "auto"])
@with_examples(15)
@given(
    dp=st.integers(1, 3),
    microbatches=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    seed=st.integers(0, 2**32),
)
def test_the_llm_gets_every_pack_whole_in_one_portion(
    strategy: str, dp: int, microbatches: int, lengths: list[int], seed: int
) -> None:
    step = packed_step(strategy, dp, microbatches, lengths, seed)
    topology = topology_of(1, dp)
    seen: list[list[int]] = []
    for rank in range(topology.world_size):
        place = topology.place(rank)
        event = told(step, topology, rank)
        routes = Routes(message_codec.plan_value(event.plan.whole), topology.replicas)
        packs = packs_of(event.plan)
        feed = StepFeed(routes, place, tickets_of(event.plan, routes, place), packs, None, None, None)  # type: ignore[arg-type]
        for portion in routes.portions(place.unit, place.replica):
            of_portion = feed.packs(portion)
            assert [sample for pack in of_portion for sample in pack] == list(portion.samples if place.unit == "llm" else ())
            seen += of_portion
    assert sorted(sample for pack in seen for sample in pack) == list(range(len(lengths)))
    assert len(seen) == len(set(step.packs.values())), "no pack is torn apart"
    assert all(sum(lengths[sample] for sample in pack) <= 64 for pack in seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
@with_examples(40)
@given(vision=degrees, llm=degrees, microbatches=degrees, samples=st.integers(1, 32), seed=st.integers(0, 2**32))
def test_every_process_can_be_fed_by_every_strategy(
    strategy: str, vision: int, llm: int, microbatches: int, samples: int, seed: int
) -> None:
    fed(topology_of(vision, llm), planned(strategy, llm, microbatches, samples, seed))
    fed(topology_of(vision, llm), planned(strategy, llm, microbatches, samples, seed, {"vision": vision}))


def test_processes_follow_the_plan_where_a_unit_has_replicas_of_its_own() -> None:
    plan = planned("disttrain", 2, 4, 32, 0, {"vision": 3})
    routes = Routes(plan, {"vision": 3, "llm": 2})
    for replica in range(3):
        taken = [portion.samples for portion in routes.portions("vision", replica)]
        assert taken == [samples for samples in plan.unit_replicas["vision"][replica] if samples]
    with pytest.raises(ValueError, match="the plan deals unit 'vision' to 3 replicas, not to 4"):
        Routes(plan, {"vision": 4, "llm": 2})


def test_a_sample_is_in_each_unit_on_the_replica_that_it_is_planned_for() -> None:
    plan = planned("orchmllm", 3, 4, 48, 10)
    routes = Routes(plan, {"vision": 3, "llm": 3})
    assert routes.crosses
    for unit in ("vision", "llm"):
        for replica, microbatches in enumerate(plan.replicas):
            of_replica = {i for portion in routes.portions(unit, replica) for i in portion.samples}
            assert of_replica == {i for microbatch in microbatches for i in microbatch.units[unit]}
