"""Strategy `colocated`: plans for trainers that have all units on every rank (FSDP, DDP, Hugging Face). It is Headrace's own.

Such ranks have no pipeline to fill. What counts is how long they wait for each other (`colocated_step`), under a limit on the
tokens of a microbatch. No plan takes less than the even share, the batch's seconds over the ranks, or than the largest sample.

Samples are put into the lightest microbatch, the largest first (LPT), and then exchanged between heavy and light microbatches.
Where ranks meet at every microbatch, those of equal weight have the same number. Samples that are larger than an even microbatch
stand side by side in the first ones, beside as much work on the other ranks, and the later microbatches are lighter in return.
Where ranks meet once a step, only their sums are balanced, and a rank's samples are spread over its microbatches by their tokens.
All ranks have K microbatches; one with few, large samples has empty ones at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.search.limited_partition import NOWHERE, deal, fill, first_fit
from headrace.reorder_service.planning.search.number_partition import descending, lpt
from headrace.reorder_service.planning.search.pair_levelling import level_pairs
from headrace.reorder_service.planning.simulation.colocated_step import least_seconds, sample_seconds, step_seconds
from headrace.reorder_service.planning.strategies import arrival

_NO_LIMIT = np.iinfo(np.int64).max
_MANY = 32  # samples of a microbatch from which on they are dealt first: its exchanges then level what that leaves uneven
_LEVEL = 5e-4  # a bin is level that exceeds the mean by no more than this share
_FEW = 4096  # most samples for which all plans are made and the best is taken; of more, the first good one is
_GOOD = 1e-3  # a plan is good that exceeds the least possible time by no more than this share


def plan_slots(batch: Batch) -> Slots:
    """Plan a batch for colocated ranks: (U, n) slots, equal in all units, with the heaviest microbatches first.

    Raises ValueError if a sample has more tokens than a microbatch may have, or if no plan within the limit is found.
    """
    seconds = sample_seconds(batch)
    goal = least_seconds(batch, seconds) * (1.0 + (_GOOD if seconds.size > _FEW else 0.0))
    tokens, limit = _tokens(batch)
    best, least = None, np.inf
    for slot in _plans(batch, seconds, tokens, limit):
        if limit < _NO_LIMIT and np.bincount(slot, weights=tokens).max() > limit:
            continue
        loads = _sums(batch, slot, seconds)
        step = step_seconds(batch, loads.reshape(batch.topology.replicas, -1))
        if best is None or step < least:
            best, least = slot, step
        if least <= goal:
            break
    if best is None:
        raise ValueError(
            f"no plan was found within max_tokens: the {tokens.size:,} samples of the step have {int(tokens.sum()):,} tokens, "
            f"its {batch.num_slots:,} microbatches room for {limit:,} each, {batch.num_slots * limit:,} in all: raise "
            "max_tokens, plan more microbatches, or take fewer samples a step"
        )
    return np.broadcast_to(best, batch.costs.shape)


def _plans(batch: Batch, seconds: Floats, tokens: Ints, limit: int) -> Iterator[Ints]:
    """Yield (n,) slots of several plans, the most promising first; they may exceed the limit."""
    ranks, microbatches = batch.topology.replicas, batch.topology.microbatches
    order = descending(seconds)
    if batch.execution.colocated == "step" and microbatches > 1:
        rank = level(seconds, order, np.zeros(ranks), tokens, min(limit, _NO_LIMIT // microbatches) * microbatches)
        weights = seconds if limit == _NO_LIMIT else tokens.astype(np.float64)
        yield _heaviest_first(batch, spread(rank, descending(weights), weights, ranks, microbatches), seconds)
    heights = column_heights(seconds[order], ranks, microbatches) if microbatches > 1 else np.zeros(1)
    if heights[0] > heights[-1]:
        yield _in_columns(batch, level(seconds, order, np.tile(heights[0] - heights, ranks), tokens, limit), seconds)
    yield _in_columns(batch, level(seconds, order, np.zeros(batch.num_slots), tokens, limit), seconds)
    yield _in_columns(batch, lpt(seconds, order, batch.num_slots), seconds)
    yield arrival.plan_slots(batch)[0]


def _tokens(batch: Batch) -> tuple[Ints, int]:
    """Return the (n,) tokens of the samples and the most that a microbatch may have; zeros and no limit if there is none."""
    limit = batch.execution.max_tokens
    if limit is None:
        return np.zeros(batch.sample_ids.size, np.int64), _NO_LIMIT
    if batch.tokens is None:
        raise ValueError(f"max_tokens ({limit}) needs to know how many tokens each sample has")
    longest = int(batch.tokens.argmax())
    if batch.tokens[longest] > limit:
        raise ValueError(
            f"sample {batch.sample_ids[longest]} has {batch.tokens[longest]:,} tokens, more than a microbatch may have "
            f"({limit:,}): raise max_tokens, or lower text.max_tokens so that such samples are refused"
        )
    return batch.tokens, limit


def level(seconds: Floats, order: Ints, heads: Floats, tokens: Ints, limit: int = _NO_LIMIT) -> Ints:
    """Spread samples over B bins that begin with `heads` seconds so that all end alike: (n,) bins.

    order: (n,) samples by falling seconds. A bin has more tokens than the limit only if no way to avoid that is found.
    """
    many = seconds.size >= _MANY * heads.size
    bins = deal(seconds, order, heads, tokens, limit) if many else np.full(seconds.size, NOWHERE)
    fill(seconds, order, heads, tokens, limit, bins)
    if limit < _NO_LIMIT and bins.min() == NOWHERE:
        bins = _within_limit(bins, tokens, limit, heads.size)
    goal = float(seconds.sum() + heads.sum()) / heads.size * (1.0 + _LEVEL)
    level_pairs(seconds, order, heads, goal, tokens, limit, bins)
    return bins


def _within_limit(bins: Ints, tokens: Ints, limit: int, num_bins: int) -> Ints:
    """Find bins for the samples that are NOWHERE, and exchange samples until no bin has too many tokens: (n,) bins.

    If that does not succeed, all samples are packed anew by first-fit decreasing; those for which there is no room are put into
    the first bin.
    """
    length, unlimited, empty = tokens.astype(np.float64), np.zeros_like(tokens), np.zeros(num_bins)
    longest_first = descending(length)
    fill(length, longest_first, empty, unlimited, _NO_LIMIT, bins)
    level_pairs(length, longest_first, empty, float(limit), unlimited, _NO_LIMIT, bins)
    if np.bincount(bins, weights=tokens).max() > limit:
        bins = np.maximum(first_fit(tokens, longest_first, num_bins, limit), 0)
    return bins


def _heaviest_first(batch: Batch, slot: Ints, seconds: Floats) -> Ints:
    """Return the (n,) slots after each rank has put its microbatches into the order of falling load, empty ones last."""
    owner = np.repeat(np.arange(batch.topology.replicas), batch.topology.microbatches)
    moved = np.empty(batch.num_slots, np.int64)
    moved[np.lexsort((*_emptiest_last(batch, slot, seconds), owner))] = np.arange(batch.num_slots)
    return moved[slot]


def _in_columns(batch: Batch, bins: Ints, seconds: Floats) -> Ints:
    """Return the (n,) slots of samples in D * K bins, the D heaviest of which become the first microbatches, and so on.

    Of these, the rank with the least work so far gets the heaviest one. So ranks that need not wait at each microbatch do not.
    """
    ranks, microbatches = batch.topology.replicas, batch.topology.microbatches
    if microbatches == 1:
        return bins
    columns = np.lexsort(_emptiest_last(batch, bins, seconds)).reshape(microbatches, ranks)
    loads = _sums(batch, bins, seconds)
    slots, work = np.empty(batch.num_slots, np.int64), np.zeros(ranks)
    for k, column in enumerate(columns):
        rank = np.argsort(work, kind="stable")
        slots[column] = rank * microbatches + k
        work[rank] += loads[column]
    return slots[bins]


def _emptiest_last(batch: Batch, bins: Ints, seconds: Floats) -> tuple[Ints, Floats]:
    """Return the keys by which `np.lexsort` sorts D * K bins by falling load, those without a sample last."""
    counts = np.bincount(bins, minlength=batch.num_slots).astype(np.int64, copy=False)
    return -counts, -_sums(batch, bins, seconds)


def _sums(batch: Batch, bins: Ints, seconds: Floats) -> Floats:
    """Return the (D * K,) seconds of every bin."""
    return np.bincount(bins, weights=seconds, minlength=batch.num_slots).astype(np.float64, copy=False)


def warm_up() -> None:
    """Compile the kernels of this strategy, or load them from numba's cache."""
    seconds, tokens, heads = np.ones(2), np.ones(2, np.int64), np.zeros(1)
    order = descending(seconds)
    bins = deal(seconds, order, heads, tokens, _NO_LIMIT)
    fill(seconds, order, heads, tokens, _NO_LIMIT, bins)
    level_pairs(seconds, order, heads, 0.0, tokens, _NO_LIMIT, bins)
    first_fit(tokens, order, 1, _NO_LIMIT)
    column_heights(seconds, 1, 2)
    spread(bins, order, seconds, 1, 2)


