"""Packing of samples into sequences of one fixed length before planning, as DistTrain does (section 2.1 of its paper).

The algorithm is best-fit decreasing: samples from long to short, each into the fullest pack that it fits, or into a new pack
if it fits none. It never takes more than 11/9 of the fewest possible packs plus 4 (Johnson 1973). Only samples of one global
batch share a pack, so packing changes neither the batch's content nor its gradient.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel
from headrace.plan import LLM, StepPlan
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots, slots_of

MOST_CAPACITY = 1 << 24  # tokens in a pack, more than any model's context; it bounds a tree that has a leaf per token


def pack(lengths: NDArray[np.integer], capacity: int) -> Ints:
    """Assign n samples of `lengths` tokens to packs of at most `capacity` tokens: (n,) pack numbers. O(n log capacity).

    Packs are numbered in the order of their first samples. Equally long samples are taken in row order, and among equally
    full packs the one that was opened first is filled.

    Raises ValueError for a length below 1 or above the capacity, with the row and the rule.
    """
    if not 1 <= capacity <= MOST_CAPACITY:
        raise ValueError(f"the length of a packed sequence must be from 1 to {MOST_CAPACITY} tokens, got {capacity}")
    if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"lengths must be a list of integers, got shape {lengths.shape} of {lengths.dtype}")
    wrong = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if wrong.size:
        raise ValueError(
            f"every sample must have 1 to {capacity} tokens to be packed, but row {wrong[0]} has {lengths[wrong[0]]}"
        )
    tokens = np.ascontiguousarray(lengths, dtype=np.int64)
    opened = _best_fit(tokens, np.argsort(-tokens, kind="stable"), capacity)
    _, first_row, number = np.unique(opened, return_index=True, return_inverse=True)
    rank = np.empty(first_row.size, np.int64)
    rank[np.argsort(first_row)] = np.arange(first_row.size)
    return rank[number]


def pack_batch(batch: Batch, lengths: NDArray[np.integer], capacity: int, *, padded: bool) -> tuple[Batch, Ints]:
    """Return a batch whose samples are packs of the samples of `batch`, and the (n,) pack of each sample.

    A pack has the id of its first sample. The costs of its samples add up. padded: whether all packs are made equally long, so
    that each costs the LLM what `capacity` tokens cost on average over the batch. The same holds for memory and transfers.
    `unpack` turns slots of packs back into slots of samples.

    Raises ValueError where `pack` does, and unless there is one length per sample.
    """
    if lengths.shape != batch.sample_ids.shape:
        raise ValueError(f"lengths must have one value per sample ({batch.sample_ids.size}), got shape {lengths.shape}")
    packs = pack(lengths, capacity)
    first_row = np.unique(packs, return_index=True)[1]
    share = capacity / float(lengths.sum(dtype=np.int64))

    def packed(matrix: Floats) -> Floats:
        columns = np.empty((len(batch.units), first_row.size))
        for u, (unit, column) in enumerate(zip(batch.units, matrix, strict=True)):
            columns[u] = column.sum() * share if padded and unit == LLM else np.bincount(packs, weights=column)
        return columns

    batch_of_packs = replace(
        batch,
        sample_ids=batch.sample_ids[first_row],
        costs=packed(batch.costs),
        memory=packed(batch.memory),
        transfer_bytes=packed(batch.transfer_bytes),
        tokens=np.full(first_row.size, capacity) if padded else np.bincount(packs, weights=lengths).astype(np.int64),
    )
    return batch_of_packs, packs


def unpack(slots_of_packs: Slots, packs: Ints) -> Slots:
    """Return the (U, n) slots of the samples from the slots of their packs: each sample goes where its pack goes."""
    return np.take(slots_of_packs, packs, axis=1)


def plan_of_samples(plan_of_packs: StepPlan, batch: Batch, packs: Ints) -> StepPlan:
    """Turn the plan of the packs that `pack_batch` made of `batch` into the plan of the samples of `batch`.

    In every microbatch the samples of a pack follow each other, in the order of the batch.
    """
    first_row = np.unique(packs, return_index=True)[1]
    slots = slots_of(plan_of_packs, batch.sample_ids[first_row])
    by_pack = np.argsort(packs, kind="stable")
    ordered = replace(batch, sample_ids=batch.sample_ids[by_pack], topology=plan_of_packs.topology)
    slots = unpack(slots, packs[by_pack])
    whole, lengths = ordered.replicas(slots), [len(replica) for replica in plan_of_packs.replicas]
    cut = whole if set(lengths) == {plan_of_packs.topology.microbatches} else [r[:n] for r, n in zip(whole, lengths, strict=True)]
    return replace(plan_of_packs, replicas=cut, unit_replicas=ordered.own_replicas(slots))


@kernel
def _best_fit(lengths: Ints, order: Ints, capacity: int) -> Ints:
    """Assign samples to packs by best fit, in the given order: (n,) packs, numbered in the order in which they are opened.

    For each amount of room left there is a heap of the open packs that have it, and a tree of flags over these amounts finds
    the least one that is enough.
    """
    size = 1
    while size <= capacity:
        size *= 2
    occupied = np.zeros(2 * size, np.bool_)  # a binary tree: node i has the children 2 i and 2 i + 1, room r is leaf size + r
    top = np.full(capacity + 1, -1, np.int64)  # by room left: the first opened pack that has it, the root of its heap
    left = np.empty(lengths.size, np.int64)
    right = np.empty(lengths.size, np.int64)
    packs = np.empty(lengths.size, np.int64)
    num_packs = 0
    for row in order:
        room = _least_room(occupied, size, lengths[row])
        if room < 0:
            room, chosen = capacity, num_packs
            num_packs += 1
        else:
            chosen = top[room]
            top[room] = _merge(left, right, left[chosen], right[chosen])
            if top[room] < 0:
                _clear(occupied, size + room)
        packs[row] = chosen
        room -= lengths[row]
        left[chosen] = right[chosen] = -1
        top[room] = _merge(left, right, top[room], chosen)
        _set(occupied, size + room)
    return packs


@kernel
def _least_room(occupied: NDArray[np.bool_], size: int, length: int) -> int:
    """Return the least room of at least `length` that any open pack has, or -1 if none has."""
    node = size + length
    while not occupied[node]:
        while node & 1:  # a right child: no leaf below its parent is to the right of it
            node >>= 1
        if node == 0:
            return -1
        node += 1
    while node < size:
        node *= 2
        if not occupied[node]:
            node += 1
    return node - size


@kernel
def _set(occupied: NDArray[np.bool_], node: int) -> None:
    while node > 0 and not occupied[node]:
        occupied[node] = True
        node >>= 1


@kernel
def _clear(occupied: NDArray[np.bool_], node: int) -> None:
    occupied[node] = False
    while node > 1 and not occupied[node ^ 1]:
        node >>= 1
        occupied[node] = False


@kernel
def _merge(left: Ints, right: Ints, a: int, b: int) -> int:
    """Merge two skew heaps (Sleator and Tarjan 1986), given by their roots, and return the new root; -1 is an empty heap."""
    root, parent = -1, -1
    while a >= 0 and b >= 0:
        if b < a:
            a, b = b, a
        # a gets its children swapped: its left heap moves to the right; its right heap, merged with b, goes to the left
        if parent < 0:
            root = a
        else:
            left[parent] = a
        parent = a
        a, right[parent] = right[parent], left[parent]
    rest = a if a >= 0 else b
    if parent < 0:
        return rest
    left[parent] = rest
    return root
