"""Strategy `colocated`: plans for trainers that have all units on every rank (FSDP, DDP, Hugging Face). Headrace's own.

Such ranks have no pipeline to fill. What counts is how long they wait for each other: where they meet at every microbatch (the
collectives of FSDP), a step takes the sum over microbatches of the slowest rank's seconds; where they meet once a step (DDP with
accumulated gradients), it takes the slowest rank's sum. Both are at least the even share, the batch's seconds over the ranks.

The seconds of a sample are those of all units together, since a rank runs them one after the other. Samples are dealt by LPT
(`number_partition`) and then exchanged between the slowest rank and the others of its microbatch. Samples that are larger than an
even microbatch are put into the same microbatch, on one rank each, and the ranks beside them get as much.
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.plan import Predicted
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, Slots
from headrace.reorder_service.planning.search.leveling import level_bins
from headrace.reorder_service.planning.search.number_partition import descending, lpt

_NO_LIMIT = np.iinfo(np.int64).max


def plan_slots(batch: Batch) -> Slots:
    """Return the (U, n) slots of the samples, equal in all units. No microbatch has more tokens than the execution allows.

    Raises ValueError if a sample alone has more tokens than a microbatch may have, or if no plan within the limit was found.
    """
    topology, seconds = batch.topology, rank_seconds(batch)
    tokens, limit = _tokens(batch)
    num_slots = batch.num_slots
    if batch.execution.colocated == "step":
        ranks = _deal(seconds, np.zeros_like(tokens), _NO_LIMIT, topology.replicas, 1)
        bins = ranks * topology.microbatches + _split(ranks, tokens, topology.replicas, topology.microbatches)
        if _fullest(bins, tokens, num_slots) > limit:
            bins = _by_tokens(seconds, tokens, limit, topology.replicas, topology.microbatches)
    else:
        places = _deal(seconds, tokens, limit, topology.replicas, topology.microbatches)
        bins = _slots_of_groups(places, topology.replicas, topology.microbatches)
    fullest = _fullest(bins, tokens, num_slots)
    if fullest > limit:
        raise ValueError(
            f"no plan was found whose {num_slots} microbatches have at most {limit:,} tokens each: the batch has "
            f"{int(tokens.sum()):,} tokens, and the fullest microbatch would have {fullest:,}; raise max_tokens, or plan more "
            "microbatches"
        )
    return np.broadcast_to(bins, (len(batch.units), bins.size)).copy()


def predict(batch: Batch, slots: Slots) -> Predicted:
    """Return the time of a step of a plan on colocated ranks, and what the ranks wait for each other.

    A rank's seconds in a microbatch are those of all samples that any unit has there. The bound is the even share, or the largest
    sample where that takes longer.
    """
    topology, factors = batch.topology, _factors(batch)
    loads = batch.loads(slots) @ factors  # (D, K)
    iteration = float(loads.max(axis=0).sum() if batch.execution.colocated == "microbatch" else loads.sum(axis=1).max())
    busy = float(loads.sum())
    bound = max(busy / topology.replicas, float(rank_seconds(batch).max()))
    bubble = max(0.0, 1.0 - busy / (topology.replicas * iteration)) if iteration > 0 else 0.0
    return Predicted(iteration_s=iteration, bubble=bubble, lower_bound_s=min(bound, iteration))


def warm_up() -> None:
    """Compile the kernels of this strategy, or load them from numba's cache."""
    seconds, tokens = np.array([9.0, 1.0, 2.0, 3.0]), np.array([3, 1, 2, 2])
    for limit in (_NO_LIMIT, 3):
        _deal(seconds, tokens, limit, 2, 2)
    _split(np.array([0, 1, 0, 1]), tokens, 2, 2)
    _by_tokens(seconds, tokens, 4, 2, 2)


def rank_seconds(batch: Batch) -> Floats:
    """Return the (n,) forward and backward seconds of each sample in all units together."""
    seconds: Floats = _factors(batch) @ batch.costs
    return seconds


def _factors(batch: Batch) -> Floats:
    """Return (U,) the seconds of forward and backward over those of the forward."""
    return np.array([1.0 + batch.execution.backward_factor(unit) for unit in batch.units])


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


def _deal(seconds: Floats, tokens: Ints, limit: int, num_ranks: int, num_microbatches: int) -> Ints:
    """Return the (n,) places of the samples, microbatch * num_ranks + rank, such that ranks wait little for each other."""
    order = descending(seconds)
    targets = _targets(seconds[order], num_ranks, num_microbatches)
    bins = lpt(seconds, order, targets.size) if targets[0] == targets[-1] else _fill(seconds, order, targets)
    if _fullest(bins, tokens, targets.size) > limit:
        bins = _fill_within(seconds, tokens, order, targets, limit)
    bins = _by_load(bins, seconds, targets.size)
    level_bins(bins, seconds, tokens, limit, num_ranks, num_microbatches)
    return _by_load(bins, seconds, targets.size)


