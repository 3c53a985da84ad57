"""What a snapshot of the nodes means for one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.execution_spec import ExecutionSpec
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.trainer.pipeline.topology import Place
from headrace.trainer.recovery.layout import Layout, deal
from headrace.trainer.recovery.nodes_spec import RecoverableUnit, RecoverySpec
from headrace.v1.membership_pb2 import Node, Pipeline, PipelineStage, Snapshot

SPEC = RecoverySpec(nodes=5, units={"vision": RecoverableUnit(), "llm": RecoverableUnit(frozen=True)})


def stage(rank: int, unit: str, first: int, end: int) -> PipelineStage:
    return PipelineStage(rank=rank, unit=unit, first_layer=first, end_layer=end)


def snapshot() -> Snapshot:
    """Three nodes and two, with different cuts of an llm of four layers."""
    return Snapshot(
        generation=3,
        nodes=[Node(name=name, address=f"{name}:1") for name in "abcde"],
        pipelines=[
            Pipeline(stages=[stage(0, "vision", 0, 2), stage(3, "llm", 0, 1), stage(2, "llm", 1, 4)], num_microbatches=5),
            Pipeline(stages=[stage(4, "vision", 0, 2), stage(1, "llm", 0, 4)], num_microbatches=3),
        ],
    )


def test_a_node_finds_its_place_in_its_pipeline() -> None:
    layout = Layout.of(snapshot(), "c", SPEC)
    assert layout is not None
    assert (layout.generation, layout.rank, layout.num_ranks, layout.pipeline) == (3, 2, 5, 0)
    assert layout.pipelines == ((0, 3, 2), (4, 1))
    assert layout.shares == (5, 3)
    assert layout.place == Place("llm", 0, 1, 0)
    assert layout.bounds == {"vision": (0, 2), "llm": (0, 1, 4)}
    assert layout.topology.units["llm"].cuts == (1,)
    assert layout.topology.units["llm"].frozen


def test_a_node_outside_of_all_pipelines_has_no_place() -> None:
    assert Layout.of(snapshot(), "f", SPEC) is None


def plan(replicas: list[list[dict[str, tuple[int, ...]]]]) -> StepPlan:
    return StepPlan(
        strategy="entrain",
        seed=0,
        topology=Topology(replicas=len(replicas), microbatches=max(map(len, replicas)), stages={"vision": 1, "llm": 1}),
        replicas=[[Microbatch(units=units) for units in microbatches] for microbatches in replicas],
    )


# Sample 1 is deferred by a microbatch; the second pipeline takes fewer microbatches.
DEFERRED = plan(
    [
        [{"vision": (0, 1), "llm": (0,)}, {"vision": (2,), "llm": (1, 2)}, {"vision": (5,), "llm": (5,)}],
        [{"vision": (4,), "llm": (4,)}],
    ]
)

Assigned = list[tuple[list[int], list[dict[str, Any]]]]


def assigned(
    followed: StepPlan, shares: tuple[int, int], seconds: list[float], done: tuple[set[int], set[int]] | None = None
) -> Assigned:
    """Of both pipelines: numbers and units of the microbatches. done: of the pipelines, in a former attempt at the step."""
    changed = snapshot()
    for pipeline, share in zip(changed.pipelines, shares, strict=True):
        pipeline.num_microbatches = share
    found = []
    for name in "ae":
        layout = Layout.of(changed, name, SPEC)
        assert layout is not None
        if done is not None:
            layout = layout.resume(0, 2, [frozenset(done[0 if rank in (0, 3, 2) else 1]) for rank in range(5)])
        numbers, alone = layout.assigned(0, followed, seconds)
        found.append((list(numbers), [microbatch.units for microbatch in alone.replicas[0]]))
    return found


def test_a_plan_for_these_pipelines_is_followed_as_it_is() -> None:
    units = [[microbatch.units for microbatch in microbatches] for microbatches in DEFERRED.replicas]
    assert assigned(DEFERRED, (3, 1), [9.0, 1.0, 1.0, 1.0]) == [([0, 1, 2], units[0]), ([3], units[1])]


def test_what_a_plan_says_of_the_depth_of_the_schedule_reaches_the_pipeline() -> None:
    layout = Layout.of(snapshot(), "a", SPEC)
    assert layout is not None
    eight = plan([[{"vision": (n,), "llm": (n,)} for n in range(5)], [{"vision": (n,), "llm": (n,)} for n in (5, 6, 7)]])
    assert layout.assigned(0, replace(eight, in_flight=3), [1.0] * 8)[1].in_flight == 3


def test_what_is_left_of_a_step_is_dealt_out_as_it_was_planned_for_the_former_pipelines_and_nothing_deferred() -> None:
    assert assigned(DEFERRED, (2, 2), [1.0, 3.0, 1.0, 1.0], done=({3}, set())) == [
        ([1], [{"vision": (1, 2), "llm": (1, 2)}]),
        ([0, 2], [{"vision": (0,), "llm": (0,)}, {"vision": (5,), "llm": (5,)}]),
    ]


def test_only_the_step_that_is_resumed_is_planned_for_the_former_pipelines() -> None:
    layout = Layout.of(snapshot(), "a", SPEC)
    assert layout is not None
    resumed = layout.resume(4, 2, [frozenset({0})] * 5)
    assert (resumed.formation_of(4), resumed.formation_of(5)) == (2, 3)
    assert layout.resume(4, 2, [frozenset[int]()] * 5).formation_of(4) == 3


def test_an_evaluation_is_planned_for_no_pipelines_and_dealt_out_to_those_that_there_are() -> None:
    found = []
    for name in "ae":
        layout = Layout.of(snapshot(), name, SPEC)
        assert layout is not None
        evaluating = layout.resume(0, 2, [frozenset({0})] * 5).for_evaluation()
        assert evaluating.formation_of(0) == 0
        numbers, alone = evaluating.assigned(0, plan([[{"vision": (n,), "llm": (n,)} for n in range(8)]]), [])
        assert [microbatch.units["llm"] for microbatch in alone.replicas[0]] == [(number,) for number in numbers]
        found.append(len(numbers))
    assert found == [5, 3]


def test_a_plan_with_another_number_of_microbatches_is_refused() -> None:
    with pytest.raises(UserError, match="has 4 microbatches, but the nodes were told of 6"):
        assigned(DEFERRED, (3, 3), [1.0] * 4)


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=20),
    st.lists(st.integers(0, 8), min_size=1, max_size=4).filter(any),
    st.data(),
)
def test_every_microbatch_is_dealt_out_once_to_pipelines_that_take_any(
    seconds: list[float], shares: list[int], data: st.DataObject
) -> None:
    numbers = data.draw(st.sets(st.sampled_from(range(len(seconds)))))
    dealt = deal(seconds, shares, numbers)
    assert sorted(number for own in dealt for number in own) == sorted(numbers)
    assert all(own == sorted(own) for own in dealt)
    assert not any(own for own, share in zip(dealt, shares, strict=True) if not share)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_microbatches_that_are_alike_or_of_unknown_length_are_dealt_out_by_number(shares: list[int]) -> None:
    count = sum(shares)
    for seconds in (1.0, 0.0):
        assert [len(own) for own in deal([seconds] * count, shares, range(count))] == shares


def test_no_pipeline_waits_much_longer_than_another() -> None:
    """In the order of a plan that puts small ones first, the first pipeline would have next to nothing to do."""
    seconds = [0.1, 0.1, 0.1, 0.1, 8.0, 7.0, 0.1, 0.1, 0.1, 0.1, 6.0, 9.0]
    first, second = (sum(seconds[number] for number in own) for own in deal(seconds, (4, 8), range(12)))
    assert first / 4 < 1.3 * second / 8
    assert second / 8 < 1.3 * first / 4


def test_a_spec_without_an_llm_is_refused() -> None:
    with pytest.raises(ValueError, match="must name 'llm'"):
        RecoverySpec(nodes=2, units={"vision": RecoverableUnit()})


@pytest.mark.parametrize(
    ("planned", "words"),
    [
        ({"schedule": "eager"}, "plans for schedule eager, but the nodes' spec has 1f1b"),
        ({"units": {"vision": {"frozen": True}}}, "plans for frozen units vision, but the nodes' spec has llm"),
        (
            {"units": {"llm": {"frozen": True}, "vision": {"checkpointing": True}}},
            "plans for checkpointing units vision, but the nodes' spec has none",
        ),
    ],
)
def test_nodes_that_run_something_else_than_the_job_plans_for_are_told_both(planned: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        SPEC.check_execution(ExecutionSpec(**planned))


def test_a_job_that_says_nothing_and_one_that_says_the_same_fit_the_nodes() -> None:
    SPEC.check_execution(ExecutionSpec())
    SPEC.check_execution(ExecutionSpec(units={"llm": {"frozen": True}}, memory_gib=3.0))


def test_the_depth_of_an_eager_schedule_is_the_plans_and_needs_no_agreement() -> None:
    eager = RecoverySpec(nodes=5, schedule="eager", units={"llm": RecoverableUnit()})
    eager.check_execution(ExecutionSpec(schedule="eager", in_flight=3))