@kernel
def column_heights(falling: Floats, ranks: int, microbatches: int) -> Floats:
    """Return the (K,) seconds that every rank should spend in each microbatch, where they meet: falling, the even share in sum.

    falling: (n,) seconds of the samples, the largest first. A microbatch gets an even share of what is left, or the largest
    sample that has no place yet if that is more. Then the samples that are larger than an even share of the rest get a place in
    it: side by side and, as far as they fit, one behind the other.
    """
    heights = np.zeros(microbatches)
    left = max(falling.sum() / ranks, falling[0])
    placed = np.zeros(falling.size, np.bool_)
    largest = 0
    for k in range(microbatches):
        while largest < falling.size and placed[largest]:
            largest += 1
        even = left / (microbatches - k)
        if largest == falling.size or falling[largest] <= even:
            heights[k:] = even
            break
        heights[k] = falling[largest]
        left = max(0.0, left - heights[k])
        if k + 1 < microbatches:
            _place(falling[largest:], left / (microbatches - k - 1), heights[k], ranks, placed[largest:])
    return heights


@kernel
def _place(falling: Floats, least: float, height: float, ranks: int, placed: NDArray[np.bool_]) -> None:
    """Mark the samples that have a place in bins of the given height, one a rank, by first fit: of those larger than `least`."""
    room = np.full(ranks, height)
    first = 0  # the bins before it are full
    for i in range(falling.size):
        if falling[i] <= least:
            break
        while first < ranks and room[first] <= least:
            first += 1
        r = first
        while r < ranks and room[r] < falling[i]:
            r += 1
        if r < ranks and not placed[i]:
            room[r] -= falling[i]
            placed[i] = True


@kernel
def spread(rank: Ints, order: Ints, weights: Floats, ranks: int, microbatches: int) -> Ints:
    """Spread the samples of each rank over its K microbatches, in the given order, each into the lightest: (n,) slots.

    rank: (n,) of each sample. Of equally light microbatches, the one with fewer samples is taken.
    """
    loads, counts = np.zeros(ranks * microbatches), np.zeros(ranks * microbatches, np.int64)
    slots = np.empty(rank.size, np.int64)
    for i in order:
        best = rank[i] * microbatches
        for slot in range(best + 1, (rank[i] + 1) * microbatches):
            if loads[slot] < loads[best] or (loads[slot] == loads[best] and counts[slot] < counts[best]):
                best = slot
        slots[i] = best
        loads[best] += weights[i]
        counts[best] += 1
    return slots