def _targets(falling: Floats, num_ranks: int, num_microbatches: int) -> Floats:
    """Return (D K,) seconds that each place should get: those of its microbatch, equal on all ranks, heavy microbatches first.

    falling: (n,) seconds of the samples in descending order. A microbatch gets an even share of what is left, or the largest
    sample that the microbatches before it leave over, if that is more.
    """
    targets = np.empty(num_ranks * num_microbatches)
    left = float(falling.sum())
    for k in range(num_microbatches):
        largest = falling[k * num_ranks] if k * num_ranks < falling.size else 0.0
        target = max(float(largest), left / (num_ranks * (num_microbatches - k)), 0.0)
        targets[k * num_ranks : (k + 1) * num_ranks] = target
        left = max(0.0, left - num_ranks * target)
    return targets


def _by_load(bins: Ints, seconds: Floats, num_bins: int) -> Ints:
    """Renumber bins by falling load, so that the heaviest are those of the first microbatch."""
    rank = np.empty(num_bins, np.int64)
    rank[descending(_sums(bins, seconds, num_bins))] = np.arange(num_bins)
    return rank[bins]


def _slots_of_groups(places: Ints, num_ranks: int, num_microbatches: int) -> Ints:
    return places % num_ranks * num_microbatches + places // num_ranks


def _by_tokens(seconds: Floats, tokens: Ints, limit: int, num_ranks: int, num_microbatches: int) -> Ints:
    """Return (n,) slots that keep the limit of tokens first: microbatches of even tokens, dealt to ranks by their seconds."""
    weights = tokens.astype(np.float64)
    num_slots = num_ranks * num_microbatches
    bins = _fill_within(weights, tokens, descending(weights), np.full(num_slots, weights.sum() / num_slots), limit)
    loads = _sums(bins, seconds, num_slots)
    return _equal_counts(loads, descending(loads), num_ranks, num_microbatches)[bins]


def _sums(bins: Ints, weights: Floats, num_bins: int) -> Floats:
    return np.bincount(bins, weights=weights, minlength=num_bins).astype(np.float64, copy=False)


def _fullest(bins: Ints, tokens: Ints, num_bins: int) -> int:
    return int(np.bincount(bins, weights=tokens, minlength=num_bins).max())


@kernel
def _fill(weights: Floats, order: Ints, targets: Floats) -> Ints:
    """Put each weight, in the given order, into the bin with the most room left below its target; (n,) bins."""
    bins = np.empty(weights.size, np.int64)
    room = targets.copy()
    for item in order:
        bins[item] = np.argmax(room)
        room[bins[item]] -= weights[item]
    return bins


@kernel
def _fill_within(weights: Floats, tokens: Ints, order: Ints, targets: Floats, limit: int) -> Ints:
    """Like `_fill`, among the bins that have tokens left; where none has, into the one with the fewest tokens."""
    bins = np.empty(weights.size, np.int64)
    room = targets.copy()
    free = np.full(targets.size, limit, np.int64)
    for item in order:
        chosen = -1
        for b in range(targets.size):
            if free[b] >= tokens[item] and (chosen < 0 or room[b] > room[chosen]):
                chosen = b
        if chosen < 0:
            chosen = int(np.argmax(free))
        bins[item] = chosen
        room[chosen] -= weights[item]
        free[chosen] -= tokens[item]
    return bins


@kernel
def _split(ranks: Ints, tokens: Ints, num_ranks: int, num_microbatches: int) -> Ints:
    """Return (n,) microbatches: each rank's samples, longest first, go into its microbatch with the fewest tokens so far."""
    microbatches = np.empty(ranks.size, np.int64)
    filled = np.zeros((num_ranks, num_microbatches), np.int64)
    for item in np.argsort(-tokens, kind="mergesort"):
        of_rank = filled[ranks[item]]
        microbatches[item] = np.argmin(of_rank)
        of_rank[microbatches[item]] += max(tokens[item], 1)
    return microbatches


@kernel
def _equal_counts(loads: Floats, order: Ints, num_ranks: int, num_microbatches: int) -> Ints:
    """Return the (D K,) slots of microbatches: each, in the given order, goes to the lightest rank that has not K yet."""
    slots = np.empty(loads.size, np.int64)
    counts, sums = np.zeros(num_ranks, np.int64), np.zeros(num_ranks)
    for item in order:
        chosen = -1
        for r in range(num_ranks):
            if counts[r] < num_microbatches and (chosen < 0 or sums[r] < sums[chosen]):
                chosen = r
        slots[item] = chosen * num_microbatches + counts[chosen]
        counts[chosen] += 1
        sums[chosen] += loads[item]
    return slots
