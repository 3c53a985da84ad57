"""Dealing of samples to the replicas of units that have replicas of their own (DistTrain, section 6.1).

Strategies plan as if every unit had as many replicas as the LLM. If a unit has another number, gcd(both numbers) lanes connect
the two, and the samples that a lane has at one microbatch index are dealt to the unit's replicas in that lane. First by LPT: the
heaviest sample goes to the lightest microbatch. Then a local search moves or swaps samples within an index, if that lowers

    sum over microbatches m of  t_m (load[m] / t_m)^4  +  the same over whole replicas

where loads are in units of the unit's mean microbatch, and t_m is the even share of what the plan has for the lane at that index.
A strategy that levels all units also lets two samples change their whole places, in all units, because a few samples can seldom
be dealt evenly: the loads of all units then stay as they were planned, and become level on a unit's own replicas too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.search.number_partition import descending
from headrace.reorder_service.planning.seeding import xorshift_state

DEALING_STEPS = 30  # of the local search per sample, where samples only change the replica of one unit
EXCHANGE_STEPS = 60  # per sample, where they also change whole places; but at least
LEAST_EXCHANGE_STEPS = 100_000  # for small batches, which are the hardest to level: some milliseconds
_WINDOW = 4096  # how far apart samples that change places lie in memory: about the first-level cache
_REPLICA_WEIGHT = 4.0  # weight of the replicas' term in the objective: the slowest replica determines the step's time
_HEAT = 0.03  # first threshold of the search, as in `search.balance`
_LEAST_GAIN = 1e-12  # least gain of a change that is made: less may be a rounding error
_LEAST_TARGET = 0.05  # of a microbatch, relative to the mean: a planned load of zero is no target

Strategy = Callable[[Batch], Slots]


def dealt(strategy: Strategy, *, exchanging: bool = False) -> Strategy:
    """Return the strategy for units with replicas of their own: it plans for equal numbers, and its samples are dealt then.

    exchanging: whether samples may also change their whole places to level the units' own replicas.
    """

    def plan_slots(batch: Batch) -> Slots:
        if not batch.execution.unit_replicas:
            return strategy(batch)
        return deal(batch, strategy(with_equal_replicas(batch)), exchanging=exchanging)

    return plan_slots


def with_equal_replicas(batch: Batch) -> Batch:
    """Return the batch as if every unit had `topology.replicas`, each as fast as the unit's own replicas are on average."""
    speed = np.array(batch.unit_replicas)[:, None] / batch.topology.replicas
    costs = batch.costs / speed
    return replace(
        batch,
        costs=costs,
        memory=costs if batch.memory is batch.costs else batch.memory / speed,
        transfer_bytes=batch.transfer_bytes / speed,
        execution=replace(batch.execution, unit_replicas={}),
    )


def deal(batch: Batch, planned: Slots, *, exchanging: bool = False) -> Slots:
    """Deal the samples of a plan for equal numbers of replicas to the units' own: (U, n) slots of each unit's own replicas.

    planned: (U, n) slots of `topology.replicas` replicas in all units. exchanging: as for `dealt`.
    """
    slots = np.array(planned)
    counts, count = np.array(batch.unit_replicas), batch.topology.microbatches
    own = np.flatnonzero(counts != batch.topology.replicas)
    if own.size == 0:
        return slots
    means = batch.costs.sum(axis=1) / (counts * count)
    means[means == 0] = 1.0  # the costs are zero, or so small that their mean is
    weights = batch.costs / means[:, None]
    targets = np.full((counts.size, counts.max() * count), 1.0)
    widths = np.ones(counts.size, np.int64)
    for u, replicas in enumerate(counts.tolist()):
        lanes = math.gcd(replicas, batch.topology.replicas)
        width = replicas // lanes
        lane = slots[u] // count * lanes // batch.topology.replicas
        group = lane * count + slots[u] % count
        planned_load = np.bincount(group, weights=weights[u], minlength=lanes * count).reshape(lanes, 1, count) / width
        targets[u, : replicas * count] = np.maximum(_LEAST_TARGET, np.repeat(planned_load, width, axis=1).ravel())
        if u in own:
            slots[u] = _lpt(weights[u], descending(weights[u]), lane * width * count + slots[u] % count, width, count, replicas)
            widths[u] = width
    if not exchanging and (widths[own] == 1).all():
        return np.ascontiguousarray(slots)  # samples have no other place in their lanes
    by_sample = np.ascontiguousarray(slots.T)
    num_samples = batch.sample_ids.size
    steps = max(EXCHANGE_STEPS * num_samples, LEAST_EXCHANGE_STEPS) if exchanging else DEALING_STEPS * num_samples
    state = xorshift_state(batch.seed)
    _search(np.ascontiguousarray(weights.T), by_sample, targets, widths, own, count, steps, exchanging, state)
    return np.ascontiguousarray(by_sample.T)


