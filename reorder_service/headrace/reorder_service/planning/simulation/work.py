"""The simulator's input: the work that a plan gives to the stages, made from a batch and the slots of its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel
from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.execution import Execution
from headrace.schedule import Kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """Dependencies between microbatches of different units, and transfer times, for plans with deferral or slow transfers.

    Link l lies between unit l and the unit behind it. The first axis of every array is `headrace.schedule.Kind`, of which only
    forward and backward occur.
    """

    hop_s: Floats
    """(2, D * K, U) seconds from the end of a slot's action until the next stage of the unit may start on it.

    On the way back, that is the previous stage. It is the slot's transfer time, less the time that both stages work on it at
    once, so it may be negative.
    """
    offsets: Ints
    """(2, L, D * K + 1) where the inputs of each slot begin and end in `slots` and `delay_s`."""
    slots: Ints
    """(2, L, n) slots of the unit on the other side of the link that send samples (or on the way back, gradients) to a slot."""
    delay_s: Floats
    """(2, L, n) seconds from the end of the sending slot's action until its data have arrived.

    That is the transfer time, less the time that the sender still computes after it has sent them.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The work of one step: the time and memory of every action of D replicas with S stages and K microbatches each.

    D is the number of replicas of the unit that has most of them. The stages of a replica that a unit does not have take no time
    and no memory, and no microbatch waits for them.
    """

    topology: Topology
    execution: Execution
    unit_replicas: tuple[int, ...]
    """Number of replicas of each of the U units."""
    seconds: Floats
    """(D, K, S, kinds) of one action, on one chunk if a stage has several; the last axis is `headrace.schedule.Kind`."""
    memory: Floats
    """(2, D * K, U) activations that a stage of the unit takes with a microbatch's forward, and that it releases afterwards."""
    occupied: NDArray[np.bool_]
    """(D, K) whether a microbatch runs: it holds a sample in any unit, on its replica or one that runs together with it."""
    links: Links | None
    """Dependencies and transfers; None if microbatches wait only for equal ones of other stages and no transfer takes time."""
    replicas_coupled: bool
    """Whether replicas wait for each other within the step, because they exchange samples."""
    lower_bound_s: float
    """Seconds that no plan of the batch can beat, see `lower_bound`."""

    @classmethod
    def of(cls, batch: Batch, slots: Slots, pieces: Mapping[str, int] | None = None, *, has_links: bool = True) -> Work:
        """Compute the work of a plan, given by its slots, under the batch's execution.

        pieces: by unit, into how many actions each of a stage's is cut; times and memory are then those of a piece. has_links:
        whether links are computed; what stages hold does not depend on them.

        A microbatch's cost in a unit is spread over the unit's stages and their chunks, evenly unless `Execution.stage_loads`
        says otherwise. If it is not 0, what each microbatch takes besides (`Execution.microbatch_s`) is added. With split
        backward, a sample's backward runs in every unit at the position that its microbatch has in the last unit; otherwise with
        its microbatch.

        Empty microbatches are left out. If replicas exchange samples, all run the microbatches that hold a sample on any of
        them, so that equal positions are equal microbatches and (with split backward) no replica waits for itself. They always
        exchange samples where units have different numbers of replicas.
        """
        topology, execution = batch.topology, batch.execution
        stages = np.array(list(topology.stages.values()))
        factors = np.array([execution.factors(unit) for unit in batch.units])
        has_backward = np.array([execution.backward_factor(unit) > 0 for unit in batch.units])
        per_action = 1.0 / (stages * execution.chunks * np.array([(pieces or {}).get(unit, 1) for unit in batch.units]))
        unit_of_stage = np.repeat(np.arange(stages.size), stages)
        replica = slots // topology.microbatches
        deferred = not (slots == slots[-1]).all()
        has_links = has_links and (deferred or _transfers_take_time(batch))
        replicas_coupled = deferred and bool((replica != replica[-1]).any())
        back = backward_slots(batch, slots)
        forth_s, back_s = _forth_and_back(batch, batch.costs, slots, back)
        forth_memory, back_memory = (
            (forth_s, back_s) if batch.memory is batch.costs else _forth_and_back(batch, batch.memory, slots, back)
        )
        occupied = batch.occupied(slots)
        if replicas_coupled:
            occupied = np.tile(occupied.any(axis=0), (batch.most_replicas, 1))
        shape = (batch.most_replicas, topology.microbatches, unit_of_stage.size, len(Kind))
        seconds = np.stack([forth_s, back_s, back_s], axis=-1) * factors
        if execution.microbatch_s:
            fixed_s = np.array([execution.microbatch_s.get(unit, (0.0, 0.0, 0.0)) for unit in batch.units])
            seconds += fixed_s * (seconds > 0)
        seconds *= per_action[:, None]
        return cls(
            topology=topology,
            execution=execution,
            unit_replicas=batch.unit_replicas,
            seconds=np.take(seconds, unit_of_stage, axis=1).reshape(shape) * _stage_loads(topology, execution),
            memory=np.stack((forth_memory, back_memory)) * (per_action * has_backward),
            occupied=occupied,
            links=_links(batch, slots, back, has_backward, per_action) if has_links else None,
            replicas_coupled=replicas_coupled,
            lower_bound_s=lower_bound(batch),
        )


