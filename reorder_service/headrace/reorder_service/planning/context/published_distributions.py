"""Published rules by which blocks of a sequence go to context-parallel ranks, to compare `headrace.block_distribution` with."""

from __future__ import annotations

import numpy as np

from headrace.block_distribution import Floats, Ints, checked_work
from headrace.reorder_service.planning.search.number_partition import descending, lpt


def longest_first(work: Ints | Floats, num_ranks: int) -> Ints:
    """Give blocks to ranks by Cornstarch's rule alone, whatever the numbers of blocks of a rank: (n,) ranks.

    work and errors: as for `headrace.block_distribution.distribute`.
    """
    weights = checked_work(work, num_ranks)
    return lpt(weights, descending(weights), num_ranks)


def ring(num_blocks: int, num_ranks: int) -> Ints:
    """Give rank r the r-th part of the sequence, as ring attention does (arXiv:2310.01889): (n,) ranks."""
    return np.arange(num_blocks) * num_ranks // num_blocks


def zigzag(num_blocks: int, num_ranks: int) -> Ints:
    """Give rank r the chunks r and 2 G - 1 - r of 2 G, which is level under a causal mask (arXiv:2407.21783): (n,) ranks."""
    chunk = np.arange(num_blocks) * 2 * num_ranks // num_blocks
    return np.minimum(chunk, 2 * num_ranks - 1 - chunk)


def shuffled(num_blocks: int, num_ranks: int, seed: int) -> Ints:
    """Deal the blocks at random (arXiv:2503.11367, section 5.3), equally many to each rank, rounded: (n,) ranks."""
    return np.random.default_rng(seed).permutation(np.arange(num_blocks) % num_ranks)


def unevenness(amounts: Ints | Floats, ranks: Ints, num_ranks: int) -> float:
    """Return the most that a rank has over the mean of all, of what blocks have: work, or tokens."""
    of_rank = np.bincount(ranks, weights=amounts, minlength=num_ranks)
    return float(of_rank.max() / of_rank.mean())