@kernel
def _lpt(weights: Floats, order: Ints, first: Ints, width: int, count: int, num_replicas: int) -> Ints:
    """Put each sample, in the given order, into the lightest of the microbatches that it may have: (n,) slots.

    They are first[i], first[i] + count, ..., `width` of them. Of equally light ones that of the replica with less work is taken.
    """
    loads, totals = np.zeros(num_replicas * count), np.zeros(num_replicas)
    slots = np.empty(weights.size, np.int64)
    for i in order:
        replica = first[i] // count
        best, of_best = first[i], replica
        for w in range(1, width):
            slot = first[i] + w * count
            if loads[slot] < loads[best] or (loads[slot] == loads[best] and totals[replica + w] < totals[of_best]):
                best, of_best = slot, replica + w
        slots[i] = best
        loads[best] += weights[i]
        totals[of_best] += weights[i]
    return slots


@kernel
def _search(
    weights: Floats,
    slots: Ints,
    targets: Floats,
    widths: Ints,
    own: Ints,
    count: int,
    steps: int,
    exchanging: bool,
    state: np.uint64,
) -> None:
    """Improve `slots` (n, U) in place by `steps` tries of the local search that the module describes.

    In the first half it also accepts changes for the worse, up to a threshold that falls to zero (threshold accepting).

    weights: (n, U). targets: (U, most slots of a unit). widths: (U,) replicas of a unit in one lane. own: rows of the units whose
    samples are dealt. state: of the random generator.
    """
    num_samples, num_units = weights.shape
    loads, totals = np.zeros(targets.shape), np.zeros((num_units, targets.shape[1] // count))
    replica_of = np.arange(targets.shape[1]) // count  # a lookup table: divisions would take half of a step's time
    for i in range(num_samples):
        for u in range(num_units):
            loads[u, slots[i, u]] += weights[i, u]
            totals[u, replica_of[slots[i, u]]] += weights[i, u]
    lane_of = np.empty(totals.shape, np.int64)
    for u in range(num_units):
        lane_of[u] = np.arange(totals.shape[1]) // widths[u]
    steepness = 1.0 / targets**3
    of_replicas = _REPLICA_WEIGHT / (float(count) * count * count)
    members, place, first = _groups(slots, widths, own, count, targets.shape[1])
    window = np.uint64(min(num_samples, _WINDOW))
    at = 0
    for step in range(steps):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        cooling = max(0.0, 1.0 - 2.0 * step / steps)
        least = _LEAST_GAIN - _HEAT * cooling * cooling * cooling
        i = members[0, at]
        if exchanging and state & np.uint64(3) != np.uint64(0):
            near = at + np.int64((state >> np.uint64(32)) * window >> np.uint64(32))
            j = members[0, near if near < num_samples else near - num_samples]
            gain = 0.0
            for u in range(num_units):
                moved = weights[i, u] - weights[j, u]
                gain += _gain(loads, totals, steepness, replica_of, of_replicas, u, slots[i, u], slots[j, u], moved)
            if gain > least:
                for u in range(num_units):
                    _move(loads, totals, replica_of, u, slots[i, u], slots[j, u], weights[i, u] - weights[j, u])
                    slots[i, u], slots[j, u] = slots[j, u], slots[i, u]
                for v in range(own.size):
                    places = place[v, i], place[v, j]
                    members[v, places[0]], members[v, places[1]] = j, i
                    place[v, i], place[v, j] = places[1], places[0]
        else:
            dealt_unit = np.int64((state >> np.uint64(8)) & np.uint64(0xFF)) % own.size if own.size > 1 else 0
            u = own[dealt_unit]
            here = slots[i, u]
            lane, index = lane_of[u, replica_of[here]], here - replica_of[here] * count
            group = lane * count + index
            if state & np.uint64(4) == np.uint64(0):  # the sample moves to any replica of the lane, whose microbatch may be empty
                j = i
                other = lane * widths[u] + np.int64((state >> np.uint64(16)) & np.uint64(0xFFFF)) % widths[u]
                there, moved = other * count + index, weights[i, u]
            else:
                begin = first[dealt_unit, group]
                size = np.uint64(first[dealt_unit, group + 1] - begin)
                j = members[dealt_unit, begin + np.int64((state >> np.uint64(32)) * size >> np.uint64(32))]
                there, moved = slots[j, u], weights[i, u] - weights[j, u]
            if here != there and _gain(loads, totals, steepness, replica_of, of_replicas, u, here, there, moved) > least:
                _move(loads, totals, replica_of, u, here, there, moved)
                slots[j, u] = here
                slots[i, u] = there
        at = at + 1 if at + 1 < num_samples else 0


@kernel
def _gain(
    loads: Floats,
    totals: Floats,
    steepness: Floats,
    replica_of: Ints,
    of_replicas: float,
    unit: int,
    here: int,
    there: int,
    moved: float,
) -> float:
    """Return by how much the objective falls if one unit's weight `moved` passes from one slot to another."""
    if here == there:
        return 0.0
    gain: float = steepness[unit, here] * (_fourth(loads[unit, here]) - _fourth(loads[unit, here] - moved))
    gain += steepness[unit, there] * (_fourth(loads[unit, there]) - _fourth(loads[unit, there] + moved))
    home, away = replica_of[here], replica_of[there]
    if home != away:
        before = _fourth(totals[unit, home]) + _fourth(totals[unit, away])
        after = _fourth(totals[unit, home] - moved) + _fourth(totals[unit, away] + moved)
        gain += of_replicas * (before - after)
    return gain


@kernel
def _move(loads: Floats, totals: Floats, replica_of: Ints, unit: int, here: int, there: int, moved: float) -> None:
    loads[unit, here] -= moved
    loads[unit, there] += moved
    totals[unit, replica_of[here]] -= moved
    totals[unit, replica_of[there]] += moved


@kernel
def _groups(slots: Ints, widths: Ints, own: Ints, count: int, num_slots: int) -> tuple[Ints, Ints, Ints]:
    """Return the samples of each dealt unit by group, which is a lane's microbatch index.

    That is members (own.size, n), the place of each sample in it, (own.size, n), and where each group begins,
    (own.size, num_slots + 1).
    """
    num_samples = slots.shape[0]
    members, place = np.empty((own.size, num_samples), np.int64), np.empty((own.size, num_samples), np.int64)
    first = np.zeros((own.size, num_slots + 1), np.int64)
    for v in range(own.size):
        u = own[v]
        group = slots[:, u] // count // widths[u] * count + slots[:, u] % count
        for i in range(num_samples):
            first[v, group[i] + 1] += 1
        for slot in range(num_slots):
            first[v, slot + 1] += first[v, slot]
        filled = first[v].copy()
        for i in range(num_samples):
            members[v, filled[group[i]]] = i
            place[v, i] = filled[group[i]]
            filled[group[i]] += 1
    return members, place, first


@kernel
def _fourth(x: float) -> float:
    square = x * x
    return square * square
