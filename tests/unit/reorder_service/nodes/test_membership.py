"""Which snapshots follow from nodes that come, go, fall silent and return."""

from __future__ import annotations

import pytest

from headrace.errors import ConflictError, UserError
from headrace.reorder_service.nodes.membership import FIRST_STEP_LEASE_S, LEASE_S, REJOIN_S, Membership, Record
from headrace.reorder_service.nodes.snapshots import next_snapshot, shape, templates_of
from headrace.v1.membership_pb2 import ModelProfile, NodesSpec, Snapshot, UnitLayers

UNITS = {"encoder": 2, "llm": 6}


def make_spec(num_nodes: int = 5, max_failures: int = 1, *, num_microbatches: int = 8, memory: int = 6) -> NodesSpec:
    """Eight layers of a byte each: with a `memory` of six bytes a pipeline has two nodes or more."""
    profile = ModelProfile(
        units=[UnitLayers(unit=unit, num_layers=count) for unit, count in UNITS.items()],
        seconds=[1.0] * 8,
        layer_bytes=[1] * 8,
        memory_bytes=memory,
    )
    return NodesSpec(num_nodes=num_nodes, max_failures=max_failures, num_microbatches=num_microbatches, profile=profile)


class World:
    """A membership, and the snapshots that it has made."""

    def __init__(self, spec: NodesSpec, record: Record | None = None) -> None:
        self.membership = Membership("job", record or Record(spec=spec, snapshot=Snapshot(), job_generation=1))
        self._templates = templates_of(spec)
        self.committed = 0

    def join(self, *names: str, generation: int = 0, now_s: float = 0.0) -> None:
        for name in names:
            self.membership.hello(name, f"{name}:1", generation, now_s)

    def settle(self) -> list[Snapshot]:
        """The snapshots that are due."""
        made = []
        while (change := self.membership.take_change()) is not None:
            successor = next_snapshot(self.membership.record.spec, self._templates, self.membership.snapshot, change)
            if self.membership.adopt(successor, change):
                made.append(self.membership.snapshot)
        return made

    def train(self) -> None:
        """A step under the newest snapshot."""
        self.membership.recovered(self.membership.snapshot.generation, self.committed)
        self.committed += 1

    def late(self, now_s: float) -> dict[str, str]:
        return self.membership.late(now_s, self.committed)

    @property
    def nodes(self) -> list[str]:
        return [node.name for node in self.membership.snapshot.nodes]


@pytest.fixture
def world() -> World:
    """Five nodes under way: a to e."""
    world = World(make_spec())
    world.join(*"abcde")
    world.settle()
    return world


def check(snapshot: Snapshot) -> None:
    """Every pipeline has all layers once and in order, each node one stage, and all microbatches are taken."""
    ranks = [stage.rank for pipeline in snapshot.pipelines for stage in pipeline.stages]
    assert sorted(ranks) == list(range(len(snapshot.nodes)))
    assert sum(pipeline.num_microbatches for pipeline in snapshot.pipelines) == 8
    for pipeline in snapshot.pipelines:
        layers = [(stage.unit, layer) for stage in pipeline.stages for layer in range(stage.first_layer, stage.end_layer)]
        assert layers == [(unit, layer) for unit, count in UNITS.items() for layer in range(count)]


def test_nodes_are_told_at_the_start_that_none_is_to_spare() -> None:
    least = World(make_spec(4))  # two pipelines of two nodes
    least.join(*"abcd")
    (snapshot,) = least.settle()
    assert snapshot.change == (
        "4 nodes are there; none of 4 nodes may be lost, for 2 replicas need 2 each: training ends where one is, unless others "
        "have joined by then"
    )
    more = World(make_spec(5))
    more.join(*"abcde")
    (snapshot,) = more.settle()
    assert snapshot.change == "5 nodes are there"


def test_pipelines_are_made_when_all_nodes_are_there() -> None:
    world = World(make_spec())
    world.join(*"abcd")
    assert world.settle() == []
    world.join("e")
    (snapshot,) = world.settle()
    check(snapshot)
    assert (snapshot.generation, snapshot.urgent, snapshot.at_step_end) == (1, 1, False)
    assert [(node.name, node.address) for node in snapshot.nodes] == [(name, f"{name}:1") for name in "abcde"]
    assert shape(snapshot) == "3+2"


