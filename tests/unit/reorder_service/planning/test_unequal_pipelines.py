"""Plans for pipelines that are not alike: every sample once, in order, and all pipelines ending together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import message_codec
from headrace.plan import LLM, Topology
from headrace.reorder_service.planning.batch import Batch, make_batch, slots_of
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.packing import pack_batch, plan_of_samples
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.strategies import STRATEGIES, plan_of
from headrace.reorder_service.planning.unequal_pipelines import PipelineShape, plan_for_pipelines, simulated_work
from tests.examples import with_examples

TOPOLOGY = Topology(replicas=2, microbatches=4, stages={"vision": 1, LLM: 1})
THREE = PipelineShape(stages={"vision": (1.0,), LLM: (0.5, 0.5)}, microbatches=10)
TWO = PipelineShape(stages={"vision": (1.0,), LLM: (1.0,)}, microbatches=6)
BROKEN = replace(TWO, microbatches=0)


def batch_of(num_samples: int, seed: int = 0, **execution: object) -> Batch:
    """Samples of which some have large images."""
    random = np.random.default_rng(seed)
    vision = random.lognormal(0, 1, num_samples)
    costs = {"vision": vision, LLM: random.lognormal(1, 0.3, num_samples) + vision / 2}
    return make_batch(np.arange(100, 100 + num_samples), costs, TOPOLOGY, seed, execution=Execution(**execution))  # type: ignore[arg-type]


@st.composite
def shapes(draw: st.DrawFn) -> PipelineShape:
    def shares() -> tuple[float, ...]:
        parts = np.array(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)), np.float64)
        return tuple((parts / parts.sum()).tolist())

    return PipelineShape(stages={"vision": shares(), LLM: shares()}, microbatches=draw(st.integers(0, 5)))


@with_examples(15)
@given(
    st.lists(shapes(), min_size=1, max_size=4).filter(lambda found: any(one.microbatches for one in found)),
    st.integers(1, 30),
    st.sampled_from(STRATEGIES),
)
def test_every_sample_is_in_every_unit_once_in_an_allowed_order_and_stays_in_its_pipeline(
    pipelines: list[PipelineShape], num_samples: int, strategy: str
) -> None:
    batch = batch_of(num_samples)
    plan = plan_for_pipelines(strategy, batch, pipelines)
    plan.check()
    assert plan.sample_ids() == batch.sample_ids.tolist()
    assert [len(microbatches) for microbatches in plan.replicas] == [pipeline.microbatches for pipeline in pipelines]
    for microbatches in plan.replicas:
        in_units = [sorted(sample for one in microbatches for sample in one.units[unit]) for unit in batch.units]
        assert in_units[0] == in_units[1]
    sent = message_codec.plan_value(message_codec.plan_message(plan))
    assert [tuple(replica) for replica in sent.replicas] == [tuple(replica) for replica in plan.replicas]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_batch_gives_the_same_plan(strategy: str) -> None:
    first, second = (plan_for_pipelines(strategy, batch_of(30), [THREE, TWO]) for _ in range(2))
    assert first == second


def test_each_pipeline_gets_work_in_proportion_to_its_speed() -> None:
    """Without encoders a pipeline with stages half as long does twice the work in the time, but for filling and draining."""
    halves, whole = (PipelineShape(stages={LLM: (1 / n,) * n}, microbatches=16 * n) for n in (2, 1))
    topology = Topology(replicas=2, microbatches=24, stages={LLM: 1})
    batch = make_batch(np.arange(960), {LLM: np.ones(960)}, topology, 0)
    plan = plan_for_pipelines("disttrain", batch, [halves, whole])
    faster, slower = (sum(len(one.sample_ids) for one in microbatches) for microbatches in plan.replicas)
    assert faster / slower == pytest.approx(2.0, rel=0.05)
    assert plan.predicted is not None
    assert plan.predicted.iteration_s < 1.05 * plan.predicted.lower_bound_s


def test_a_pipeline_that_lacks_a_node_gets_no_sample() -> None:
    plan = plan_for_pipelines("auto", batch_of(20), [THREE, BROKEN, TWO])
    assert [len(microbatches) for microbatches in plan.replicas] == [10, 0, 6]


def test_samples_are_deferred_as_the_strategy_does_it() -> None:
    plan = plan_for_pipelines("entrain", batch_of(64), [THREE, TWO])
    assert any(one.units["vision"] != one.units[LLM] for microbatches in plan.replicas for one in microbatches)


def test_one_pipeline_is_planned_as_the_strategy_plans_one_replica() -> None:
    batch = replace(batch_of(40), topology=Topology(replicas=1, microbatches=8, stages={"vision": 1, LLM: 2}))
    alone = plan_for_pipelines("auto", batch, [replace(THREE, microbatches=8)])
    usual = plan_of("auto", batch)
    assert (alone.replicas[0], alone.predicted, alone.chosen) == (usual.replicas[0], usual.predicted, usual.chosen)


def test_stages_of_unequal_length_take_their_share_of_the_units_time() -> None:
    uneven = PipelineShape(stages={"vision": (1.0,), LLM: (0.75, 0.25)}, microbatches=1)
    batch = replace(batch_of(1), topology=uneven.topology)
    work = simulated_work(batch, np.zeros((2, 1), np.int64), uneven)
    forward = work.seconds[0, 0, :, 0]
    assert forward == pytest.approx([batch.costs[0, 0], 0.75 * batch.costs[1, 0], 0.25 * batch.costs[1, 0]])
    assert simulate(work).iteration_s == pytest.approx(3 * batch.costs.sum())


def test_the_depth_that_all_pipelines_can_hold_is_planned_and_predicted() -> None:
    """Four stages hold more samples of the llm than one does, as each of them holds few layers of it."""
    four = PipelineShape(stages={"vision": (1.0,), LLM: (0.25,) * 4}, microbatches=10)
    batch = batch_of(60, schedule="eager", memory_limit=60.0)
    plan = plan_for_pipelines("disttrain", batch, [four, TWO])
    assert plan.in_flight is not None
    assert plan.predicted is not None
    execution = replace(batch.execution, in_flight=plan.in_flight)
    seconds = []
    for shape, microbatches in zip((four, TWO), plan.replicas, strict=True):
        alone = replace(plan, topology=shape.topology, replicas=[microbatches])
        ids = np.array(alone.sample_ids())
        costs = dict(zip(batch.units, batch.costs[:, ids - 100], strict=True))
        part = make_batch(ids, costs, shape.topology, 0, execution=execution)
        seconds.append(simulate(simulated_work(part, slots_of(alone, ids), shape)).iteration_s)
    assert plan.predicted.iteration_s == pytest.approx(max(seconds))


def test_packs_keep_the_pipelines_and_their_microbatches() -> None:
    batch = batch_of(40)
    of_packs, packs = pack_batch(batch, np.full(40, 10), 30, padded=True)
    plan = plan_of_samples(plan_for_pipelines("joint", of_packs, [THREE, TWO]), batch, packs)
    plan.check()
    assert plan.sample_ids() == batch.sample_ids.tolist()
    assert [len(microbatches) for microbatches in plan.replicas] == [10, 6]


def test_pipelines_of_which_none_takes_a_microbatch_are_refused() -> None:
    with pytest.raises(ValueError, match="none of 1 pipelines takes a microbatch"):
        plan_for_pipelines("auto", batch_of(4), [BROKEN])


def test_shares_that_are_no_whole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the shares of the stages of unit 'llm' must add up to 1"):
        PipelineShape(stages={LLM: (0.5, 0.4)}, microbatches=1)
