"""Distribution of a sequence's blocks of queries over the ranks of a context-parallel group.

Under a mask that is not causal some blocks attend to much more than others, wherever they stand. Cornstarch (dissertation,
section 3.3.2.1; arXiv:2503.11367, section 4.3.2) gives the block with the most work to the rank with the least so far (LPT): the
listing of Alg. 1 forgets to sort, its text does. That leaves ranks with different numbers of tokens, so that one of them runs out
of memory first, and does the most of all that is not attention. Here no rank gets more blocks than an equal share rounded up: by
falling work they are dealt to the ranks in turn, as long as none gets more than the mean, then to the rank with the least work
that has room, and exchanges between ranks repair what this costs in balance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK = 128
"""Tokens of a block, as FlexAttention and Cornstarch (dissertation, section 3.3.2.1) have them."""

_NOWHERE = -1  # in place of the rank of a block that has none yet
_TRIES = 4  # ranks that are looked at for one block while blocks are dealt
_EXCHANGES = 16  # most exchanges per rank; they end long before, unless there are few blocks and no good distribution
_LEVEL = 1e-3  # a heaviest rank that has so little more than the mean is left as it is


def distribute(work: Ints | Floats, num_ranks: int) -> Ints:
    """Give each of n blocks, in the order of the sequence, to a rank: (n,) ranks, equally many blocks for each, rounded up.

    work: (n,) not negative, in any unit, such as the number of blocks of keys that the queries of a block see.

    Raises ValueError where there are fewer blocks than ranks, or no work.
    """
    weights = checked_work(work, num_ranks)
    limit = -(-weights.size // num_ranks)
    order = _by_falling_work(np.asarray(work))
    ranks = _deal(weights, order, num_ranks, limit)
    _give_rest(weights, order, ranks, num_ranks, limit)
    _exchange(weights, order, ranks, num_ranks, limit, _EXCHANGES * num_ranks)
    return ranks


def checked_work(work: Ints | Floats, num_ranks: int) -> Floats:
    """Return the work of blocks that are to be distributed, as floats. Raises ValueError as `distribute` does."""
    if num_ranks < 1:
        raise ValueError(f"context parallelism takes at least one rank, got cp {num_ranks}")
    if num_ranks > len(work):
        raise ValueError(
            f"cp {num_ranks} is more than the {len(work)} blocks of the sequence, so that a rank would have none: take cp of at "
            f"most {len(work)}, or smaller blocks"
        )
    weights = np.ascontiguousarray(work, np.float64)
    if not weights.any():
        raise ValueError("no token of the sequence sees another, as in padding alone: leave the sequence out of the batch")
    return weights


def _by_falling_work(work: NDArray[np.number[Any]]) -> Ints:
    """Return (n,) blocks by falling work; those of equal work keep their order. Numbers of 16 bits are sorted by their digits."""
    small = work.dtype.kind in "iu" and work.max() < 1 << 16
    return np.argsort((work.max() - work).astype(np.uint16) if small else -np.asarray(work, np.float64), kind="stable")


@kernel
def _deal(weights: Floats, order: Ints, num_ranks: int, limit: int) -> Ints:
    """Deal blocks in the given order to ranks in turn, like cards: (n,) rank of each, or _NOWHERE.

    A rank is passed over if it would get more work than the mean, or more than `limit` blocks. Blocks that a few ranks in a row
    cannot take are left.
    """
    ranks = np.full(weights.size, _NOWHERE)
    level = weights.sum() / num_ranks
    loads, counts = np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
    rank = num_ranks - 1
    for block in order:
        for _ in range(_TRIES):
            rank = rank + 1 if rank + 1 < num_ranks else 0
            if loads[rank] + weights[block] <= level and counts[rank] < limit:
                ranks[block] = rank
                loads[rank] += weights[block]
                counts[rank] += 1
                break
    return ranks


@kernel
def _give_rest(weights: Floats, order: Ints, ranks: Ints, num_ranks: int, limit: int) -> None:
    """Give each block that has no rank, in the given order, to the rank with the least work of those with fewer than `limit`.

    One block takes a look at all ranks, which is sooner done than to keep a heap of them, unless there are hundreds.
    """
    loads, counts = np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
    for block in order:
        if ranks[block] >= 0:
            loads[ranks[block]] += weights[block]
            counts[ranks[block]] += 1
    loads[counts == limit] = np.inf
    for block in order:
        if ranks[block] < 0:
            rank = int(np.argmin(loads))
            ranks[block] = rank
            counts[rank] += 1
            loads[rank] = loads[rank] + weights[block] if counts[rank] < limit else np.inf


@kernel
def _exchange(weights: Floats, order: Ints, ranks: Ints, num_ranks: int, limit: int, most: int) -> None:
    """Lower the work of the heaviest rank, in place, by exchanges with others, the lightest first; a block may go for nothing.

    order: the blocks by falling work. limit: most blocks of a rank. An exchange is the one of the two ranks after which the
    heavier of them is lightest. It ends after `most` exchanges, or where no exchange of the heaviest rank helps.
    """
    loads = np.zeros(num_ranks)
    for block in order:
        loads[ranks[block]] += weights[block]
    level = loads.sum() / num_ranks * (1.0 + _LEVEL)
    if loads.max() <= level:
        return
    of_rank, counts = np.zeros((num_ranks, limit), np.int64), np.zeros(num_ranks, np.int64)  # blocks by falling work
    for block in order:
        of_rank[ranks[block], counts[ranks[block]]] = block
        counts[ranks[block]] += 1
    for _ in range(most):
        heavy = int(np.argmax(loads))
        if loads[heavy] <= level:
            return
        best, best_give, best_take, best_light = loads[heavy], -1, -1, -1
        for light in np.argsort(loads):
            gap = loads[heavy] - loads[light]
            if best_light >= 0 or gap <= 0.0:
                break
            take = 0
            for give in range(counts[heavy]):
                given = weights[of_rank[heavy, give]]
                while take < counts[light] and given - weights[of_rank[light, take]] < gap / 2:
                    take += 1  # what is given falls, so what is taken, too
                for other in range(max(0, take - 1), min(take + 1, counts[light])):
                    moved = given - weights[of_rank[light, other]]
                    heavier = max(loads[heavy] - moved, loads[light] + moved)
                    if heavier < best:
                        best, best_give, best_take, best_light = heavier, give, other, light
                if counts[light] < limit and max(loads[heavy] - given, loads[light] + given) < best:
                    best, best_give, best_take, best_light = max(loads[heavy] - given, loads[light] + given), give, -1, light
        if best_light < 0:
            return
        given = of_rank[heavy, best_give]
        _remove(of_rank[heavy], counts[heavy], best_give)
        counts[heavy] -= 1
        loads[heavy] -= weights[given]
        if best_take >= 0:
            taken = of_rank[best_light, best_take]
            _remove(of_rank[best_light], counts[best_light], best_take)
            counts[best_light] -= 1
            loads[best_light] -= weights[taken]
            _insert(of_rank[heavy], counts[heavy], taken, weights)
            counts[heavy] += 1
            loads[heavy] += weights[taken]
            ranks[taken] = heavy
        _insert(of_rank[best_light], counts[best_light], given, weights)
        counts[best_light] += 1
        loads[best_light] += weights[given]
        ranks[given] = best_light


@kernel
def _insert(blocks: Ints, count: int, block: int, weights: Floats) -> None:
    """Put a block among `count` others by falling work."""
    hole = count
    while hole > 0 and weights[blocks[hole - 1]] < weights[block]:
        blocks[hole] = blocks[hole - 1]
        hole -= 1
    blocks[hole] = block


@kernel
def _remove(blocks: Ints, count: int, place: int) -> None:
    """Take the block at a place out of `count` blocks."""
    for i in range(place, count - 1):
        blocks[i] = blocks[i + 1]
