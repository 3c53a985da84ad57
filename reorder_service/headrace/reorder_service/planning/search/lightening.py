"""Local search for a plan that keeps the memory limit, from one that does not.

What a stage holds at a time is the sum over the microbatches between their forward and their backward there. The search moves
and swaps samples, and changes the order of microbatches, where that lowers

    sum over the forwards of all stages of  max(0, what the stage holds then - limit)

which is 0 if and only if the plan fits. It starts at replicas that exceed the limit, so most of the plan stays as it was.
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.search.arrangement import moved
from headrace.reorder_service.planning.seeding import xorshift_state
from headrace.reorder_service.planning.simulation.eager_depth import shallowest
from headrace.reorder_service.planning.simulation.makespan import excess_over_time
from headrace.reorder_service.planning.simulation.memory_limit import excess_memory, held_by_stage, kinds_that_free
from headrace.reorder_service.planning.simulation.timed_schedule import schedule_table

ACTION_BUDGET = 4_000_000  # actions to replay at one heat: 10 ms
_TRY = 100  # actions that count for a try besides those replayed: it takes as long
_HEATS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)  # thresholds of one search after the other, in mean microbatches
_MOST_TABLES = 32  # microbatches of a replica up to which the search may leave some empty: a schedule takes long to build
_ROUNDING = 1e-9  # share of the limit that is left free, as sums are rounded in different orders
_MOVE, _FILL, _SWAP = 0, 1, 2


def lighten(batch: Batch, slots: Slots) -> Slots:
    """Return (U, n) slots that keep the execution's memory limit, or exceed it less than `slots` do; `slots` if they fit.

    A plan that does not fit loses its deferral, and its samples stay with their place in the LLM in all units.
    """
    excess = excess_memory(batch, slots)
    if excess == 0 or held_by_stage(batch).max() > batch.execution.memory_limit:  # it fits, or a sample does not fit by itself
        return slots
    together = slots[batch.units.index(LLM)].copy()
    lighter = np.broadcast_to(_lightened(batch, together), slots.shape)
    return lighter if excess_memory(batch, lighter) < excess else slots


def _lightened(batch: Batch, slot: Ints) -> Ints:
    """Improve (n,) slots that are equal in all units."""
    occupied = batch.occupied(slot[None])
    counts = occupied.sum(axis=1)
    execution, most = shallowest(batch.execution), batch.topology.microbatches
    used = range(1, most + 1) if most <= _MOST_TABLES else np.unique(counts).tolist()
    tables = [schedule_table(batch.topology.stages, execution, count) for count in used]
    ends = np.cumsum([len(table) for table in tables])
    rows = np.full((most + 1, 2), -1)
    rows[list(used)] = np.stack([np.concatenate(([0], ends[:-1])), ends], axis=1)
    orders = np.argsort(~occupied, axis=1, kind="stable")
    held = np.ascontiguousarray(held_by_stage(batch).T) / batch.execution.chunks
    free_after, limit = kinds_that_free(batch), batch.execution.memory_limit * (1 - _ROUNDING)
    schedules, mean = np.concatenate(tables), float(held.sum()) / batch.num_slots
    for heat in _HEATS:
        state = xorshift_state(batch.seed + round(1000 * heat))
        if search(held, slot, orders, counts, schedules, rows, free_after, limit, heat * mean, ACTION_BUDGET, state) == 0:
            break
    return moved(slot, orders)


@kernel
def search(
    held: Floats,
    slot: Ints,
    orders: Ints,
    counts: Ints,
    tables: Ints,
    rows: Ints,
    free_after: Ints,
    limit: float,
    heat: float,
    budget: int,
    state: np.uint64,
) -> float:
    """Improve a plan in place until it fits or `budget` actions have been replayed: the excess that is left.

    held: (n, U) what one action keeps of a sample. slot: (n,). orders: (D, K) microbatches of each replica in the order in which
    they run; the first counts[r] hold samples. tables, rows: the table for m microbatches is tables[rows[m, 0] : rows[m, 1]];
    rows[m, 0] is -1 if there is none. heat: changes for the worse are accepted up to a threshold that falls from it to zero.
    state: of the random generator. A replica that holds samples keeps at least one.
    """
    num_samples, num_units = held.shape
    num_replicas, num_microbatches = orders.shape
    loads = np.zeros((num_replicas * num_microbatches, num_units))
    samples = np.zeros(num_replicas * num_microbatches, np.int64)
    for i in range(num_samples):
        samples[slot[i]] += 1
        for u in range(num_units):
            loads[slot[i], u] += held[i, u]
    excess = np.zeros(num_replicas)
    for r in range(num_replicas):
        excess[r] = _excess_of(r, loads, orders, counts, tables, rows, free_after, limit)
    loads_before, orders_before = np.empty((2, num_units)), np.empty((2, num_microbatches), np.int64)
    left, over = budget, np.flatnonzero(excess > 0.0)
    while left > 0 and over.size > 0:
        threshold = heat * (left / budget) ** 2
        state = _next(state)
        home = over[_below(state, over.size)]
        choice = np.int64(state & np.uint64(3))
        left -= _TRY + rows[counts[home], 1] - rows[counts[home], 0]
        if choice > _SWAP:  # two microbatches of the replica change places
            p = _below(state, counts[home])
            state = _next(state)
            q = _below(state, counts[home])
            orders[home, p], orders[home, q] = orders[home, q], orders[home, p]
            after = _excess_of(home, loads, orders, counts, tables, rows, free_after, limit)
            if after - excess[home] <= threshold:
                excess[home] = after
            else:
                orders[home, p], orders[home, q] = orders[home, q], orders[home, p]
            over = np.flatnonzero(excess > 0.0)
            continue
        i = _below(state, num_samples)
        while slot[i] // num_microbatches != home:
            i = i + 1 if i + 1 < num_samples else 0
        state = _next(state)
        j = _below(state, num_samples)
        here, there = slot[i], slot[j]
        away = there // num_microbatches
        if choice == _FILL and counts[away] < num_microbatches:
            there = away * num_microbatches + orders[away, counts[away]]
        empties, fills = choice != _SWAP and samples[here] == 1, samples[there] == 0
        if here == there or (empties and counts[home] == 1):
            continue
        if (empties and rows[counts[home] - 1, 0] < 0) or (fills and rows[counts[away] + 1, 0] < 0):
            continue
        loads_before[0], loads_before[1] = loads[here], loads[there]
        orders_before[0], orders_before[1] = orders[home], orders[away]
        for u in range(num_units):
            amount = held[i, u] - (held[j, u] if choice == _SWAP else 0.0)
            loads[here, u] -= amount
            loads[there, u] += amount
        if fills:
            counts[away] += 1
        if empties:
            _put_last(orders[home], here - home * num_microbatches, counts[home])
            counts[home] -= 1
        at_home = _excess_of(home, loads, orders, counts, tables, rows, free_after, limit)
        at_away = at_home
        change = at_home - excess[home]
        if away != home:
            left -= rows[counts[away], 1] - rows[counts[away], 0]
            at_away = _excess_of(away, loads, orders, counts, tables, rows, free_after, limit)
            change += at_away - excess[away]
        if change <= threshold:
            excess[home], excess[away] = at_home, at_away
            slot[i] = there
            if choice == _SWAP:
                slot[j] = here
            else:
                samples[here] -= 1
                samples[there] += 1
            over = np.flatnonzero(excess > 0.0)
        else:
            loads[here], loads[there] = loads_before[0], loads_before[1]
            orders[home], orders[away] = orders_before[0], orders_before[1]
            counts[away] -= fills
            counts[home] += empties
    return float(excess.sum())


@kernel
def _excess_of(
    replica: int, loads: Floats, orders: Ints, counts: Ints, tables: Ints, rows: Ints, free_after: Ints, limit: float
) -> float:
    """Return the excess of one replica, see `excess_over_time`."""
    count = counts[replica]
    if count == 0:
        return 0.0
    table = tables[rows[count, 0] : rows[count, 1]]
    return excess_over_time(loads, replica * orders.shape[1], orders[replica], table, free_after, limit)


@kernel
def _put_last(order: Ints, microbatch: int, count: int) -> None:
    """Move a microbatch to the end of the first `count` of an order."""
    place = 0
    while order[place] != microbatch:
        place += 1
    order[place : count - 1] = order[place + 1 : count].copy()
    order[count - 1] = microbatch


@kernel
def _next(state: np.uint64) -> np.uint64:
    """Return the state of the random generator (xorshift) after `state`."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    return state


@kernel
def _below(state: np.uint64, count: int) -> int:
    """Return a random number 0 .. count - 1 from the upper half of the generator's state; count is below 2^32."""
    below: int = np.int64((state >> np.uint64(32)) * np.uint64(count) >> np.uint64(32))  # type: ignore[assignment]
    return below
