"""A loss in the middle of a step whose microbatches pipelines that are whole do: snapshots, and what each node makes of them."""

from __future__ import annotations

import pytest

from headrace.errors import UserError
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.reorder_service.nodes.membership import Record
from headrace.reorder_service.nodes.snapshots import shape, templates_of
from headrace.snapshot import NOBODY, is_rerouted
from headrace.trainer.recovery.layout import Layout, Resumed, finishes_step_first
from headrace.trainer.recovery.nodes_spec import RecoverableUnit, RecoverySpec
from headrace.v1.membership_pb2 import NodesSpec, Snapshot
from tests.unit.reorder_service.nodes.test_membership import World, make_spec

SPEC = RecoverySpec(nodes=7, units={"encoder": RecoverableUnit(), "llm": RecoverableUnit()})


def rerouting_spec() -> NodesSpec:
    """Seven nodes are three pipelines, as two nodes may be lost."""
    spec = make_spec(7, 2)
    spec.on_loss = "reroute"
    return spec


@pytest.fixture
def world() -> World:
    """Under way: a b c, d e, f g."""
    world = World(rerouting_spec())
    world.join(*"abcdefg")
    world.settle()
    world.membership.recovered(1, 0)
    assert shape(world.membership.snapshot) == "3+2+2"
    return world


def names(snapshot: Snapshot) -> list[list[str]]:
    """Of the nodes of each pipeline."""
    of_rank = {rank: node.name for rank, node in enumerate(snapshot.nodes)} | {NOBODY: "-"}
    return [[of_rank[stage.rank] for stage in pipeline.stages] for pipeline in snapshot.pipelines]


def layout_of(snapshot: Snapshot, name: str) -> Layout:
    layout = Layout.of(snapshot, name, SPEC)
    assert layout is not None
    return layout


def assigned(layout: Layout, step: int) -> list[int]:
    """Of eight microbatches that are alike."""
    stages = {"encoder": 1, "llm": 1}
    replicas = [[Microbatch(units=dict.fromkeys(stages, (4 * r + k,))) for k in range(4)] for r in range(2)]
    plan = StepPlan(strategy="random", seed=0, topology=Topology(replicas=2, microbatches=4, stages=stages), replicas=replicas)
    return list(layout.assigned(step, plan, [1.0] * 8)[0])


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_pipelines_stay_as_they_are_until_all_nodes_follow_and_then_change_at_a_steps_end(world: World) -> None:
    world.membership.remove("d", "its stream ended")
    (rerouted,) = world.settle()
    assert (rerouted.generation, rerouted.urgent, rerouted.at_step_end) == (2, 2, False)
    assert names(rerouted) == [["a", "b", "c"], ["-", "e"], ["f", "g"]]
    assert shape(rerouted) == "3+(1)+2"
    assert [pipeline.num_microbatches for pipeline in rerouted.pipelines] == [5, 0, 3]
    assert rerouted.choice.endswith("the lost microbatches are rerouted first")
    world.membership.recovered(2, 0)
    (rebuilt,) = world.settle()
    assert (rebuilt.generation, rebuilt.urgent, rebuilt.at_step_end) == (3, 2, True)
    assert shape(rebuilt) == "2+2+2"
    assert world.nodes == list("abcefg")


def test_nodes_that_join_or_leave_wait_until_all_follow(world: World) -> None:
    world.membership.remove("d", "its stream ended")
    world.settle()
    world.join("h")
    world.membership.leave("a")
    assert world.settle() == []
    world.membership.recovered(2, 0)
    (rebuilt,) = world.settle()
    assert rebuilt.at_step_end
    assert world.nodes == list("bcefgh")


def test_another_loss_has_pipelines_rebuilt_at_once() -> None:
    world = World(make_spec(8, 2))
    world.membership.record.spec.on_loss = "reroute"
    world.join(*"abcdefgh")
    world.settle()
    world.membership.recovered(1, 0)
    world.membership.remove("a", "its stream ended")
    assert is_rerouted(world.settle()[0])
    world.membership.remove("h", "silent for 1.1 s")
    (rebuilt,) = world.settle()
    assert (rebuilt.generation, rebuilt.urgent, is_rerouted(rebuilt)) == (3, 3, False)
    assert world.nodes == list("bcdefg")


def test_pipelines_that_do_not_run_yet_are_rebuilt() -> None:
    world = World(rerouting_spec())
    world.join(*"abcdefg")
    world.settle()
    world.membership.remove("d", "its stream ended")
    assert [is_rerouted(snapshot) for snapshot in world.settle()] == [False]


