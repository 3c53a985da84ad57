"""How many microbatches eager-forward 1F1B may hold: as many as fit into memory (Entrain: dissertation, section 4.5.3)."""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.reorder_service.planning.batch import Batch, Slots
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.simulator import peak_memory
from headrace.reorder_service.planning.simulation.work import Work
from headrace.schedule import EAGER


def depth_is_open(execution: Execution) -> bool:
    """Return whether the depth of a plan follows from its activations and the memory limit."""
    return execution.schedule == EAGER and execution.in_flight is None and execution.memory_limit < math.inf


def shallowest(execution: Execution) -> Execution:
    """Return the execution with the least depth that a plan may have, in which its stages hold least."""
    return replace(execution, in_flight=1) if depth_is_open(execution) else execution


def with_deepest_in_flight(work: Work) -> Work:
    """Return the work with the largest `in_flight` with which every stage keeps within its execution's memory limit.

    Only an eager schedule whose depth is left open (None), with a finite limit, is changed. The limit holds for the heaviest
    microbatches that this plan has, so different plans of one batch have different depths. A depth is at most the number of
    microbatches that a replica runs: beyond it only stages near the end hold more, and steps of synthchart take 5 to 11 % longer.
    A stage never holds less with a larger depth, so the largest is found by bisection. If not even a depth of 1 fits, that is
    returned: `peak_memory` then tells by how much the plan exceeds the limit.
    """
    execution = work.execution
    if not depth_is_open(execution):
        return work

    def of_depth(depth: int) -> Work:
        return replace(work, execution=replace(execution, in_flight=depth))

    low, high = 1, int(work.occupied.sum(axis=1).max())
    while low < high:
        middle = (low + high + 1) // 2
        if float(peak_memory(of_depth(middle)).max()) <= execution.memory_limit:
            low = middle
        else:
            high = middle - 1
    return of_depth(low)


def planned_work(batch: Batch, slots: Slots, *, has_links: bool = True) -> Work:
    """Return the work of a plan as the trainers run it: as deep as `with_deepest_in_flight` finds.

    has_links: as for `Work.of`.
    """
    return with_deepest_in_flight(Work.of(batch, slots, has_links=has_links))
