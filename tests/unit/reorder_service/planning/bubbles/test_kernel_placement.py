"""Kernels go where the definition says, and the schedules are as good as any order of placing them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.bubbles.bubble_planner import make_problem
from headrace.reorder_service.planning.bubbles.encoder_plans import encoder_plans
from headrace.reorder_service.planning.bubbles.filled_schedule import filled, mappings
from headrace.reorder_service.planning.bubbles.kernel_placement import EARLY, LATE, NO_LIMIT
from headrace.reorder_service.planning.bubbles.lane_space import LaneSpace
from headrace.reorder_service.planning.bubbles.llm_timeline import time_llm
from headrace.reorder_service.planning.bubbles.placed_encoders import Problem
from tests.examples import with_examples
from tests.unit.reorder_service.planning.bubbles.bubble_world import NEAR, ROOMY, encoder, layers, llm_plan, problems
from tests.unit.reorder_service.planning.bubbles.placement_twin import TwinSpace, least_by_any_order


@with_examples(40)
@given(problems(), st.sampled_from([EARLY, LATE]), st.sampled_from([0, 3]), st.data())
def test_kernels_are_placed_as_defined(problem: Problem, sign: int, look: int, data: st.DataObject) -> None:
    """In any order, into any pipelines: each kernel into the first room, or the best of a few, in its stream."""
    count = problem.llm.microbatches
    order = np.array(data.draw(st.permutations(range(count))))
    pipelines = st.integers(0, problem.plan.pipelines - 1)
    pipeline_of = np.array(data.draw(st.lists(pipelines, min_size=count, max_size=count)))
    release = problem.ready_s if sign == EARLY else problem.due_s
    table = problem.backward if sign == EARLY else problem.forward
    starts, reached = LaneSpace(problem, look=look).place(sign, table, order, pipeline_of, release)
    twin, twin_reached = TwinSpace(problem), np.full(problem.plan.pipelines, -np.inf)
    for m in order.tolist():
        over, twin_starts = twin.place(table, sign, m, int(pipeline_of[m]), float(release[m]), look)
        twin_reached[pipeline_of[m]] = max(twin_reached[pipeline_of[m]], over)
        for kernel, start in twin_starts.items():
            assert starts[m, kernel] == pytest.approx(start, abs=NEAR)
    assert reached == pytest.approx(twin_reached, abs=NEAR)


@with_examples(40)
@given(problems(), st.booleans())
def test_the_next_microbatch_goes_where_the_end_moves_least(problem: Problem, limited: bool) -> None:
    """Marginal assignment, by trying every pipeline that has quota left."""
    count, pipelines = problem.llm.microbatches, problem.plan.pipelines
    quota = np.full(pipelines, -(-count // pipelines) if limited else NO_LIMIT)
    order = np.arange(count)[::-1].copy()
    space = LaneSpace(problem)
    starts, reached, pipeline_of = space.deal(LATE, problem.forward, order, quota, problem.due_s)
    twin, twin_reached, left = TwinSpace(problem), np.full(pipelines, -np.inf), quota.copy()
    for m in order.tolist():
        ends = {
            j: max(twin_reached[j], twin.copied().place(problem.forward, LATE, m, j, float(problem.due_s[m]))[0])
            for j in range(pipelines)
            if left[j] > 0
        }
        chosen = int(pipeline_of[m])
        assert ends[chosen] <= min(ends.values()) + NEAR
        left[chosen] -= 1
        twin_reached[chosen] = ends[chosen]
        _, twin_starts = twin.place(problem.forward, LATE, m, chosen, float(problem.due_s[m]))
        assert [starts[m, kernel] for kernel in sorted(twin_starts)] == pytest.approx(
            [twin_starts[kernel] for kernel in sorted(twin_starts)], abs=NEAR
        )
    assert reached == pytest.approx(twin_reached, abs=NEAR)


@with_examples(40)
@given(problems(), st.sampled_from([EARLY, LATE]))
def test_what_is_taken_back_leaves_no_trace(problem: Problem, sign: int) -> None:
    """A microbatch that was placed and taken back, between two others, changes nothing."""
    table = problem.backward if sign == EARLY else problem.forward
    release = problem.ready_s if sign == EARLY else problem.due_s
    results = []
    for tries in (False, True):
        space = LaneSpace(problem)
        starts = np.zeros((problem.llm.microbatches, table.seconds.size))
        for m in range(problem.llm.microbatches):
            space.place_one(sign, table, m, 0, float(release[m]), starts, np.inf)
            if tries:
                other = starts.copy()
                space.place_one(sign, table, m, 0, float(release[0]), other, -np.inf)
                space.place_one(sign, table, m, 0, float(release[-1]), other, np.inf)
                space.take_back()
        results.append(starts)
    assert np.array_equal(*results)


@st.composite
def tiny(draw: st.DrawFn) -> Problem:
    """Two or three microbatches of a frozen encoder of one or two kernels a stage."""
    stages = draw(st.sampled_from([1, 2]))
    layer = draw(layers(communicates=True, most=2))
    llm = llm_plan(
        draw(layers(communicates=True, most=3)),
        stages=stages,
        layers=stages,
        microbatches=draw(st.integers(2, 3 if stages == 1 else 2)),
        all_gather_s=draw(st.integers(0, 2)),
    )
    vision = encoder(stages, layer={1: layer}, frozen=True)
    plan = draw(st.sampled_from(encoder_plans([vision], llm, ROOMY)))
    return make_problem(llm, time_llm(llm), [vision], plan)


@with_examples(40)
@given(tiny())
def test_no_order_of_placing_kernels_is_better_than_this(problem: Problem) -> None:
    """Against every order and every assignment: the prefix is at most one microbatch's kernels longer than the least.

    What is missing is kernels of one microbatch between those of another that has not been placed yet.
    """
    pipelines, count = range(problem.plan.pipelines), problem.llm.microbatches
    release = problem.due_s.tolist()
    least = min(
        least_by_any_order(problem, problem.forward, LATE, release, pipeline_of)
        for pipeline_of in itertools.product(pipelines, repeat=count)
    )
    ours = min(filled(problem, pipeline_of).prefix_s for pipeline_of in mappings(problem))
    assert max(0.0, least) - NEAR <= ours <= max(0.0, least) + float(problem.forward.seconds.sum()) + NEAR