def test_pipelines_of_which_none_is_whole_are_rebuilt(world: World) -> None:
    world = World(make_spec(6, 1))
    world.membership.record.spec.on_loss = "reroute"
    world.join(*"abcdef")
    world.settle()
    world.membership.recovered(1, 0)
    for pipeline in world.membership.snapshot.pipelines:
        world.membership.remove(world.membership.snapshot.nodes[pipeline.stages[0].rank].name, "its stream ended")
    assert [is_rerouted(snapshot) for snapshot in world.settle()] == [False]


def test_a_departure_that_is_announced_and_broken_connections_are_no_reason(world: World) -> None:
    world.membership.leave("d")
    assert [(is_rerouted(snapshot), snapshot.at_step_end) for snapshot in world.settle()] == [(False, True)]
    world.membership.recovered(2, 0)
    world.membership.cut_off("a", 2)
    assert [is_rerouted(snapshot) for snapshot in world.settle()] == [False]


def test_a_new_leader_goes_on_when_it_hears_that_all_follow(world: World) -> None:
    world.membership.remove("d", "its stream ended")
    world.settle()
    after = World(rerouting_spec(), Record.of_json(world.membership.record.to_json()))
    after.join(*"abcefg", generation=2)
    assert after.settle() == []
    after.membership.recovered(2, 0)
    assert [shape(snapshot) for snapshot in after.settle()] == ["2+2+2"]


def test_an_unknown_way_is_refused() -> None:
    spec = make_spec()
    spec.on_loss = "panic"
    with pytest.raises(UserError, match="on_loss 'panic' is none of auto, rebuild, reroute"):
        templates_of(spec)


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_nodes_of_a_broken_pipeline_keep_their_place_and_have_nothing_to_do(world: World) -> None:
    world.membership.remove("d", "its stream ended")
    (rerouted,) = world.settle()
    layout = layout_of(rerouted, "e")
    assert (layout.ranks, layout.place.unit) == ((NOBODY, 3), "llm")
    assert assigned(layout, step=5) == []
    assert len(assigned(layout_of(rerouted, "f"), step=5)) == 3


def test_only_nodes_of_whole_pipelines_finish_their_share(world: World) -> None:
    running = Snapshot()
    running.CopyFrom(world.membership.snapshot)
    world.membership.remove("d", "its stream ended")
    (rerouted,) = world.settle()
    assert [name for name in "abcefg" if finishes_step_first(name, running, rerouted)] == list("abcfg")
    world.membership.recovered(2, 0)
    (rebuilt,) = world.settle()
    assert not any(finishes_step_first(name, rerouted, rebuilt) for name in "abcefg")


NONE = frozenset[int]()
PIPELINES = [(0, 1, 2), (NOBODY, 3), (4, 5)]


def resumed(*done: frozenset[int]) -> Resumed | None:
    """By rank: what it has done."""
    return Resumed.of(5, 1, done, PIPELINES)


def test_a_share_that_one_node_of_the_pipeline_has_not_finished_is_repeated() -> None:
    first, last = frozenset({0, 1, 2}), frozenset({6, 7})
    step = resumed(first, first, NONE, NONE, last, last)
    assert step is not None
    assert step.done == (NONE, NONE, last)


def test_a_share_that_another_pipeline_has_done_too_counts_once() -> None:
    """Two attempts at a step may have dealt out its microbatches differently."""
    first, last = frozenset({0, 1, 2}), frozenset({2, 6, 7})
    step = resumed(first, first, first, NONE, last, last)
    assert step is not None
    assert step.done == (first, NONE, NONE)


def test_a_broken_pipeline_has_done_nothing() -> None:
    assert resumed(NONE, NONE, NONE, frozenset({3, 4}), NONE, NONE) is None


def test_only_the_step_that_was_cut_off_is_resumed(world: World) -> None:
    world.membership.remove("d", "its stream ended")
    (rerouted,) = world.settle()
    done = [*[frozenset({0, 1, 2})] * 3, NONE, *[frozenset({6, 7})] * 2]
    layout = layout_of(rerouted, "f").resume(5, 1, done)
    assert layout.keeps_share
    assert {*assigned(layout, 5), *assigned(layout_of(rerouted, "a").resume(5, 1, done), 5)} == {3, 4, 5}
    assert len(assigned(layout, 6)) == 3
    assert not layout_of(rerouted, "e").resume(5, 1, done).keeps_share


def test_a_specification_of_another_way_is_refused() -> None:
    with pytest.raises(ValueError, match="Input should be 'auto', 'rebuild' or 'reroute'"):
        RecoverySpec(nodes=2, on_loss="panic", units=SPEC.units)  # type: ignore[arg-type]
