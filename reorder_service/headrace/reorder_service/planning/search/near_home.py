"""Balancing near home: every node, and every rank of it, gets its share, and as few samples as possible leave their home node.

OrchMLLM balances a phase first and then permutes whole batches over the nodes (`node_permutation`, `node_assignment`). By then
each batch has its samples from all nodes, so that little can be saved. But which sample goes into which batch is free too. So
here the samples begin on their home nodes, where what becomes of them is needed. A node with more than its share gives samples
away, the largest that it can without falling below its share; those go to nodes with less. Then each node deals its samples to
its ranks by LPT. What crosses nodes is then by how much the nodes differed, a few per cent of all, and ranks are about as level
as by LPT over all of them, since a node's share is that of its ranks.

Last, ranks that are still heavier than the rest exchange samples with light ones, wherever these are (`pair_levelling`).
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.search.limited_partition import NOWHERE, fill
from headrace.reorder_service.planning.search.number_partition import descending
from headrace.reorder_service.planning.search.pair_levelling import level_pairs

NODE_LEVEL = 1e-3  # share of its mean by which a node may exceed it: its ranks are no more level than that
RANK_LEVEL = 3e-3  # the same of a rank; an exchange between nodes makes samples travel, so that less is not worth it
_NO_LIMIT = np.iinfo(np.int64).max


def balance_near(weights: Floats, homes: Ints, num_ranks: int, ranks_per_node: int) -> Ints:
    """Spread n samples over the ranks so that these are level and few samples leave their home nodes: (n,) rank of each.

    homes: (n,) home node of each sample, or NOWHERE, whose sample goes where room is. Node j has the ranks from j times
    ranks_per_node on, the last node perhaps fewer. O(n log nodes + n ranks_per_node).
    """
    order, unlimited = descending(weights), np.zeros(weights.size, np.int64)
    first = np.minimum(np.arange(-(-num_ranks // ranks_per_node) + 1) * ranks_per_node, num_ranks)
    share = float(weights.sum()) / num_ranks
    heads = (ranks_per_node - np.diff(first)) * share
    level = share * ranks_per_node
    nodes = homes.copy()
    give_away(weights, order, heads, level, nodes)
    fill(weights, order, heads, unlimited, _NO_LIMIT, nodes)
    level_pairs(weights, order, heads, level * (1.0 + NODE_LEVEL), unlimited, _NO_LIMIT, nodes)
    ranks = deal_within(weights, order, nodes, first)
    goal = max(share, float(weights.max(initial=0.0))) * (1.0 + RANK_LEVEL)
    level_pairs(weights, order, np.zeros(num_ranks), goal, unlimited, _NO_LIMIT, ranks)
    return ranks


@kernel
def give_away(weights: Floats, order: Ints, heads: Floats, level: float, nodes: Ints) -> None:
    """Take samples off the nodes that are heavier than `level`, so that they do not fall below it: their node becomes NOWHERE.

    order: (n,) samples by falling weight. heads: (N,) what a node has without any sample. nodes: (n,) changed in place.
    """
    loads = heads.copy()
    for item in range(nodes.size):
        if nodes[item] != NOWHERE:
            loads[nodes[item]] += weights[item]
    for item in order:
        node = nodes[item]
        if node != NOWHERE and weights[item] > 0 and loads[node] - weights[item] >= level:
            loads[node] -= weights[item]
            nodes[item] = NOWHERE


@kernel
def deal_within(weights: Floats, order: Ints, nodes: Ints, first: Ints) -> Ints:
    """Deal the samples of every node to its ranks, in the given order, each to the lightest: (n,) rank of each.

    first: (N + 1,) first rank of every node, and the number of ranks. Of equally light ranks, the one with fewer samples is
    taken, then the lower number.
    """
    loads, counts = np.zeros(first[-1]), np.zeros(first[-1], np.int64)
    ranks = np.empty(weights.size, np.int64)
    for item in order:
        best = first[nodes[item]]
        for rank in range(best + 1, first[nodes[item] + 1]):
            if loads[rank] < loads[best] or (loads[rank] == loads[best] and counts[rank] < counts[best]):
                best = rank
        ranks[item] = best
        loads[best] += weights[item]
        counts[best] += 1
    return ranks
