"""For which pipelines steps are planned: from what nodes report to the shares that they compute, which leave nothing out."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import message_codec
from headrace.plan import LLM, StepPlan, Topology
from headrace.reorder_service.jobs.formation import formation_of
from headrace.reorder_service.nodes.membership import LEAST_SHARE, Record
from headrace.reorder_service.nodes.snapshots import job_formation, mean_microbatch, templates_of
from headrace.reorder_service.planning.batch import make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.unequal_pipelines import plan_for_pipelines
from headrace.trainer.recovery.layout import Layout
from headrace.trainer.recovery.nodes_spec import RecoverableUnit, RecoverySpec
from headrace.v1.membership_pb2 import Formation, Pipeline, PipelineStage, Snapshot
from tests.examples import with_examples
from tests.unit.reorder_service.nodes.test_membership import UNITS, World, make_spec

SPEC = RecoverySpec(nodes=5, units={unit: RecoverableUnit() for unit in UNITS})


def formation(generation: int, first_step: int, snapshot: Snapshot | None = None) -> Formation:
    pipelines = [Pipeline(num_microbatches=8)] if snapshot is None else snapshot.pipelines
    return Formation(generation=generation, first_step=first_step, pipelines=pipelines)


def starts(world: World) -> list[tuple[int, int]]:
    return [(one.generation, one.first_step) for one in world.membership.record.formations]


@pytest.fixture
def world() -> World:
    world = World(make_spec())
    world.join(*"abcde")
    world.settle()
    return world


def test_a_step_is_planned_for_the_newest_pipelines_that_begin_with_it_or_before(world: World) -> None:
    assert world.membership.form(formation(1, 0, world.membership.snapshot), 0)
    assert world.membership.form(formation(3, 5, world.membership.snapshot), 4)
    known = [job_formation(one, world.membership.record.spec.profile) for one in world.membership.record.formations]
    found = [formation_of(known, step) for step in (0, 4, 5, 9)]
    assert [one.generation for one in found if one is not None] == [1, 1, 3, 3]
    assert formation_of((), 4) is None


def test_pipelines_that_no_uncommitted_step_is_planned_for_are_forgotten(world: World) -> None:
    world.membership.form(formation(1, 0), 0)
    world.membership.form(formation(2, 4), 3)
    assert starts(world) == [(1, 0), (2, 4)]
    world.membership.form(formation(3, 4), 3)  # the second ones never began a step
    assert starts(world) == [(1, 0), (3, 4)]
    world.membership.form(formation(4, 9), 8)
    assert starts(world) == [(3, 4), (4, 9)]


def test_a_report_that_is_repeated_or_late_or_of_no_pipelines_changes_nothing(world: World) -> None:
    world.membership.form(formation(2, 4), 3)
    for again in (formation(2, 4), formation(1, 0), Formation(generation=5)):
        assert not world.membership.form(again, 3)
    assert starts(world) == [(2, 4)]


def test_a_later_leader_knows_the_pipelines_and_the_units_times(world: World) -> None:
    world.membership.form(formation(2, 4, world.membership.snapshot), 3)
    world.membership.weigh({"encoder": 1.0, "llm": 3.0})
    record = world.membership.record
    assert Record.of_json(record.to_json()) == record


def test_a_pipelines_stages_have_the_share_of_their_layers_seconds() -> None:
    spec = make_spec()
    spec.profile.seconds[:] = [1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    stages = [("encoder", 0, 1), ("encoder", 1, 2), ("llm", 0, 4), ("llm", 4, 6)]
    pipeline = Pipeline(
        stages=[PipelineStage(rank=n, unit=unit, first_layer=a, end_layer=b) for n, (unit, a, b) in enumerate(stages)],
        num_microbatches=8,
    )
    (shape,) = job_formation(Formation(generation=1, pipelines=[pipeline]), spec.profile).pipelines
    assert shape.stages == {"encoder": (0.25, 0.75), "llm": (0.5, 0.5)}
    assert shape.microbatches == 8


def test_pipelines_are_planned_from_what_the_jobs_samples_take_in_each_unit(world: World) -> None:
    """Two encoder layers of a fifth of the time each need no two of five nodes."""
    record = world.membership.record
    assert record.weighted_spec == record.spec
    world.membership.weigh({"encoder": 0.5, "llm": 9.5})
    seconds = world.membership.record.weighted_spec.profile.seconds
    assert seconds == pytest.approx([0.25, 0.25, *[9.5 / 6] * 6])
    encoders = {share: len(templates_of(record_of(world, share)).of_size[3].nodes_of("encoder")) for share in (0.05, 0.9)}
    assert encoders == {0.05: 1, 0.9: 2}


def record_of(world: World, share: float):
    world.membership.weigh({"encoder": share, "llm": 1 - share})
    return world.membership.record.weighted_spec


def test_a_unit_that_the_first_samples_do_not_need_takes_a_little_time_all_the_same(world: World) -> None:
    world.membership.weigh({"encoder": 0.0, "llm": 2.0})
    assert sum(world.membership.record.weighted_spec.profile.seconds[:2]) == pytest.approx(LEAST_SHARE * 2.0)


def test_times_of_other_units_than_the_nodes_have_are_not_used(world: World) -> None:
    world.membership.weigh({"vision": 1.0, "llm": 2.0})
    assert world.membership.record.weighted_spec == world.membership.record.spec


# -- what the nodes compute -------------------------------------------------------------------------------------------


def plan_for(snapshot: Snapshot, strategy: str, num_samples: int) -> StepPlan:
    """As it reaches the nodes."""
    random = np.random.default_rng(num_samples)
    encoder = random.lognormal(0, 1, num_samples)
    costs = {"encoder": encoder, LLM: encoder / 2 + random.lognormal(0, 0.5, num_samples)}
    batch = make_batch(np.arange(num_samples), costs, Topology(replicas=2, microbatches=4, stages={"encoder": 1, LLM: 1}), 0)
    shapes = job_formation(formation(snapshot.generation, 0, snapshot), make_spec().profile).pipelines
    return message_codec.plan_value(message_codec.plan_message(plan_for_pipelines(strategy, batch, shapes)))


def layouts(snapshot: Snapshot) -> list[Layout]:
    """Of the first node of each pipeline that lacks none."""
    found = [Layout.of(snapshot, node.name, SPEC) for node in snapshot.nodes]
    whole = [layout for layout in found if layout is not None and layout.shares[layout.pipeline]]
    return list({layout.pipeline: layout for layout in whole}.values())


def computed(plans: list[StepPlan]) -> list[int]:
    """Samples of all units; each plan is one that its pipeline can run."""
    for plan in plans:
        plan.check()
    for unit in UNITS:
        yields = [one.units[unit] for plan in plans for one in plan.replicas[0]]
        assert sorted(chain.from_iterable(yields)) == sorted(sample for plan in plans for sample in plan.sample_ids())
    return sorted(sample for plan in plans for sample in plan.sample_ids())


@with_examples(12)
@given(
    st.lists(st.sampled_from("abcdefghi"), min_size=1, max_size=2, unique=True),
    st.sampled_from(["random", "entrain", "orchmllm", "disttrain"]),
    st.integers(1, 24),
    st.booleans(),
    st.data(),
)
def test_after_any_change_every_sample_is_computed_once_in_every_unit(
    lost: list[str], strategy: str, num_samples: int, reroutes: bool, data: st.DataObject
) -> None:
    """Whole steps by the plan for the pipelines that there are, and of a step that was cut off what nobody has done."""
    spec = make_spec(9, 2, num_microbatches=9)
    spec.on_loss = "reroute" if reroutes else "rebuild"
    world = World(spec)
    world.join(*"abcdefghi")
    world.settle()
    world.membership.recovered(1, 0)
    before = world.membership.snapshot
    plan = plan_for(before, strategy, num_samples)
    shares = {layout.pipeline: layout.assigned(7, plan, [1.0] * 9) for layout in layouts(before)}
    assert computed([alone for _, alone in shares.values()]) == list(range(num_samples))
    for node in lost:
        world.membership.remove(node, "its stream ended")
    (after,) = world.settle()
    ended = data.draw(st.sets(st.sampled_from(sorted(shares))), label="pipelines that had done their share")
    numbers_of = {
        before.nodes[rank].name: frozenset(shares[number][0]) for number in ended for rank in layouts(before)[0].pipelines[number]
    }
    done = [numbers_of.get(node.name, frozenset()) for node in after.nodes]
    resumed = [layout.resume(7, before.generation, done) for layout in layouts(after)]
    kept = resumed[0].resumed.done if resumed[0].resumed is not None else ()
    assert {layout.formation_of(7) for layout in resumed} == {before.generation if kept else after.generation}
    plan = plan if kept else plan_for(after, strategy, num_samples)
    whole = [microbatch for replica in plan.replicas for microbatch in replica]
    had = [sample for number in chain.from_iterable(kept) for sample in whole[number].sample_ids]
    rest = computed([layout.assigned(7, plan, [1.0] * 9)[1] for layout in resumed])
    assert sorted([*had, *rest]) == list(range(num_samples))
    following = plan_for(after, strategy, num_samples)
    assert computed([layout.assigned(8, following, [1.0] * 9)[1] for layout in resumed]) == list(range(num_samples))


def test_a_mean_microbatch_takes_what_the_samples_take_forward_and_backward() -> None:
    costs = [{"encoder": np.array([1.0, 2.0]), "llm": np.array([4.0, 4.0])}, {"encoder": np.array([1.0]), "llm": np.array([8.0])}]
    execution = Execution(backward_factors={"encoder": 0.0})
    topology = Topology(replicas=2, microbatches=2, stages={"encoder": 1, "llm": 1})
    assert mean_microbatch(costs, execution, topology) == {"encoder": 0.5, "llm": 6.0}
