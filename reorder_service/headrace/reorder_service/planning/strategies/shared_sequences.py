"""Degrees and places of the LLM's sequences where ranks may share one, on ranks that meet after every phase (`Execution.cp`).

A sequence needs several ranks only where it takes more than some limit by itself, and then as few as bring its parts below that:
the canonical allotment of moldable tasks (Turek, Wolf and Yu, 1992), whose limit is a rank's even share of the step. Smaller
limits are tried where parts of that size do not lie evenly on the ranks.

Each is shared by as many neighbours as its degree, of the groups of so many into which all ranks fall, counted from the first:
so ranks are in few groups, whose exchanges stay inside of a node where groups divide nodes. The widest sequences come first, and
those of each degree are levelled over their groups, on top of what the ranks have of wider ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Floats, Ints
from headrace.reorder_service.planning.search.number_partition import descending
from headrace.reorder_service.planning.sequence_degrees import in_parts, most_degrees, sequence_seconds
from headrace.reorder_service.planning.strategies.colocated import level

_LIMITS = (1, 2, 3, 4)  # parts of a rank's even share that are tried as limits
_WORTH_PARTING = 2e-2  # by how much smaller parts, whose exchanges are not counted, have to shorten the step
_SLACK = 1e-9  # of a limit, by which rounding may exceed it


def with_degrees(batch: Batch) -> Batch:
    """Return a batch with the number of ranks that share each sequence, if its execution says that ranks may.

    Raises ValueError where the tokens of its samples are unknown.
    """
    if batch.execution.cp == 1:
        return batch
    most = most_degrees(batch)
    if batch.execution.cp != "auto":
        return replace(batch, degrees=most)
    seconds = sequence_seconds(batch)
    share = float(seconds.sum()) / batch.num_slots
    best, least = replace(batch, degrees=np.ones_like(most)), np.inf
    for parts in _LIMITS if share > 0 else ():
        needed = np.ceil(seconds * parts / share - _SLACK).astype(np.int64)
        tried = replace(batch, degrees=np.clip(needed, 1, most))
        step_s = _step_seconds(tried, seconds)
        if step_s < least * (1.0 - _WORTH_PARTING):
            best, least = tried, step_s
        if least * (1.0 - _WORTH_PARTING) <= share * batch.topology.microbatches:
            break
    return best


def shared_slots(batch: Batch) -> Ints:
    """Return the (n,) slots of the first rank of each sequence of a batch with degrees; its others follow in the microbatch.

    Microbatches get equal work, those without any last.
    """
    assert batch.degrees is not None, "degrees were chosen before"
    seconds, count = sequence_seconds(batch), batch.topology.microbatches
    index = _levelled(seconds, np.zeros(count))
    slots = np.empty_like(index)
    for k in range(count):
        here = np.flatnonzero(index == k)
        slots[here] = first_ranks(seconds[here], batch.degrees[here], batch.topology.replicas) * count + k
    return slots


def first_ranks(seconds: Floats, degrees: Ints, num_ranks: int) -> Ints:
    """Return the first rank of each of m sequences that run together. Each is on so many neighbours, from a multiple of that on.

    seconds: (m,) of each on one rank.
    """
    loads, first = np.zeros(num_ranks), np.empty_like(degrees)
    for degree in np.unique(degrees)[::-1].tolist():
        own, num_groups = np.flatnonzero(degrees == degree), num_ranks // degree
        grouped = loads[: num_groups * degree].reshape(num_groups, degree)  # a view: ranks that are left over have none of these
        parts = seconds[own] / degree
        group = _levelled(parts, grouped.max(axis=1))
        grouped += np.bincount(group, weights=parts, minlength=num_groups)[:, None]
        first[own] = group * degree
    return first


def _step_seconds(batch: Batch, seconds: Floats) -> float:
    """Return the forward seconds of the LLM's phases, of sequences that take so many on one rank."""
    parts, slots = in_parts(seconds, shared_slots(batch), batch.degrees, batch.topology.microbatches)
    loads = np.bincount(slots, weights=parts, minlength=batch.num_slots)
    return float(loads.reshape(batch.topology.replicas, -1).max(axis=0).sum())


def _levelled(seconds: Floats, heads: Floats) -> Ints:
    return level(seconds, descending(seconds), heads, np.zeros(seconds.size, np.int64))
