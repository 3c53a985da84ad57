"""Nodes of several processes: the stages of their pipelines, what a lost one takes with it, and the streams of each process."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import HeadraceError, SupersededError, UnavailableError, UserError
from headrace.reorder_service.nodes.node_stream import NodeStream, NodeStreams
from headrace.reorder_service.nodes.snapshots import shape, templates_of
from headrace.snapshot import NOBODY
from headrace.trainer.recovery.layout import Layout, finishes_step_first
from headrace.trainer.recovery.nodes_spec import RecoverableUnit, RecoverySpec
from headrace.v1.membership_pb2 import NodeHello, NodesSpec, Snapshot
from tests.unit.reorder_service.nodes.test_membership import UNITS, World, make_spec

SPEC = RecoverySpec(nodes=4, gpus_per_node=2, units={"encoder": RecoverableUnit(), "llm": RecoverableUnit()})
PROCESSES = 2


def spec_of_two(num_nodes: int = 4, max_failures: int = 1, *, memory: int = 3) -> NodesSpec:
    """Eight layers of a byte each: with a `memory` of three bytes a GPU, a pipeline has two nodes of two GPUs, or more."""
    spec = make_spec(num_nodes, max_failures, memory=memory)
    spec.gpus_per_node = PROCESSES
    return spec


@pytest.fixture
def world() -> World:
    """Five nodes under way."""
    world = World(spec_of_two(5))
    world.join(*"abcde")
    world.settle()
    world.membership.recovered(1, 0)
    return world


def check(snapshot: Snapshot) -> None:
    """Every process of every node has one stage, those of a node follow each other, and each pipeline has all layers in order."""
    stages = [stage for pipeline in snapshot.pipelines for stage in pipeline.stages]
    assert sorted((stage.rank, stage.process) for stage in stages) == [
        (rank, process) for rank in range(len(snapshot.nodes)) for process in range(PROCESSES)
    ]
    for pipeline in snapshot.pipelines:
        of_nodes = [pipeline.stages[n : n + PROCESSES] for n in range(0, len(pipeline.stages), PROCESSES)]
        assert all([stage.process for stage in own] == [0, 1] and len({stage.rank for stage in own}) == 1 for own in of_nodes)
        layers = [(stage.unit, layer) for stage in pipeline.stages for layer in range(stage.first_layer, stage.end_layer)]
        assert layers == [(unit, layer) for unit, count in UNITS.items() for layer in range(count)]


def test_each_process_of_a_node_has_a_stage(world: World) -> None:
    snapshot = world.membership.snapshot
    assert shape(snapshot) == "3+2"
    check(snapshot)


def test_a_lost_node_takes_the_stages_of_all_its_processes_with_it(world: World) -> None:
    world.membership.remove("e", "process 1: its stream ended")
    [snapshot] = world.settle()
    assert shape(snapshot) == "2+2"
    assert snapshot.change == "e was lost (process 1: its stream ended)"
    check(snapshot)
    world.join("f")
    [snapshot] = world.settle()
    assert shape(snapshot) == "3+2"
    check(snapshot)


def test_of_a_node_whose_microbatches_others_do_no_process_has_a_place() -> None:
    spec = spec_of_two(7, 2)
    spec.on_loss = "reroute"
    world = World(spec)
    world.join(*"abcdefg")
    world.settle()
    world.membership.recovered(1, 0)
    running = world.membership.snapshot
    assert shape(running) == "3+2+2"
    world.membership.remove("g", "its stream ended")
    [snapshot] = world.settle()
    assert shape(snapshot) == "3+2+(1)"
    assert [stage.rank == NOBODY for stage in snapshot.pipelines[2].stages] == [False, False, True, True]
    assert finishes_step_first("a", running, snapshot)
    assert not finishes_step_first("f", running, snapshot)
    layout = Layout.of(snapshot, "f", SPEC, 1)
    assert layout is not None
    assert layout.ranks == (10, 11, NOBODY, NOBODY)


def test_processes_are_numbered_through_all_nodes(world: World) -> None:
    snapshot = world.membership.snapshot
    found = [Layout.of(snapshot, node, SPEC, process) for node in "abcde" for process in range(PROCESSES)]
    layouts = [layout for layout in found if layout is not None]
    assert [layout.rank for layout in layouts] == list(range(10))
    assert {layout.num_ranks for layout in layouts} == {10}
    assert [(layout.pipeline, layout.place.unit, layout.place.stage) for layout in layouts] == [
        (number, stage.unit, own.index(stage))
        for number, pipeline in enumerate(snapshot.pipelines)
        for stage in pipeline.stages
        for own in [[other for other in pipeline.stages if other.unit == stage.unit]]
    ]


def test_a_node_with_more_processes_than_the_model_has_layers_is_refused() -> None:
    spec = make_spec()
    spec.gpus_per_node = 9
    with pytest.raises(UserError, match="with a layer or more on each GPU"):
        templates_of(spec)
    spec.gpus_per_node = 65
    with pytest.raises(UserError, match="65 GPUs of a node are more than the 64"):
        templates_of(spec)
    spec.gpus_per_node = -1
    with pytest.raises(UserError, match="nodes of -1 GPUs are none"):
        templates_of(spec)


# -- streams ----------------------------------------------------------------------------------------------------------


def stream(node: str, process: int, heard_s: float = 0.0, *, gpus_per_node: int = PROCESSES) -> NodeStream:
    spec = NodesSpec(gpus_per_node=gpus_per_node)
    return NodeStream(NodeHello(job="job", node=node, process=process, spec=spec), heard_s)


async def heard(of: NodeStream) -> list[int]:
    """The generations that a stream has told until it ended."""
    return [snapshot.generation async for snapshot in of.snapshots()]


def test_those_that_live_of_a_lost_node_are_told_which_process_was_lost() -> None:
    streams = NodeStreams()
    first, second, other = stream("a", 0, 2.0), stream("a", 1, 1.0), stream("b", 0)
    for one in (second, first, other):
        streams.add(one)
    assert streams.of("a") == [first, second]
    why = streams.silent("a", "silent for 1.1 s")
    assert why == "process 1: silent for 1.1 s"
    streams.lose("a", why)
    for one in (first, second):
        with pytest.raises(HeadraceError, match=r"node 'a' was lost \(process 1: silent for 1.1 s\): all of its processes end"):
            asyncio.run(heard(one))
    assert list(streams) == [other]
    assert not streams.discard(first)


def test_a_process_that_is_its_node_may_join_again() -> None:
    streams = NodeStreams()
    alone = stream("a", 0, gpus_per_node=0)
    streams.add(alone)
    assert streams.silent("a", "silent for 1.1 s") == "silent for 1.1 s"
    streams.lose("a", "silent for 1.1 s")
    with pytest.raises(UnavailableError, match=r"node 'a' was silent for 1.1 s and taken for lost: join again"):
        asyncio.run(heard(alone))


def test_a_process_that_joins_again_takes_the_place_of_the_former_one() -> None:
    streams = NodeStreams()
    former, again, sibling = stream("a", 1), stream("a", 1), stream("a", 0)
    for one in (former, sibling, again):
        streams.add(one)
    with pytest.raises(SupersededError, match="joined again from elsewhere"):
        asyncio.run(heard(former))
    assert streams.of("a") == [sibling, again]
    assert again in streams
    assert former not in streams


def test_a_process_follows_what_it_was_told_last() -> None:
    one = NodeStream(NodeHello(node="a", generation=3))
    assert one.generation == 3
    one.tell(Snapshot(generation=5))
    assert one.generation == 5
