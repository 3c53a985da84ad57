"""Local search for the order of a replica's microbatches that takes least time, on the schedule's real recurrence.

If microbatches cannot be made equal, because single samples outweigh the mean microbatch, their order decides how long the
stages wait. Unlike DistTrain's Alg. 3, which places one microbatch after the other for the first stage of 1F1B, this search
replays the whole schedule for every order that it tries, and works for any schedule and any units.
"""

from __future__ import annotations

import heapq

import numpy as np

from headrace.reorder_service.planning.batch import Batch, Ints
from headrace.reorder_service.planning.seeding import xorshift_state
from headrace.reorder_service.planning.simulation.makespan import improve_order, start_orders
from headrace.reorder_service.planning.simulation.timed_schedule import schedule_table

ACTION_BUDGET = 1_000_000  # actions to replay, over all replicas: 3 ms
_TRIES = 64  # orders of one replica tried before the slowest replica is determined anew
_PATIENCE = 6  # rounds in a row that may fail to improve the slowest replica


def arrange(batch: Batch, slot: Ints, *, keep: bool = False) -> Ints:
    """Reorder the microbatches of each replica so that its step is shorter: (n,) slots, with empty microbatches last.

    slot: (n,) slot of every sample, the same in all units. keep: start from the given order instead of the best simple one
    (`best_simple_order`). The replica that takes longest is improved until nothing more is found for it, since the others wait
    for it anyway, or until ACTION_BUDGET actions have been replayed.
    """
    slots = np.broadcast_to(slot, batch.costs.shape)
    loads, occupied = batch.loads(slots), batch.occupied(slots)
    stages = np.array(list(batch.topology.stages.values()))
    forward = np.repeat(loads / (stages * batch.execution.chunks), stages, axis=2)
    seconds = forward[..., None] * np.repeat([batch.execution.factors(unit) for unit in batch.units], stages, axis=0)
    sizes = loads.sum(axis=2)

    counts = occupied.sum(axis=1)
    orders = np.argsort(~occupied, axis=1, kind="stable")
    ends = np.empty(counts.size)
    for filled in np.unique(counts).tolist():
        table = schedule_table(batch.topology.stages, batch.execution, filled)
        start_orders(seconds, sizes, np.flatnonzero(counts == filled), filled, table, keep, orders, ends)
    slowest = list(zip((-ends).tolist(), range(counts.size), strict=True))
    heapq.heapify(slowest)
    left, vain = ACTION_BUDGET, 0
    while left > 0 and vain < _PATIENCE:
        before, r = slowest[0]
        table = schedule_table(batch.topology.stages, batch.execution, int(counts[r]))
        after = -improve_order(seconds[r], orders[r, : counts[r]], table, _TRIES, xorshift_state(batch.seed + left))
        vain = 0 if after > before else vain + 1
        heapq.heapreplace(slowest, (after, r))
        left -= _TRIES * max(1, table.shape[0])
    return moved(slot, orders)


def moved(slot: Ints, orders: Ints) -> Ints:
    """Return the (n,) slots after microbatch orders[r, p] has become microbatch p of replica r. orders: (D, K)."""
    count = orders.shape[1]
    position = np.empty_like(orders)
    np.put_along_axis(position, orders, np.arange(count)[None], axis=1)
    position += count * np.arange(len(orders))[:, None]
    slots: Ints = position.ravel()[slot]
    return slots