def test_a_lost_node_makes_an_urgent_snapshot_of_the_others_in_their_order(world: World) -> None:
    assert world.membership.remove("b", "its stream ended")
    (snapshot,) = world.settle()
    check(snapshot)
    assert (snapshot.generation, snapshot.urgent, snapshot.at_step_end) == (2, 2, False)
    assert world.nodes == ["a", "c", "d", "e"]
    assert snapshot.change == "b was lost (its stream ended)"
    assert snapshot.choice.startswith("2+2 copy the fewest bytes; no step was measured yet")


def test_two_that_are_lost_at_once_make_one_snapshot() -> None:
    world = World(make_spec(7, 2))
    world.join(*"abcdefgh")
    world.settle()
    world.membership.remove("a", "its stream ended")
    world.membership.remove("d", "silent for 1.2 s")
    (snapshot,) = world.settle()
    check(snapshot)
    assert world.nodes == list("bcefgh")
    assert snapshot.change == "a was lost (its stream ended); d was lost (silent for 1.2 s)"


def test_a_node_is_late_after_the_lease_and_not_before(world: World) -> None:
    world.train()
    for name in "abce":
        world.membership.hear(name, 5.0)
    world.membership.hear("d", 5.0 - LEASE_S / 2)
    assert world.late(5.0) == {}
    assert world.late(5.0 + 0.6 * LEASE_S) == {"d": f"silent for {1.1 * LEASE_S:.1f} s"}


def test_a_node_may_be_silent_for_longer_until_it_has_trained_a_step(world: World) -> None:
    """Loading libraries and compiling may hold up the thread that sends heartbeats."""
    assert world.late(FIRST_STEP_LEASE_S) == {}
    assert world.late(FIRST_STEP_LEASE_S + 0.1).keys() == set("abcde")
    world.train()
    world.join("f", now_s=20.0)
    world.settle()
    for name in "abcde":
        world.membership.hear(name, 20.0 + 2 * LEASE_S)
    assert world.late(20.0 + 2 * LEASE_S) == {}
    world.committed += 1
    assert world.late(20.0 + 2 * LEASE_S) == {}, "a step of those that f joins behind"
    world.train()
    assert world.late(20.0 + 2 * LEASE_S).keys() == {"f"}
    world.membership.remove("f", "silent for 2.0 s")
    world.join("f", now_s=30.0)
    assert "f" not in world.late(30.0 + 2 * LEASE_S)


def test_a_step_that_is_committed_late_was_not_trained_by_a_node_that_joined_behind_it(world: World) -> None:
    """The step before the newest snapshot is in the ledger only after training has gone on under it."""
    world.train()
    world.join("f", now_s=20.0)
    world.settle()
    world.membership.recovered(2, world.committed + 1)
    for name in "abcde":
        world.membership.hear(name, 20.0 + 2 * LEASE_S)
    for late in (set(), {"f"}):
        world.committed += 1
        assert world.late(20.0 + 2 * LEASE_S).keys() == late


def test_a_node_that_comes_back_with_nothing_before_it_was_missed_has_trained_no_step(world: World) -> None:
    """It was started again within the lease, and loads its libraries anew."""
    world.train()
    assert world.late(LEASE_S / 2) == {}
    world.join("b", now_s=LEASE_S / 2)
    for name in "acde":
        world.membership.hear(name, 2 * LEASE_S)
    assert world.late(2 * LEASE_S) == {}
    world.settle()
    assert world.late(2 * LEASE_S) == {}


def test_a_node_that_joins_comes_in_behind_the_others_at_the_end_of_a_step(world: World) -> None:
    world.join("f")
    (snapshot,) = world.settle()
    check(snapshot)
    assert (snapshot.generation, snapshot.urgent, snapshot.at_step_end) == (2, 1, True)
    assert world.nodes == list("abcdef")


def test_a_node_that_leaves_is_not_lost_when_it_is_done(world: World) -> None:
    world.membership.leave("a")
    (snapshot,) = world.settle()
    assert (snapshot.at_step_end, snapshot.urgent, snapshot.change) == (True, 1, "a leaves")
    assert world.nodes == list("bcde")
    assert not world.membership.remove("a", "its stream ended", done=True)
    assert world.settle() == []


