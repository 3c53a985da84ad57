"""Reconfiguration: Oobleck's guarantees under any losses and joins, its three ways to mend a pipeline, and the fewest bytes."""

from collections.abc import Iterable, Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UnrecoverableError
from headrace.reorder_service.recovery.instantiation import instantiate
from headrace.reorder_service.recovery.pipeline_templates import Templates
from headrace.reorder_service.recovery.reconfiguration import Pipeline, Reconfiguration, reconfigure
from tests.examples import with_examples
from tests.unit.reorder_service.recovery.recovery_world import templates_of


def pipelines_of(templates: Templates, *nodes: str) -> tuple[Pipeline, ...]:
    """ "abc" is a pipeline of nodes a, b and c."""
    return tuple(Pipeline(template=templates.of_size[len(names)], nodes=tuple(names)) for names in nodes)


def nodes_of(pipelines: Iterable[Pipeline]) -> list[str]:
    return ["".join(pipeline.nodes) for pipeline in pipelines]


def layers_by_node(pipelines: Sequence[Pipeline]) -> dict[str, set[int]]:
    return {node: set(pipeline.template.layers_of(place)) for pipeline in pipelines for place, node in enumerate(pipeline.nodes)}


def check(
    templates: Templates, before: Sequence[Pipeline], after: Reconfiguration, lost: Sequence[str], joined: Sequence[str]
) -> None:
    """What holds after every change of nodes."""
    specification = templates.specification
    held = {node: layers for node, layers in layers_by_node(before).items() if node not in lost}
    present = {*held, *joined}
    in_pipelines = [node for pipeline in after.pipelines for node in pipeline.nodes]
    assert sorted([*in_pipelines, *after.idle]) == sorted(present)
    if len(present) <= specification.num_nodes:
        assert after.idle == ()
    assert len(after.pipelines) > specification.max_failures
    assert all(pipeline.template is templates.of_size[len(pipeline.nodes)] for pipeline in after.pipelines)

    needed = layers_by_node(after.pipelines)
    lacking = {node: needed[node] - held.get(node, set()) for node in in_pipelines}
    assert {node: set(layers) for node, layers in after.missing.items()} == {
        node: layers for node, layers in lacking.items() if layers
    }
    for layers in after.missing.values():
        for layer, sources in layers.items():
            assert sources
            assert set(sources) == {node for node in held if layer in held[node]}
    assert after.copied_bytes == sum(int(templates.layer_bytes[layer]) for layers in lacking.values() for layer in layers)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Templates, tuple[Pipeline, ...]]:
    smallest, max_failures = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_nodes = (max_failures + 1) * smallest + draw(st.integers(0, 7))
    num_layers = num_nodes - max_failures * smallest + draw(st.integers(0, 4))
    layer_bytes = draw(st.lists(st.integers(1, 50), min_size=num_layers, max_size=num_layers))
    templates = templates_of(num_nodes, max_failures, smallest, num_layers, layer_bytes=layer_bytes)
    names, left, pipelines = iter(range(num_nodes)), num_nodes, []
    while left:
        others = max(0, max_failures - len(pipelines)) * smallest
        sizes = [
            size for size in templates.of_size if size + others <= left and (size == left or left - size >= max(others, smallest))
        ]
        size = draw(st.sampled_from(sizes))
        pipelines.append(Pipeline(template=templates.of_size[size], nodes=tuple(f"n{next(names)}" for _ in range(size))))
        left -= size
    return templates, tuple(pipelines)


@with_examples(80)
@given(job=jobs(), data=st.data())
def test_any_failures_up_to_the_threshold_are_survived_again_and_again_until_the_nodes_are_too_few(
    job: tuple[Templates, tuple[Pipeline, ...]], data: st.DataObject
) -> None:
    templates, pipelines = job
    specification = templates.specification
    gone: list[str] = []
    for _ in range(6):
        present = [node for pipeline in pipelines for node in pipeline.nodes]
        lost = data.draw(st.lists(st.sampled_from(present), max_size=specification.max_failures, unique=True))
        joined = data.draw(st.lists(st.sampled_from(gone), unique=True)) if gone else []
        if len(present) - len(lost) + len(joined) < specification.least_nodes:
            with pytest.raises(UnrecoverableError, match="every layer still has a copy"):
                reconfigure(templates, pipelines, lost=lost, joined=joined)
            return
        after = reconfigure(templates, pipelines, lost=lost, joined=joined)
        check(templates, pipelines, after, lost, joined)
        assert after == reconfigure(templates, pipelines, lost=lost, joined=joined)
        if not lost and not joined:
            assert after.pipelines == pipelines
            assert after.copied_bytes == 0
        gone = [node for node in gone if node not in joined] + lost
        pipelines = after.pipelines


@with_examples(60)
@given(job=jobs(), data=st.data())
def test_given_sizes_come_out_with_every_layer_from_nodes_that_have_it(
    job: tuple[Templates, tuple[Pipeline, ...]], data: st.DataObject
) -> None:
    templates, pipelines = job
    specification = templates.specification
    present = [node for pipeline in pipelines for node in pipeline.nodes]
    most = min(specification.max_failures, len(present) - specification.least_nodes)
    lost = data.draw(st.lists(st.sampled_from(present), max_size=most, unique=True))
    best = instantiate(templates, specification.usable(len(present) - len(lost)), 64, 1)
    sizes = [template.num_nodes for template in best.templates]
    after = reconfigure(templates, pipelines, lost=lost, sizes=sizes)
    check(templates, pipelines, after, lost, [])
    assert sorted(len(pipeline.nodes) for pipeline in after.pipelines) == sorted(sizes)
    assert reconfigure(templates, after.pipelines, sizes=sizes).pipelines == after.pipelines


