"""Sequences that take several ranks at once: each rank has one at a time, and a small gang is in one node."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.context.gang_schedule import schedule, step_time


@st.composite
def tasks(draw):
    num_ranks = draw(st.integers(1, 9))
    count = draw(st.integers(1, 12))
    degrees = draw(st.lists(st.integers(1, num_ranks), min_size=count, max_size=count))
    seconds = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))
    return np.array(order), np.array(degrees), np.array(seconds, np.float64), num_ranks


@given(task=tasks(), ranks_per_node=st.integers(1, 9))
def test_a_rank_has_one_sequence_at_a_time(task, ranks_per_node):
    order, degrees, seconds, num_ranks = task
    plan = schedule(order, degrees, seconds, num_ranks, ranks_per_node)
    for rank in range(num_ranks):
        own = [i for i in range(degrees.size) if rank in plan.ranks_of(i)]
        spans = sorted((plan.starts_s[i], plan.ends_s[i]) for i in own)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    for i in range(degrees.size):
        ranks = plan.ranks_of(i)
        assert len(set(ranks.tolist())) == degrees[i]
        assert ranks.min() >= 0
        assert ranks.max() < num_ranks
        if degrees[i] <= min(ranks_per_node, num_ranks):
            assert len(set((ranks // ranks_per_node).tolist())) == 1
    assert plan.step_s == step_time(order, degrees, seconds, num_ranks, ranks_per_node)


@given(task=tasks())
def test_in_one_node_a_sequence_begins_as_soon_as_ranks_are_free(task):
    order, degrees, seconds, num_ranks = task
    free, starts = [0.0] * num_ranks, np.empty(degrees.size)
    for i in order:
        free.sort()
        starts[i] = free[degrees[i] - 1]
        free[: degrees[i]] = [starts[i] + seconds[i]] * int(degrees[i])
    np.testing.assert_array_equal(schedule(order, degrees, seconds, num_ranks, num_ranks).starts_s, starts)


def test_a_gang_takes_the_node_where_least_is_wasted():
    order, degrees = np.arange(4), np.array([2, 1, 1, 2])
    plan = schedule(order, degrees, np.array([1.0, 2.0, 2.0, 1.0]), 4, 2)
    assert plan.ranks_of(0).tolist() == [0, 1]
    assert plan.ranks_of(3).tolist() == [0, 1]
    assert plan.step_s == 2


def test_more_ranks_than_there_are_are_refused():
    with pytest.raises(ValueError, match="a sequence has 1 to 2 ranks, got 3 to 3"):
        schedule(np.array([0]), np.array([3]), np.array([1.0]), 2, 8)
