"""Availability traces: drawn at random, or given row by row and checked."""

import numpy as np
import pytest

from headrace.errors import UserError
from headrace.reorder_service.recovery.forecast.availability import (
    BACK,
    LOST,
    NodeChange,
    NodeEvent,
    draw,
    nodes_at_start,
    trace_of,
)


def events(*rows: tuple[float, str, str]) -> list[NodeEvent]:
    return [
        NodeEvent(time_s=time_s, node=node, event=event, line=line) for line, (time_s, node, event) in enumerate(rows, start=2)
    ]


def test_who_is_lost_first_was_there_at_the_start_and_nameless_nodes_make_up_the_rest() -> None:
    rows = events((5, "b", LOST), (5, "a", LOST), (7, "spare", BACK), (9, "a", BACK), (11, "node0", BACK))
    nodes = nodes_at_start(rows, 4)
    assert nodes == ("a", "b", "node1", "node2")
    trace = trace_of(rows, nodes, 10.0)
    assert trace.changes == (
        NodeChange(time_s=5, lost=("b", "a")),
        NodeChange(time_s=7, joined=("spare",)),
        NodeChange(time_s=9, joined=("a",)),
    )
    assert trace.counts() == [(0, 5, 4), (5, 7, 2), (7, 9, 3), (9, 10, 4)]
    assert trace.num_losses == 2


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(1, "a", LOST), (2, "a", LOST)], "line 3, a lost at 2 s: the node is not there: take the event out, or add the one"),
        ([(1, "n", BACK), (2, "n", BACK)], "line 3, n back at 2 s: the node is there already"),
        ([(2, "a", LOST), (1, "b", LOST)], "line 3, b lost at 1 s: times begin at 0 and do not fall, and the one before is 2 s"),
        ([(-1, "a", LOST)], "line 2, a lost at -1 s: times begin at 0"),
        ([(float("nan"), "a", LOST)], "line 2, a lost at nan s: times begin at 0"),
        ([(1, "a", LOST), (1, "a", BACK)], "line 3, a back at 1 s: the node has another event at the same time"),
        ([(1, "a", "gone")], "line 2, a gone at 1 s: an event is lost or back"),
    ],
)
def test_events_that_contradict_each_other_name_their_line(rows: list[tuple[float, str, str]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        trace_of(events(*rows), ("a", "b"), 10.0)


def test_more_nodes_than_there_were_are_not_lost() -> None:
    with pytest.raises(UserError, match="2 nodes are lost that were there at the start, of 1: start with 2 or more"):
        nodes_at_start(events((1, "a", LOST), (2, "b", LOST)), 1)


def test_a_drawn_trace_has_the_times_that_were_asked_for() -> None:
    trace = draw(np.random.default_rng(0), num_nodes=100, mtbf_s=10.0, mttr_s=200.0, end_s=10_000.0)
    assert trace.num_losses == pytest.approx(1_000, rel=0.1)
    away = [(end_s - start_s) * (100 - count) for start_s, end_s, count in trace.counts()]
    assert sum(away) / trace.end_s == pytest.approx(20, rel=0.1)  # 200 s of them each, one every 10 s
    assert trace == draw(np.random.default_rng(0), num_nodes=100, mtbf_s=10.0, mttr_s=200.0, end_s=10_000.0)


def test_a_drawn_trace_may_lose_all_nodes() -> None:
    trace = draw(np.random.default_rng(1), num_nodes=2, mtbf_s=1.0, mttr_s=1e9, end_s=1_000.0)
    assert trace.num_losses == 2
    assert trace.counts()[-1][2] == 0