def test_a_node_that_leaves_and_dies_before_the_others_have_its_snapshot_is_lost(world: World) -> None:
    world.membership.leave("a")
    world.settle()
    assert world.membership.remove("a", "its stream ended")
    (snapshot,) = world.settle()
    check(snapshot)
    assert (snapshot.generation, snapshot.urgent) == (3, 3)
    assert world.nodes == list("bcde")


def test_a_node_that_left_is_needed_no_more_once_training_goes_on_without_it(world: World) -> None:
    world.membership.leave("a")
    world.settle()
    world.membership.recovered(2, 0)
    assert not world.membership.remove("a", "its stream ended")
    assert world.settle() == []


def test_a_loss_while_a_node_waits_to_come_in_is_urgent(world: World) -> None:
    world.join("f")
    world.settle()
    world.membership.remove("c", "its stream ended")
    (snapshot,) = world.settle()
    assert (snapshot.generation, snapshot.urgent, snapshot.at_step_end) == (3, 3, False)
    assert world.nodes == list("abdef")


def test_a_node_that_returns_with_its_model_is_a_member_without_a_new_snapshot(world: World) -> None:
    world.join("b", generation=1)
    assert world.settle() == []


def test_a_node_that_returns_with_nothing_was_lost_and_comes_in_behind(world: World) -> None:
    world.join("b")
    lost, joined = world.settle()
    assert (lost.urgent, joined.at_step_end, joined.urgent) == (2, True, 2)
    assert world.nodes == list("acdeb")


def test_a_node_that_was_taken_for_lost_has_nothing_of_the_model_when_it_returns(world: World) -> None:
    world.membership.remove("b", "silent for 1.1 s")
    world.settle()
    world.join("b", generation=1)
    (snapshot,) = world.settle()
    assert snapshot.at_step_end
    assert world.nodes == list("acdeb")
    world.join("b", generation=1)  # again, before it heard that it came in: what it has is older
    assert [snapshot.at_step_end for snapshot in world.settle()] == [False, True]


def test_a_node_that_nobody_can_use_waits_for_the_next_change() -> None:
    """Two pipelines, as many as microbatches, of at most three nodes."""
    world = World(make_spec(5, num_microbatches=2))
    world.join(*"abcdefg")
    assert [snapshot.generation for snapshot in world.settle()] == [1, 2]
    assert world.nodes == list("abcdef")
    world.membership.remove("a", "its stream ended")
    world.settle()
    assert world.nodes == list("bcdefg")


def test_too_few_nodes_are_told_what_is_missing_and_can_begin_anew(world: World) -> None:
    world.membership.remove("a", "its stream ended")
    world.membership.remove("b", "its stream ended")
    (snapshot,) = world.settle()
    assert (snapshot.generation, snapshot.urgent, list(snapshot.pipelines)) == (2, 2, [])
    assert world.nodes == list("cde")  # they may save what they have
    assert "3 nodes are left" in snapshot.error
    assert "add 1 or more nodes" in snapshot.error
    world.membership.remove("c", "its stream ended", done=True)
    assert world.membership.close()
    after = World(make_spec(), world.membership.record)
    after.join(*"abcde")
    (again,) = after.settle()
    assert (again.generation, again.error) == (4, "")


def test_nodes_that_only_save_begin_again_with_those_that_are_left_until_one_is_done(world: World) -> None:
    assert not world.membership.close()  # nobody was lost since the last step
    world.membership.remove("b", "its stream ended")
    assert world.membership.close()
    saving = world.membership.snapshot
    assert (world.nodes, saving.generation, saving.urgent, saving.change) == (list("acde"), 2, 2, "b was lost (its stream ended)")
    assert (list(saving.pipelines), saving.error) == ([], "")
    world.membership.leave("a")  # it takes part to the end, which is near
    assert not world.membership.close()
    world.membership.cut_off("d", 2)
    assert world.membership.close()
    assert world.nodes == list("acde")
    world.membership.remove("c", "its stream ended", done=True)
    assert world.membership.close()
    assert (world.nodes, world.membership.snapshot.generation) == ([], 4)


def test_nodes_that_are_done_after_the_last_step_disturb_nobody(world: World) -> None:
    for name in "abcd":
        world.membership.remove(name, "its stream ended", done=True)
        assert not world.membership.close()
    world.membership.remove("e", "silent for 1.1 s")  # all was saved when the first one was done
    assert world.membership.close()
    assert (world.nodes, world.membership.closing) == ([], False)


