"""Packing samples into sequences of one fixed length, as DistTrain trains (section 2.1 of its paper), before planning.

Best-fit decreasing: lengths from long to short, each into the fullest pack that it fits, into a new one where it fits none.
It never takes more than 11/9 of the fewest possible packs and 4 (Johnson 1973). Only samples of one global batch share a
pack, so the batch's content and its gradient stay what they were.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel
from headrace.plan import LLM, StepPlan
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots, slots_of

MOST_CAPACITY = 1 << 24  # tokens of a pack, above every model's context: the tree has a leaf for each


def pack(lengths: NDArray[np.integer], capacity: int) -> Ints:
    """(n,) pack of each of n samples of `lengths` tokens, so that no pack has more than `capacity`. O(n log capacity).

    Packs are numbered in the order of their first samples. Equally long samples are taken in the order of their rows, and
    of equally full packs the one is filled that was opened first.

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


def pack_batch(batch: Batch, lengths: NDArray[np.integer], capacity: int) -> tuple[Batch, Ints]:
    """The batch whose samples are packs, and (n,) the pack of each sample of `batch`; `unpack` leads back.

    A pack has the id of its first sample. What its samples cost adds up, but for the LLM: padding makes all packs equally
    long, and so each costs it what `capacity` tokens cost on average over the batch; likewise memory and transfers.

    Raises ValueError as `pack`, and where there is not one length per sample.
    """
    if lengths.shape != batch.sample_ids.shape:
        raise ValueError(f"lengths must have one value per sample ({batch.sample_ids.size}), got shape {lengths.shape}")
    packs = pack(lengths, capacity)
    first_row = np.unique(packs, return_index=True)[1]
    share = capacity / float(lengths.sum(dtype=np.int64))

    def packed(matrix: Floats) -> Floats:
        columns = np.empty((len(batch.units), first_row.size))
        for u, (unit, column) in enumerate(zip(batch.units, matrix, strict=True)):
            columns[u] = column.sum() * share if unit == LLM else np.bincount(packs, weights=column)
        return columns

    batch_of_packs = replace(
        batch,
        sample_ids=batch.sample_ids[first_row],
        costs=packed(batch.costs),
        memory=packed(batch.memory),
        transfer_bytes=packed(batch.transfer_bytes),
    )
    return batch_of_packs, packs


def unpack(slots_of_packs: Slots, packs: Ints) -> Slots:
    """(U, n) slots of the samples: each goes where its pack goes."""
    return np.take(slots_of_packs, packs, axis=1)


def plan_of_samples(plan_of_packs: StepPlan, batch: Batch, packs: Ints) -> StepPlan:
    """The plan of `batch` after its packs, the batch that `pack_batch` made of it, have been planned."""
    first_row = np.unique(packs, return_index=True)[1]
    slots = unpack(slots_of(plan_of_packs, batch.sample_ids[first_row]), packs)
    return replace(plan_of_packs, replicas=batch.replicas(slots))


@kernel
def _best_fit(lengths: Ints, order: Ints, capacity: int) -> Ints:
    """(n,) pack of each sample, numbered as opened.

    Open packs lie by the room that they have left. For each amount of room there is a heap of packs, and a tree of flags
    over the amounts finds the least one that is enough.
    """
    size = 1
    while size <= capacity:
        size *= 2
    occupied = np.zeros(2 * size, np.bool_)  # a tree: node i is over 2 i and 2 i + 1, and the leaf of room r is size + r
    top = np.full(capacity + 1, -1, np.int64)  # pack of the lowest number with so much room
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
    """The least room of at least `length` that any pack has, or -1."""
    node = size + length
    while not occupied[node]:
        while node & 1:  # a right child: nothing lies behind it below its parent
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
    """The root of two skew heaps (Sleator and Tarjan 1986) as one; -1 is an empty one."""
    root, parent = -1, -1
    while a >= 0 and b >= 0:
        if b < a:
            a, b = b, a
        # a is the parent of what is still to be merged: its right heap, put on the left, in exchange for its left one
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
