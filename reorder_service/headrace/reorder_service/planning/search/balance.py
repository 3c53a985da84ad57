"""Vector balancing: spread samples over microbatches so that every unit's time is level, or follows given targets.

Balancing several units at once is hard in the worst case but easy at the sizes of a global batch: a greedy start and a local
search are enough. The search moves a sample to another microbatch, or swaps two samples, if that lowers

    sum over microbatches m and units u of  t_m (load[m, u] / t_m)^4  +  the same over whole replicas

where loads are in units of the mean microbatch and t_m is a microbatch's target (1 if all are to be equal). The fourth power
looks mostly at the heaviest microbatches but still tells apart plans that share their heaviest one.
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.search.number_partition import descending, lpt
from headrace.reorder_service.planning.seeding import xorshift_state
from headrace.reorder_service.planning.slot_order import samples_by_slot

SEARCH_STEPS = 125_000  # per sample of the mean microbatch, counted as 1 to 4 samples: 2 to 10 ms
SEARCH_STEPS_PER_SAMPLE = 3  # least number of steps per sample of the batch, which counts in large batches
_WINDOW = 4096  # how far apart exchange partners lie in memory: about the first-level cache
_REPLICA_WEIGHT = 4.0  # weight of the replicas' term in the objective: the slowest replica determines the step's time
_HEAT = 0.03  # first threshold: about what a microbatch adds to the objective if its load is 1.07 instead of the mean, 1
_LEAST_GAIN = 1e-12  # least gain of a change that is made: less may be a rounding error


def balance_units(costs: Floats, targets: Floats, num_replicas: int, seed: int) -> Ints:
    """Spread n samples over the K microbatches of each replica so that all units are balanced: (n,) slots r * K + k.

    costs: (U, n) seconds per unit. targets: (K,) positive, the desired relative sizes of a replica's microbatches. No replica
    stays without a sample if n >= num_replicas.
    """
    num_microbatches = targets.size
    means = costs.sum(axis=1) / (num_replicas * num_microbatches)
    means[means == 0] = 1.0  # the costs are zero, or so small that their mean is
    scaled = costs / means[:, None]
    weights, heaviest = np.ascontiguousarray(scaled.T), scaled.max(axis=0)
    target = targets * (num_microbatches / targets.sum())
    order = descending(heaviest)
    replica = lpt(heaviest, order, num_replicas)
    slots = fill(weights, order, replica, target, num_replicas)
    per_microbatch = min(4, max(1, heaviest.size // (num_replicas * num_microbatches)))
    steps = max(SEARCH_STEPS * per_microbatch, SEARCH_STEPS_PER_SAMPLE * heaviest.size)
    exchange(weights, slots, target, num_replicas, steps, xorshift_state(seed))
    return slots


def fill(weights: Floats, order: Ints, replica: Ints, targets: Floats, num_replicas: int) -> Ints:
    """Put each sample, in the given order, into the microbatch of its replica where it does least harm: (n,) slots.

    That is the microbatch whose heaviest unit, relative to its target, is then lightest; the one with the fewest samples wins a
    tie. weights: (n, U). replica: (n,) replica of each sample. targets: (K,).
    """
    by_replica = order[samples_by_slot(replica[order], num_replicas)]
    slots = np.empty(order.size, np.int64)
    slots[by_replica] = _fill(weights.take(by_replica, axis=0), replica[by_replica], targets)
    return slots


@kernel
def _fill(weights: Floats, replica: Ints, targets: Floats) -> Ints:
    """Do what `fill` says for samples in the order in which they are put, which takes one replica after the other."""
    num_samples, num_units = weights.shape
    count = targets.size
    loads = np.zeros((count, num_units))
    samples = np.zeros(count, np.int64)
    slots = np.empty(num_samples, np.int64)
    for i in range(num_samples):
        if i == 0 or replica[i] != replica[i - 1]:
            loads[:], samples[:] = 0.0, 0
        best, least = 0, np.inf
        for k in range(count):
            heaviest = 0.0
            for u in range(num_units):
                load = loads[k, u] + weights[i, u]
                heaviest = load if load > heaviest else heaviest
            heaviest /= targets[k]
            better = (heaviest < least) | ((heaviest == least) & (samples[k] < samples[best]))
            best, least = k if better else best, heaviest if better else least
        slots[i] = replica[i] * count + best
        samples[best] += 1
        for u in range(num_units):
            loads[best, u] += weights[i, u]
    return slots


def exchange(weights: Floats, slots: Ints, targets: Floats, num_replicas: int, steps: int, state: np.uint64) -> None:
    """Improve `slots` (n,) in place by a local search that tries `steps` moves and swaps of samples.

    In the first half it also accepts changes for the worse, up to a threshold that falls to zero (threshold accepting; Dueck and
    Scheuer, 1990): with plain descent, one seed in twenty ends in a poor local optimum.

    weights: (n, U). targets: (K,). state: of the random generator. A sample's partner is one of the next _WINDOW samples in the
    order of the initial slots, so that a large batch is searched a few replicas at a time, within the processor's cache.
    """
    layout = samples_by_slot(slots, num_replicas * targets.size)
    slots[layout] = _exchange(weights.take(layout, axis=0), slots[layout], targets, num_replicas, steps, state)


@kernel
def _exchange(weights: Floats, slots: Ints, targets: Floats, num_replicas: int, steps: int, state: np.uint64) -> Ints:
    """Do what `exchange` says for samples in the order of their slots, and return `slots`, which it changes."""
    num_samples, num_units = weights.shape
    count = targets.size
    loads = np.zeros((num_replicas * count, num_units))
    totals = np.zeros((num_replicas, num_units))
    samples = np.zeros(num_replicas, np.int64)
    for i in range(num_samples):
        samples[slots[i] // count] += 1
        for u in range(num_units):
            loads[slots[i], u] += weights[i, u]
            totals[slots[i] // count, u] += weights[i, u]
    of_replicas = _REPLICA_WEIGHT / (float(count) * count * count)
    replica_of = np.empty(num_replicas * count, np.int64)  # a lookup table: divisions would take half of a step's time
    steepness_of = np.empty(num_replicas * count)
    for slot in range(replica_of.size):
        replica_of[slot] = slot // count
        steepness_of[slot] = 1.0 / targets[slot % count] ** 3
    window = np.uint64(min(num_samples, _WINDOW))
    at = 0
    for step in range(steps):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        near = at + np.int64((state >> np.uint64(32)) * window >> np.uint64(32))
        i, j = at, near if near < num_samples else near - num_samples
        at = at + 1 if at + 1 < num_samples else 0
        swap = state & np.uint64(1) == np.uint64(0)
        here, there = slots[i], slots[j]
        home, away = replica_of[here], replica_of[there]
        if not swap and state & np.uint64(2) == np.uint64(0):  # any microbatch of the partner's replica: it may be empty
            there = away * count + np.int64((state & np.uint64(0xFFFFFF)) * np.uint64(count) >> np.uint64(24))
        if here == there:
            continue
        if home != away and not swap and samples[home] == 1:
            continue
        gain = 0.0
        for u in range(num_units):
            moved = weights[i, u] - (weights[j, u] if swap else 0.0)
            gain += steepness_of[here] * (_fourth(loads[here, u]) - _fourth(loads[here, u] - moved))
            gain += steepness_of[there] * (_fourth(loads[there, u]) - _fourth(loads[there, u] + moved))
            if home != away:
                before = _fourth(totals[home, u]) + _fourth(totals[away, u])
                gain += of_replicas * (before - _fourth(totals[home, u] - moved) - _fourth(totals[away, u] + moved))
        cooling = max(0.0, 1.0 - 2.0 * step / steps)
        if gain <= _LEAST_GAIN - _HEAT * cooling * cooling * cooling:
            continue
        for u in range(num_units):
            moved = weights[i, u] - (weights[j, u] if swap else 0.0)
            loads[here, u] -= moved
            loads[there, u] += moved
            totals[home, u] -= moved
            totals[away, u] += moved
        slots[i] = there
        if swap:
            slots[j] = here
        else:
            samples[home] -= 1
            samples[away] += 1
    return slots


@kernel
def _fourth(x: float) -> float:
    square = x * x
    return square * square