def backward_slots(batch: Batch, slots: Slots) -> Slots:
    """Return (U, n) the slots in which samples run their backward: `slots` itself, unless it is split and samples are
    deferred."""
    count = batch.topology.microbatches
    if not batch.execution.split_backward or (slots == slots[-1]).all():
        return slots
    back = slots // count * count + slots[-1] % count
    return slots if np.array_equal(back, slots) else back  # as where samples cross replicas, but keep their microbatch's index


def _stage_loads(topology: Topology, execution: Execution) -> Floats:
    """Return (S, kinds) the time of each stage over an even share of its unit's; 1.0 where all stages are even."""
    loads = np.ones((topology.num_stages, len(Kind)))
    first = 0
    for unit, stages in topology.stages.items():
        if unit in execution.stage_loads and len(execution.stage_loads[unit]) == stages:
            loads[first : first + stages] = execution.stage_loads[unit]
        first += stages
    return loads


def lower_bound(batch: Batch) -> float:
    """Return the seconds that no plan of this batch on this topology can beat.

    That is the larger of two times: the work of the busiest unit, spread over the stages of all its replicas; and the longest
    path of one sample forward and backward, through the slowest of its encoders, without weight gradients that are put off.
    """
    stages = np.array(list(batch.topology.stages.values()))
    seconds = (batch.costs * batch.step_factors[:, None]).sum(axis=1)
    return max(float((seconds / (stages * batch.unit_replicas)).max()), longest_way(batch))


def longest_way(batch: Batch) -> float:
    """Return the seconds of the longest path of one sample forward and backward, through the slowest of its encoders.

    Weight gradients that are put off are not on it.
    """
    factors = np.array([batch.execution.factors(unit) for unit in batch.units])
    num_encoders = len(batch.topology.encoders)
    on_the_way = batch.costs * factors[:, : Kind.WEIGHT].sum(axis=1, keepdims=True)
    way = on_the_way[num_encoders:].sum(axis=0)
    if num_encoders:
        way = way + on_the_way[:num_encoders].max(axis=0)
    return float(way.max())


def _forth_and_back(batch: Batch, values: Floats, slots: Slots, back: Slots) -> tuple[Floats, Floats]:
    """Add up (U, n) values by forward slot and by backward slot: two (D * K, U) arrays."""
    forth = _by_slot(batch, values, slots)
    return forth, forth if back is slots else _by_slot(batch, values, back)


def _by_slot(batch: Batch, values: Floats, slots: Slots) -> Floats:
    sums = np.empty((batch.num_slots, len(values)))
    for u, (slot, of_unit) in enumerate(zip(slots, values, strict=True)):
        sums[:, u] = np.bincount(slot, weights=of_unit, minlength=batch.num_slots)
    return sums


def _transfers_take_time(batch: Batch) -> bool:
    execution = batch.execution
    return execution.latency_s > 0 or (execution.bytes_per_s < np.inf and bool(batch.transfer_bytes.any()))


def _links(batch: Batch, slots: Slots, back: Slots, has_backward: NDArray[np.bool_], per_action: Floats) -> Links:
    """Compute the links between all units. Nothing is sent back to a unit without a backward.

    With split backward, a microbatch of deferred samples is passed in parts: the samples that share a microbatch the other way,
    in the order of those microbatches. Each part is sent when it is done (`pipeline.routes`). per_action: (U,) share of a
    sample's cost in a unit that one action takes.
    """
    num_links, num_encoders, latency_s = len(batch.units) - 1, len(batch.topology.encoders), batch.execution.latency_s
    seconds = batch.transfer_bytes / batch.execution.bytes_per_s
    hop_s = np.stack([_by_slot(batch, seconds, of_kind) for of_kind in (slots, back)])
    if latency_s > 0:
        hop_s += latency_s * np.stack([_by_slot(batch, np.ones_like(seconds), of_kind) > 0 for of_kind in (slots, back)])
    hop_s[1, :, ~has_backward] = 0.0
    links = Links(
        hop_s=hop_s,
        offsets=np.zeros((2, num_links, batch.num_slots + 1), np.int64),
        slots=np.zeros((2, num_links, slots.shape[1]), np.int64),
        delay_s=np.zeros((2, num_links, slots.shape[1])),
    )
    early_s = np.zeros((2, *slots.shape))
    split = back is not slots
    slots, back = np.ascontiguousarray(slots), np.ascontiguousarray(back)
    if split:
        shape = batch.num_slots, batch.topology.microbatches
        for u, unit in enumerate(batch.units):
            forth_s = per_action[u] * batch.costs[u]
            forth, early_s[0, u] = parts_of_slots(slots[u], back[u], forth_s, *shape)
            come_back, _ = parts_of_slots(back[u], slots[u], forth_s * batch.execution.factors(unit)[1], *shape)
            hop_s[:, :, u] -= forth, come_back
    for link in range(num_links):
        behind = max(link + 1, num_encoders)
        ways = ((slots[link], slots[behind]), (back[behind], back[link]))
        for kind, (source, target) in enumerate(ways):
            free = kind == 1 and not has_backward[link]
            link_inputs(
                source,
                target,
                np.zeros_like(seconds[link]) if free else seconds[link],
                0.0 if free else latency_s,
                early_s[kind, link],
                links.offsets[kind, link],
                links.slots[kind, link],
                links.delay_s[kind, link],
            )
    return links


