"""Strategy `joint`: balances all units together, over replicas and microbatches at once. It is Headrace's own.

It makes all microbatches alike in every unit (`balance_units`) and orders those that single heavy samples leave unequal
(`arrange`). Deferral, which Entrain needs because it balances one unit only, then has little left to do: LLM work moves on to the
next microbatch if that still shortens the step, seldom by more than 1 %.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.jit import kernel
from headrace.plan import LLM
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.search.arrangement import arrange
from headrace.reorder_service.planning.search.balance import balance_units
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.screening import seconds_within
from headrace.reorder_service.planning.simulation.simulator import peak_memory, simulate


def plan_slots(batch: Batch) -> Slots:
    """Plan a batch with strategy `joint`: (U, n) slots.

    If transfers have a latency, fewer than K microbatches of a replica may be used.
    """
    count = _num_microbatches(batch)
    equal = arrange(batch, _balanced(batch, count))
    slots = np.broadcast_to(equal, batch.costs.shape)
    deferred = _with_deferral(batch, equal)
    if (deferred == slots).all():
        return slots
    equal_s = simulate(planned_work(batch, slots)).iteration_s
    try:
        return deferred if seconds_within(batch, deferred, equal_s) < equal_s else slots
    except ValueError:  # it defers more than the schedule can wait for
        return slots


def lean_slots(batch: Batch) -> Slots:
    """Plan a batch so that its stages hold little: (U, n) slots, equal in all units.

    All K microbatches are used, and they are alike in their activations as well as in their times.
    """
    columns = np.concatenate([batch.costs, batch.memory])
    slot = balance_units(columns, np.ones(batch.topology.microbatches), batch.topology.replicas, batch.seed)
    return np.broadcast_to(arrange(batch, slot), batch.costs.shape)


def _balanced(batch: Batch, count: int) -> Ints:
    """Spread the samples evenly over the first `count` microbatches of every replica: (n,) slots."""
    slot = balance_units(batch.costs, np.ones(count), batch.topology.replicas, batch.seed)
    wider: Ints = slot + slot // count * (batch.topology.microbatches - count)
    return wider


def _num_microbatches(batch: Batch) -> int:
    """Choose how many of the K microbatches to use: the count with the shortest step if the work were divided evenly.

    More microbatches fill the pipeline better, but each costs its transfers. Fewer microbatches hold more activations at once,
    so a count that exceeds the memory limit is taken only if all do.
    """
    most = batch.topology.microbatches
    if batch.execution.latency_s == 0:
        return most
    best, least = most, np.inf
    for count in sorted({max(1, most * eighths // 8) for eighths in range(1, 9)}, reverse=True):
        work = planned_work(*_even(batch, count))
        if count < most and peak_memory(work).max() > batch.execution.memory_limit:
            break
        seconds = simulate(work).iteration_s
        if seconds < least:
            best, least = count, seconds
    return best


def _even(batch: Batch, count: int) -> tuple[Batch, Slots]:
    """Return a batch of one replica with `count` samples, each a microbatch with an equal share of the work, and its slots."""

    def divided(values: Floats) -> Floats:
        mean = values.sum(axis=1, keepdims=True) / (count * batch.topology.replicas)
        return np.repeat(mean, count, axis=1)

    costs = divided(batch.costs)
    even = replace(
        batch,
        sample_ids=np.arange(count),
        costs=costs,
        memory=costs if batch.memory is batch.costs else divided(batch.memory),
        transfer_bytes=divided(batch.transfer_bytes),
        topology=replace(batch.topology, replicas=1, microbatches=count),
    )
    return even, np.broadcast_to(np.arange(count), even.costs.shape)


def _with_deferral(batch: Batch, slot: Ints) -> Slots:
    """Return (U, n) slots: `slot` in the encoders, and from the LLM on the microbatch to which `defer` moves a sample."""
    units = list(batch.units)
    llm = units.index(LLM)
    occupied = batch.occupied(np.broadcast_to(slot, batch.costs.shape)).sum(axis=1)
    moved = defer(batch.costs[llm], slot, occupied, batch.topology.microbatches)
    return np.stack([slot] * llm + [moved] * (len(units) - llm))


@kernel
def defer(costs: Floats, slot: Ints, occupied: Ints, num_microbatches: int) -> Ints:
    """Move LLM work on to the next microbatch if that lowers the sum of the squared LLM loads: (n,) slots in the LLM.

    costs: (n,) LLM seconds. slot: (n,) slots in the encoders. occupied: (D,) number of microbatches of each replica that hold a
    sample.
    """
    loads = np.zeros(occupied.size * num_microbatches)
    for i in range(slot.size):
        loads[slot[i]] += costs[i]
    moved = slot.copy()
    for i in range(slot.size):
        here = slot[i]
        if here % num_microbatches + 1 < occupied[here // num_microbatches] and loads[here] - loads[here + 1] > costs[i] > 0.0:
            moved[i] = here + 1
            loads[here] -= costs[i]
            loads[here + 1] += costs[i]
    return moved