def test_another_loss_leaves_fewer_nodes_to_save_what_there_is_and_the_reason_stays(world: World) -> None:
    for name in "ab":
        world.membership.remove(name, "its stream ended")
    world.settle()
    assert world.membership.closing
    error = world.membership.snapshot.error
    world.join("d", generation=2)
    assert not world.membership.close()
    world.membership.remove("d", "its stream ended")
    assert world.membership.close()
    assert (world.nodes, world.membership.snapshot.error) == (list("ce"), error)
    assert Record.of_json(world.membership.record.to_json()) == world.membership.record


def test_a_node_that_leaves_too_few_behind_is_asked_to_save_what_it_has_with_them(world: World) -> None:
    world.membership.remove("a", "its stream ended")
    world.settle()
    world.membership.leave("b")
    (snapshot,) = world.settle()
    assert (snapshot.at_step_end, snapshot.urgent) == (True, 2)
    assert "3 nodes are left" in snapshot.error
    assert world.nodes == list("bcde")


def test_a_record_survives_and_its_nodes_come_back_or_are_lost(world: World) -> None:
    world.membership.remove("e", "its stream ended")
    world.settle()
    record = Record.of_json(world.membership.record.to_json())
    assert record == world.membership.record
    after = World(make_spec(), record)
    after.membership.await_nodes(10.0)
    after.join(*"abc", generation=2, now_s=11.0)
    assert after.settle() == []
    after.train()
    assert after.late(10.0 + REJOIN_S) == dict.fromkeys("abc", f"silent for {REJOIN_S - 1:.1f} s")
    for name in "abc":
        after.membership.hear(name, 10.1 + REJOIN_S)
    assert after.late(10.1 + REJOIN_S) == {"d": "not back after 3 s"}


def test_a_node_that_missed_the_latest_snapshot_of_a_former_leader_is_a_member_all_the_same(world: World) -> None:
    world.membership.remove("e", "its stream ended")
    world.settle()
    after = World(make_spec(), world.membership.record)
    after.membership.await_nodes(0.0)
    after.join(*"abcd", generation=1)
    assert after.settle() == []


def test_a_node_whose_stream_ended_while_nobody_could_be_heard_may_come_again(world: World) -> None:
    world.membership.excuse("b", 10.0)
    assert world.settle() == []
    world.join("b", generation=1, now_s=11.0)
    assert world.settle() == []
    world.membership.excuse("b", 20.0)
    assert world.late(20.1 + REJOIN_S)["b"] == "not back after 3 s"


def test_a_generation_that_never_was_is_refused(world: World) -> None:
    with pytest.raises(ConflictError, match="follows generation 9 of job 'job', which has 1: start the node again"):
        world.join("b", generation=9)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (make_spec(3), "give at least 4 nodes"),
        (make_spec(5, 1, num_microbatches=1), "a microbatch for each of the replicas"),
        (make_spec(0), "there must be a node"),
        (make_spec(memory=0), "more memory"),
        (NodesSpec(num_nodes=2, num_microbatches=2), "does not fit together"),
        (make_spec(num_microbatches=2**31 - 1), "2147483647 microbatches are more than the 65536"),
        (make_spec(num_nodes=2**31 - 1), "2147483647 nodes are more than the 4096"),
        (
            NodesSpec(
                num_nodes=2, num_microbatches=2, profile=ModelProfile(units=[UnitLayers(unit="llm", num_layers=2**31 - 1)] * 2)
            ),
            "4294967294 layers are more than the 4096",
        ),
    ],
)
def test_a_specification_that_is_none_is_refused_in_a_sentence(spec: NodesSpec, words: str) -> None:
    with pytest.raises(UserError, match=words):
        templates_of(spec)


def test_a_node_that_is_cut_off_has_all_nodes_connect_anew(world: World) -> None:
    world.membership.cut_off("a", 1)
    world.membership.cut_off("b", 1)  # who noticed the same
    (snapshot,) = world.settle()
    assert world.nodes == list("abcde")
    assert (snapshot.generation, snapshot.urgent, snapshot.at_step_end) == (2, 2, False)
    assert snapshot.change == "a was cut off from other nodes"


def test_a_cut_that_a_newer_snapshot_has_mended_is_no_news(world: World) -> None:
    world.membership.cut_off("a", 0)
    assert world.settle() == []