@with_examples(60)
@given(job=jobs(), joining=st.integers(1, 9))
def test_nodes_beyond_those_of_the_start_are_used_as_far_as_sizes_add_up(
    job: tuple[Templates, tuple[Pipeline, ...]], joining: int
) -> None:
    templates, pipelines = job
    joined = [f"new{i}" for i in range(joining)]
    after = reconfigure(templates, pipelines, joined=joined)
    check(templates, pipelines, after, [], joined)
    total = templates.specification.num_nodes + joining
    assert sum(len(pipeline.nodes) for pipeline in after.pipelines) == templates.specification.usable(total)


@with_examples(60)
@given(seed=st.integers(0, 100), lost=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=2, unique=True))
def test_no_other_order_of_the_nodes_copies_fewer_bytes(seed: int, lost: list[str]) -> None:
    templates = templates_of(6, 2, 1, 5, layer_bytes=[1 + seed * (7 + layer) % 11 for layer in range(5)])
    pipelines = pipelines_of(templates, "abc", "de", "f")
    after = reconfigure(templates, pipelines, lost=lost)
    held = layers_by_node(pipelines)
    places = [layers for pipeline in after.pipelines for layers in layers_by_node([pipeline]).values()]
    present = [node for pipeline in after.pipelines for node in pipeline.nodes]

    def copied(order: Sequence[str]) -> int:
        return sum(
            int(templates.layer_bytes[list(layers - held[node])].sum()) for node, layers in zip(order, places, strict=True)
        )

    assert after.copied_bytes == min(copied(order) for order in permutations(present))


def test_simple_a_smaller_template_for_the_nodes_that_are_left() -> None:
    templates = templates_of(8, 1, 2, 12)
    after = reconfigure(templates, pipelines_of(templates, "abcd", "efgh"), lost=["b"])
    assert nodes_of(after.pipelines) == ["acd", "efgh"]
    assert after.missing == {"a": {3: ("f",)}, "c": {4: ("f",), 5: ("f",)}, "d": {8: ("c", "g")}}
    assert after.copied_bytes == 4


def test_borrow_a_node_of_the_largest_pipeline() -> None:
    templates = templates_of(9, 2, 2, 12)
    after = reconfigure(templates, pipelines_of(templates, "ab", "cde", "fghi"), lost=["a"])
    assert [len(pipeline.nodes) for pipeline in after.pipelines] == [2, 3, 3]
    assert nodes_of(after.pipelines)[1] == "cde"


def test_merge_where_no_pipeline_can_spare_a_node() -> None:
    templates = templates_of(6, 1, 2, 12)
    after = reconfigure(templates, pipelines_of(templates, "ab", "cd", "ef"), lost=["c"])
    assert sorted(len(pipeline.nodes) for pipeline in after.pipelines) == [2, 3]
    assert nodes_of(after.pipelines)[-1] == "ef"


def test_a_node_that_comes_back_takes_the_place_that_is_short_or_makes_the_smallest_pipeline_grow() -> None:
    templates = templates_of(8, 1, 2, 12)
    pipelines = pipelines_of(templates, "ab", "cde", "fgh")
    replaced = reconfigure(templates, pipelines, lost=["a"], joined=["x"])
    assert nodes_of(replaced.pipelines) == ["xb", "cde", "fgh"]
    assert set(replaced.missing) == {"x"}
    grown = reconfigure(templates, pipelines[:2], joined=["x"])
    assert [len(pipeline.nodes) for pipeline in grown.pipelines] == [3, 3]
    assert nodes_of(grown.pipelines)[1] == "cde"


def test_enough_new_nodes_make_a_pipeline_of_their_own_unless_there_are_too_many() -> None:
    templates = templates_of(8, 1, 2, 12)
    pipelines = pipelines_of(templates, "abc", "def")
    assert nodes_of(reconfigure(templates, pipelines, joined=["x", "y"]).pipelines) == ["abc", "def", "xy"]
    grown = reconfigure(templates, pipelines, joined=["x", "y"], max_pipelines=2).pipelines
    assert [len(pipeline.nodes) for pipeline in grown] == [4, 4]


def test_a_layer_without_a_copy_is_named_with_the_nodes_that_had_it() -> None:
    templates = templates_of(4, 1, 2, 6)
    with pytest.raises(UnrecoverableError) as lost:
        reconfigure(templates, pipelines_of(templates, "ab", "cd"), lost=["a", "c"], joined=["x", "y"])
    assert str(lost.value) == (
        "no copy is left of layers 0-2 of the model, which were on a, c: bring back nodes that still have them, or go on from a "
        "checkpoint"
    )


def test_too_few_nodes_say_how_many_are_missing() -> None:
    templates = templates_of(4, 1, 2, 6)
    with pytest.raises(UnrecoverableError) as few:
        reconfigure(templates, pipelines_of(templates, "ab", "cd"), lost=["a"])
    assert str(few.value) == ("3 nodes are left, but 2 replicas need 2 each: add 1 or more nodes; every layer still has a copy")


def test_a_pipeline_has_as_many_nodes_as_its_template() -> None:
    with pytest.raises(ValueError, match="a template of 2 nodes got 1: a"):
        Pipeline(template=templates_of(4, 1, 2, 6).of_size[2], nodes=("a",))


def test_a_node_joins_once() -> None:
    templates = templates_of(4, 1, 2, 6)
    with pytest.raises(ValueError, match="joined are in a pipeline already: b"):
        reconfigure(templates, pipelines_of(templates, "ab", "cd"), joined=["b", "x"])
