"""Availability traces: when nodes of a cluster are lost and come back, from the rows of a file or drawn at random."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import UserError

LOST, BACK = "lost", "back"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """One row of an availability trace: a node is lost or comes back."""

    time_s: float
    """Seconds since the start of the trace."""
    node: str
    event: str
    """`LOST` or `BACK`; `BACK` is also used for a node that was never there before."""
    line: int = 0
    """Line number in the file that the event was read from, for error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """The nodes that are lost and that come back at one moment."""

    time_s: float
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The changes of a cluster's nodes from 0 to `end_s`."""

    nodes: tuple[str, ...]
    """Names of the nodes at the start."""
    changes: tuple[NodeChange, ...]
    """Changes before `end_s`, in order of time. A node is lost only while present, and comes back only while absent."""
    end_s: float

    @property
    def num_losses(self) -> int:
        return sum(len(change.lost) for change in self.changes)

    def counts(self) -> list[tuple[float, float, int]]:
        """Return (from, until, number of nodes present) for consecutive spans that together cover the whole trace."""
        times = [0.0, *(change.time_s for change in self.changes), self.end_s]
        steps = (len(change.joined) - len(change.lost) for change in self.changes)
        numbers = itertools.accumulate(steps, initial=len(self.nodes))
        return [(start, end, count) for (start, end), count in zip(itertools.pairwise(times), numbers, strict=True)]


def nodes_at_start(events: Sequence[NodeEvent], num_nodes: int) -> tuple[str, ...]:
    """Return the nodes at the start: those whose first event is their loss, by name, then generated names up to `num_nodes`.

    Raises UserError if more than `num_nodes` nodes are lost that must have been there at the start.
    """
    first = {event.node: event.event for event in reversed(events)}
    named = sorted(node for node, event in first.items() if event == LOST)
    if len(named) > num_nodes:
        raise UserError(
            f"{len(named)} nodes are lost that were there at the start, of {num_nodes}: start with {len(named)} or more"
        )
    others = (name for name in (f"node{number}" for number in itertools.count()) if name not in first)
    return (*named, *itertools.islice(others, num_nodes - len(named)))


def trace_of(events: Sequence[NodeEvent], nodes: Sequence[str], end_s: float) -> Trace:
    """Build the trace of a cluster that starts with `nodes`. Events at `end_s` or later are left out.

    Raises UserError, naming the line, for events that are not in order or contradict each other.
    """
    _check(events, set(nodes))
    changes = []
    for time_s, group in itertools.groupby(events, key=lambda event: event.time_s):
        rows = list(group)
        lost, joined = (tuple(row.node for row in rows if row.event == kind) for kind in (LOST, BACK))
        changes.append(NodeChange(time_s=time_s, lost=lost, joined=joined))
    return Trace(nodes=tuple(nodes), changes=tuple(change for change in changes if change.time_s < end_s), end_s=end_s)


def _check(events: Sequence[NodeEvent], there: set[str]) -> None:
    last, changed_s = 0.0, dict.fromkeys(there, -math.inf)
    for event in events:
        where = f"line {event.line}, {event.node} {event.event} at {event.time_s:g} s"
        if event.event not in (LOST, BACK):
            raise UserError(f"{where}: an event is {LOST} or {BACK}")
        if not last <= event.time_s < math.inf:
            raise UserError(f"{where}: times begin at 0 and do not fall, and the one before is {last:g} s: sort the events")
        if (event.node in there) != (event.event == LOST):
            state = "is there already" if event.node in there else "is not there"
            raise UserError(f"{where}: the node {state}: take the event out, or add the one that is missing before it")
        if changed_s.get(event.node, -math.inf) == event.time_s:
            raise UserError(f"{where}: the node has another event at the same time: give them different times")
        last = changed_s[event.node] = event.time_s
        there ^= {event.node}


def draw(random: np.random.Generator, *, num_nodes: int, mtbf_s: float, mttr_s: float, end_s: float) -> Trace:
    """Draw a trace with exponential times between losses, each of a random node, and until a lost node is back.

    mtbf_s: the mean time between losses of the whole cluster, however many nodes it has left. mttr_s: the mean time until a lost
    node is back.
    """
    nodes = [f"node{number}" for number in range(num_nodes)]
    there = list(nodes)
    away: list[tuple[float, str]] = []
    events = []
    loss_s = random.exponential(mtbf_s)
    while min(loss_s, away[0][0] if away else math.inf) < end_s:
        if away and away[0][0] <= loss_s:
            back_s, node = heapq.heappop(away)
            events.append(NodeEvent(time_s=back_s, node=node, event=BACK))
            there.append(node)
            continue
        if there:
            node = there.pop(int(random.integers(len(there))))
            events.append(NodeEvent(time_s=loss_s, node=node, event=LOST))
            heapq.heappush(away, (loss_s + random.exponential(mttr_s), node))
        loss_s += random.exponential(mtbf_s)
    return trace_of(events, nodes, end_s)
