"""Instantiation: the fastest pipelines that use all nodes, and the microbatches of each."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.reorder_service.recovery.instantiation import distribute, instantiate
from headrace.reorder_service.recovery.pipeline_templates import Stage, Template
from tests.examples import with_examples
from tests.unit.reorder_service.recovery.recovery_world import templates_of


def pipeline_of(*seconds: float) -> Template:
    """A stage on each node."""
    return Template(
        stages=tuple(
            Stage(unit="llm", node=node, gpus=1, layers=range(node, node + 1), seconds=time) for node, time in enumerate(seconds)
        )
    )


def every_division(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """At least one each."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


def figures(pipelines: list[Template], counts: tuple[int, ...]) -> tuple[float, float]:
    """The longest time and equation 2.6, rounded so that equal ones are equal."""
    times = np.array([pipeline.iteration_time(count) for pipeline, count in zip(pipelines, counts, strict=True)])
    return round(float(times.max()), 9), round(float(np.square(times - times.mean()).sum()), 6)


@with_examples(150)
@given(
    stages=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4),
    further=st.integers(0, 9),
    scale=st.sampled_from([1.0, 0.3]),
)
def test_no_division_is_faster_and_no_equally_fast_one_is_more_even(stages: list[list[int]], further: int, scale: float) -> None:
    pipelines = [pipeline_of(*(scale * time for time in times)) for times in stages]
    total = len(pipelines) + further
    counts = distribute(pipelines, total)
    assert sum(counts) == total
    assert min(counts) >= 1
    assert figures(pipelines, counts) == min(figures(pipelines, other) for other in every_division(total, len(pipelines)))


def test_equal_pipelines_take_equally_many_and_a_twice_as_fast_one_takes_twice_as_many() -> None:
    slow, fast = pipeline_of(2.0), pipeline_of(1.0)
    assert distribute([slow, slow], 10) == (5, 5)
    assert distribute([slow, fast], 12) == (4, 8)
    with pytest.raises(ValueError, match="1 microbatches cannot be divided among 2 pipelines"):
        distribute([slow, fast], 1)


def every_set(sizes: range, num_nodes: int) -> Iterator[tuple[int, ...]]:
    """Sizes, falling, that add up to the nodes."""
    if num_nodes == 0:
        yield ()
    for size in sizes:
        if size <= num_nodes:
            yield from ((size, *rest) for rest in every_set(range(sizes.start, size + 1), num_nodes - size))


@with_examples(60)
@given(
    num_nodes=st.integers(4, 11),
    max_failures=st.integers(0, 2),
    smallest=st.integers(1, 3),
    left=st.integers(0, 4),
    further=st.integers(0, 12),
)
def test_no_other_pipelines_are_faster(num_nodes: int, max_failures: int, smallest: int, left: int, further: int) -> None:
    num_nodes = max(num_nodes, (max_failures + 1) * smallest)
    templates = templates_of(num_nodes, max_failures, smallest, 12)
    present = max(num_nodes - left, (max_failures + 1) * smallest)
    total = max_failures + 1 + further
    found = instantiate(templates, present, 4 * total, 4)
    assert sum(template.num_nodes for template in found.templates) == present
    assert len(found.templates) > max_failures
    assert found.microbatches == distribute(found.templates, total)
    others = []
    for sizes in every_set(templates.specification.sizes, present):
        if max_failures < len(sizes) <= total:
            pipelines = [templates.of_size[size] for size in sizes]
            others.append(figures(pipelines, distribute(pipelines, total))[0])
    assert found.iteration_time == pytest.approx(min(others))


def test_a_global_batch_that_cannot_be_split_is_never_changed_but_the_nearest_one_is_named() -> None:
    templates = templates_of(6, 2, 1, 6)
    with pytest.raises(UserError, match=r"a global batch of 30 samples .* microbatches of 4 .* nearest that can has 32$"):
        instantiate(templates, 6, 30, 4)
    with pytest.raises(UserError, match=r"nearest that can has 28$"):
        instantiate(templates, 6, 29, 4)
    with pytest.raises(UserError, match=r"for 3 or more pipelines: the nearest that can has 12$"):
        instantiate(templates, 6, 8, 4)
    assert sum(instantiate(templates, 6, 12, 4).microbatches) == 3


def test_nodes_that_no_pipelines_use_up_are_refused() -> None:
    templates = templates_of(6, 1, 3, 6)
    with pytest.raises(UserError, match="7 nodes are not 2 or more pipelines of 3 to 3 nodes: use 6 nodes"):
        instantiate(templates, 7, 64, 1)
    with pytest.raises(UserError, match="5 nodes are not 2 or more pipelines of 3 to 3 nodes: use 6 nodes"):
        instantiate(templates, 5, 64, 1)