@kernel
def parts_of_slots(slots: Ints, others: Ints, seconds: Floats, num_slots: int, num_microbatches: int) -> tuple[Floats, Floats]:
    """Compute how the parts of slots overlap between stages; a part is a slot's samples with the same microbatch the other way.

    slots, others: (n,) slots of the samples in one direction (forward or backward) and in the other. seconds: (n,) of one action.
    Returns (num_slots,) how long two neighbouring stages of a unit work on a slot at once, where the second starts as soon as it
    need not wait between parts; and (n,) how long the parts take that follow a sample's own part.
    """
    position = others % num_microbatches
    by_slot = _by_label(slots, num_slots, _by_label(num_microbatches - 1 - position, num_microbatches, np.arange(slots.size)))
    overlap, later = np.zeros(num_slots), np.empty(slots.size)
    begin = 0
    while begin < by_slot.size:
        slot, total, longest = slots[by_slot[begin]], 0.0, 0.0
        while begin < by_slot.size and slots[by_slot[begin]] == slot:
            end, part = begin, 0.0
            while end < by_slot.size and slots[by_slot[end]] == slot and position[by_slot[end]] == position[by_slot[begin]]:
                part += seconds[by_slot[end]]
                later[by_slot[end]] = total
                end += 1
            total += part
            longest = max(longest, part)
            begin = end
        overlap[slot] = total - longest
    return overlap, later


@kernel
def _by_label(labels: Ints, num_labels: int, order: Ints) -> Ints:
    """Return positions, given in some order, by rising label 0 .. num_labels - 1; those of equal labels keep their order."""
    place = np.zeros(num_labels + 1, np.int64)
    for label in labels:
        place[label + 1] += 1
    place = np.cumsum(place)
    sorted_by_label = np.empty(order.size, np.int64)
    for i in order:
        sorted_by_label[place[labels[i]]] = i
        place[labels[i]] += 1
    return sorted_by_label


@kernel
def link_inputs(
    source: Ints,
    target: Ints,
    seconds: Floats,
    latency_s: float,
    early_s: Floats,
    offsets: Ints,
    slots: Ints,
    slot_delay_s: Floats,
) -> None:
    """Find the source slots that send samples over a link to each target slot, and how long that takes. O(n + number of slots).

    source, target: (n,) slots of the samples. seconds: (n,) a sample's transfer over the link's bandwidth. early_s: (n,) how
    long before the end of its source's action a sample is sent. Fills offsets (number of slots + 1,), and in slots and
    slot_delay_s (n,), from offsets[t] to offsets[t + 1], every source of t once: with the seconds of all its samples to t and one
    latency, less the time by which the last of them is early.
    """
    num_slots = offsets.size - 1
    place = np.zeros(num_slots + 1, np.int64)
    for t in target:
        place[t + 1] += 1
    place = np.cumsum(place)
    ends = place[1:].copy()
    by_target = np.empty(target.size, np.int64)
    for i in range(target.size):
        by_target[place[target[i]]] = i
        place[target[i]] += 1
    early = np.empty(target.size)
    at = np.full(num_slots, -1)  # place of each source in `slots`; one before offsets[t] is that of an earlier target
    filled = 0
    first = 0
    for t in range(num_slots):
        offsets[t] = filled
        for i in by_target[first : ends[t]]:
            s = source[i]
            if at[s] < offsets[t]:
                at[s] = filled
                slots[filled] = s
                slot_delay_s[filled] = latency_s
                early[filled] = early_s[i]
                filled += 1
            slot_delay_s[at[s]] += seconds[i]
            early[at[s]] = min(early[at[s]], early_s[i])
        first = ends[t]
    offsets[num_slots] = filled
    slot_delay_s[:filled] -= early[:filled]
