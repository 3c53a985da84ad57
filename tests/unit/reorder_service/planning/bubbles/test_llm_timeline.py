"""The LLM's step keeps its order and its bubbles add up; the adjusted warm-up costs nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.bubbles.adjusted_warm_up import FORWARD, TimedActions, adjusted_actions, megatron_actions
from headrace.reorder_service.planning.bubbles.idle_time import Bubble, communication_time, compute_time, idle_seconds
from headrace.reorder_service.planning.bubbles.llm_timeline import time_llm
from tests.examples import with_examples
from tests.unit.reorder_service.planning.bubbles.bubble_world import LLM_LAYER, NEAR, layers, llm_plan, llm_spans, passes


def even(stages: int, chunks: int) -> np.ndarray:
    """A forward of one second and a backward of two, in every chunk."""
    return np.stack([np.ones((stages, chunks)), np.full((stages, chunks), 2.0)])


def first_chunk_starts(timed: TimedActions) -> np.ndarray:
    here = (timed.kind[0] == FORWARD) & (timed.chunk[0] == 0)
    return timed.start_s[0, here]


def check_actions(timed: TimedActions, seconds: np.ndarray, hop_s: float) -> None:
    """Each action runs once, for as long as it takes, alone on its stage and behind what it needs."""
    stages, chunks = seconds.shape[1:]
    ends, starts = {}, {}
    for s in range(stages):
        assert (timed.start_s[s, 1:] >= timed.end_s[s, :-1] - NEAR).all()
        for kind, chunk, m, start, end in zip(
            timed.kind[s], timed.chunk[s], timed.microbatch[s], timed.start_s[s], timed.end_s[s], strict=True
        ):
            starts[kind, chunk * stages + s, m], ends[kind, chunk * stages + s, m] = start, end
            assert end - start == pytest.approx(seconds[kind, s, chunk])
    last = stages * chunks - 1
    assert len(ends) == timed.kind.size
    for (kind, place, m), start in starts.items():
        needed = (kind, place - 1, m) if kind == FORWARD else (1, place + 1, m) if place < last else (FORWARD, last, m)
        if needed in ends:
            hop = hop_s if stages > 1 and needed[1] != place else 0.0
            assert start >= ends[needed] + hop - NEAR


@with_examples(50)
@given(st.data())
def test_warm_ups_are_adjusted_without_a_longer_step(data: st.DataObject) -> None:
    stages, chunks, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 13))
    tenths = st.lists(st.integers(1, 30), min_size=stages * chunks * 2, max_size=stages * chunks * 2)
    seconds = np.array(data.draw(tenths)).reshape(2, stages, chunks) / 10
    hop_s = data.draw(st.sampled_from([0.0, 0.3]))
    default, adjusted = (make(seconds, count, hop_s) for make in (megatron_actions, adjusted_actions))
    for timed in (default, adjusted):
        check_actions(timed, seconds, hop_s)
    assert adjusted.makespan_s <= default.makespan_s * (1 + 1e-9)


def test_figure_12_later_microbatches_are_due_later() -> None:
    """Four stages, two chunks, eight microbatches: the first four are due as before, the other four later, at no cost."""
    default, adjusted = (make(even(4, 2), 8) for make in (megatron_actions, adjusted_actions))
    assert adjusted.makespan_s == default.makespan_s == 8 * 2 * 3 + 3 * 3
    before, after = first_chunk_starts(default), first_chunk_starts(adjusted)
    assert (after[:4] == before[:4]).all()
    assert (after[4:] > before[4:]).all()


@pytest.mark.parametrize(("stages", "count"), [(4, 8), (4, 3), (1, 5), (3, 7)])
def test_without_chunks_it_is_1f1b(stages: int, count: int) -> None:
    timed = adjusted_actions(even(stages, 1), count)
    assert timed.makespan_s == 3 * (count + stages - 1)


@with_examples(40)
@given(layers(communicates=True), st.sampled_from([1, 2, 3]), st.integers(1, 3), st.integers(1, 7))
def test_bubbles_are_what_the_llm_leaves(layer, stages: int, chunks: int, count: int) -> None:
    """On every stage, bubbles and kernels together fill the step, and no bubble touches a kernel that shares its stream."""
    plan = llm_plan(layer, stages=stages, chunks=chunks, layers=stages * chunks, microbatches=count)
    timeline = time_llm(plan)
    idle, links = compute_time(timeline), communication_time(timeline, strict=False)
    for stage in range(stages):
        for free, communicates in ((idle, False), (links, True)):
            here = free.of_stage(stage)
            begin, end = np.maximum(free.begin_s[here], 0.0), np.minimum(free.end_s[here], timeline.end_s)
            busy = llm_spans(timeline, stage, communicates=communicates)
            assert (end - begin).sum() + sum(high - low for low, high in busy) == pytest.approx(timeline.end_s)
            assert all((high <= begin + NEAR).sum() + (low >= end - NEAR).sum() == begin.size for low, high in busy)
    busy = np.mean([sum(high - low for low, high in llm_spans(timeline, stage, communicates=False)) for stage in range(stages)])
    assert sum(idle_seconds(timeline).values()) + busy == pytest.approx(timeline.end_s)


def test_bubbles_of_every_kind_add_up() -> None:
    """Two stages and one chunk: 1F1B with forwards of 3 s, of which 1 s communication, and backwards of 5 s, of which 1 s."""
    timeline = time_llm(llm_plan(LLM_LAYER))
    assert timeline.end_s == 3 + (4 + 1) * 8 + 5
    idle = idle_seconds(timeline)
    assert idle[Bubble.START] == pytest.approx((3 + 6) / 2)
    assert idle[Bubble.END] == pytest.approx((5 + 10) / 2)
    assert sum(idle.values()) == pytest.approx(timeline.end_s - 4 * 6)
    assert timeline.forward_due_s[0] == 3


def test_without_tensor_parallelism_there_are_no_small_bubbles() -> None:
    layer = passes([("compute", 1.0)], [("compute", 2.0)])
    idle = idle_seconds(time_llm(llm_plan(layer, stages=1, layers=1)))
    assert idle == {Bubble.START: 3.0, Bubble.PIPELINE: 0.0, Bubble.TENSOR: 0.0, Bubble.END: 5.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"stages": 0}, "count from 1"), ({"layers": 3}, "dealt evenly"), ({"all_gather_s": -1.0}, "no negative")],
)
def test_plans_that_cannot_be_are_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm_plan(LLM_LAYER, **changes)
