"""Balancing near home: every node, and every rank of it, gets its share, and as few samples as possible leave their home node.

OrchMLLM balances a phase first and then permutes whole batches over the nodes (`node_permutation`, `node_assignment`). By then
each batch has its samples from all nodes, so that little can be saved. But which sample goes into which batch is free too. So
here the samples begin on their home nodes, where what becomes of them is needed. A node with more than its share gives samples
away, the largest that it can without falling below its share; those go to nodes with less. Then each node deals its samples to
its ranks by LPT, first those that came from elsewhere, so that every rank has some. What crosses nodes is then by how much the
nodes differed, a few per cent of all, and ranks are about as level as by LPT over all of them, since a node's share is that of
its ranks.

Last, ranks that are still heavier than the rest swap samples with others of their node, and where that is not enough with light
ones wherever these are (`pair_levelling`).
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
_MANY = 32  # samples for each node, or each rank, from which on they are dealt like cards, in a fraction of the time
_TRIES = 4  # nodes that are asked in turn whether they have room for a sample
_SWAPS = 4  # for each rank of a node, at most
_LEAST_GAIN = 1e-12  # less may be a rounding error
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
    if np.count_nonzero(nodes == NOWHERE) >= _MANY * heads.size:
        deal_free(weights, order, heads, level, nodes)
    fill(weights, order, heads, unlimited, _NO_LIMIT, nodes)
    level_pairs(weights, order, heads, level * (1.0 + NODE_LEVEL), unlimited, _NO_LIMIT, nodes)
    came = ((nodes != homes) & (homes != NOWHERE))[order]
    of_nodes = np.bincount(nodes, weights=weights, minlength=heads.size)
    shares = of_nodes / np.diff(first) if weights.size >= _MANY * num_ranks else np.zeros(heads.size)
    ranks = deal_within(weights, np.concatenate([order[came], order[~came]]), nodes, first, shares)
    least = max(share, float(weights.max(initial=0.0)))
    level_within(weights, order, first, least * (1.0 + NODE_LEVEL), ranks)
    goal = least * (1.0 + RANK_LEVEL)
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
def deal_free(weights: Floats, order: Ints, heads: Floats, level: float, nodes: Ints) -> None:
    """Deal the samples that are NOWHERE to the nodes in turn, as long as these do not grow heavier than `level`: changes `nodes`.

    Samples that some nodes in a row have no room for stay NOWHERE. Arguments as for `give_away`.
    """
    loads = heads.copy()
    for item in range(nodes.size):
        if nodes[item] != NOWHERE:
            loads[nodes[item]] += weights[item]
    node = heads.size - 1
    for item in order:
        if nodes[item] != NOWHERE:
            continue
        for _ in range(_TRIES):
            node = node + 1 if node + 1 < heads.size else 0
            if loads[node] + weights[item] <= level:
                nodes[item] = node
                loads[node] += weights[item]
                break


@kernel
def deal_within(weights: Floats, order: Ints, nodes: Ints, first: Ints, shares: Floats) -> Ints:
    """Deal the samples of every node to its ranks, in the given order: (n,) rank of each.

    They go to the ranks in turn, as long as the one whose turn it is does not get more than its share, and then each to the
    lightest; of equally light ranks, to the one with fewer samples, then to the lower number. first: (N + 1,) first rank of every
    node, and the number of ranks. shares: (N,) of a rank of each node.
    """
    loads, counts = np.zeros(first[-1]), np.zeros(first[-1], np.int64)
    ranks, turns = np.empty(weights.size, np.int64), first[:-1].copy()
    for item in order:
        node, weight = nodes[item], weights[item]
        best = turns[node]
        turns[node] = best + 1 if best + 1 < first[node + 1] else first[node]
        if loads[best] + weight > shares[node]:
            best = first[node]
            for rank in range(best + 1, first[node + 1]):
                if loads[rank] < loads[best] or (loads[rank] == loads[best] and counts[rank] < counts[best]):
                    best = rank
        ranks[item] = best
        loads[best] += weight
        counts[best] += 1
    return ranks


@kernel
def level_within(weights: Floats, order: Ints, first: Ints, goal: float, ranks: Ints) -> None:
    """Level the ranks of every node by swaps of two samples: changes `ranks` (n,), the rank of each sample, in place.

    The heaviest rank of a node swaps one of its samples for a smaller one of the lightest, so that both come as close as they
    can, until it is no heavier than `goal`. No rank gets heavier than the heaviest was. order: (n,) samples by falling weight.
    first: as for `deal_within`.
    """
    starts, loads = np.zeros(first[-1] + 1, np.int64), np.zeros(first[-1])
    for item in range(ranks.size):
        starts[ranks[item] + 1] += 1
        loads[ranks[item]] += weights[item]
    if loads.max() <= goal:
        return
    starts = np.cumsum(starts)
    held, free = np.empty(ranks.size, np.int64), starts.copy()  # the samples of one rank after the other, by falling weight
    for item in order:
        held[free[ranks[item]]] = item
        free[ranks[item]] += 1
    for node in range(first.size - 1):
        for _ in range(_SWAPS * (first[node + 1] - first[node])):
            heavy = light = first[node]
            for rank in range(first[node] + 1, first[node + 1]):
                heavy = rank if loads[rank] > loads[heavy] else heavy
                light = rank if loads[rank] < loads[light] else light
            if loads[heavy] <= goal:
                break
            of_heavy, of_light = held[starts[heavy] : starts[heavy + 1]], held[starts[light] : starts[light + 1]]
            moved = _swap(weights, of_heavy, of_light, loads[heavy] - loads[light])
            if moved == 0.0:
                break
            loads[heavy] -= moved
            loads[light] += moved
    for rank in range(first[-1]):
        for place in range(starts[rank], starts[rank + 1]):
            ranks[held[place]] = rank


@kernel
def _swap(weights: Floats, of_heavy: Ints, of_light: Ints, gap: float) -> float:
    """Swap two samples so that the loads of two ranks, `gap` apart, come as close as they can. Return what moves, or 0.

    of_heavy, of_light: samples of the two ranks by falling weight, which they remain.
    """
    least, out, back, q = gap * (1.0 - _LEAST_GAIN), -1, -1, 0
    for p in range(of_heavy.size):
        while q < of_light.size and 2.0 * (weights[of_heavy[p]] - weights[of_light[q]]) < gap:
            q += 1
        for partner in (q - 1, q):  # with the one too little moves, and with the other too much
            if 0 <= partner < of_light.size:
                left = abs(gap - 2.0 * (weights[of_heavy[p]] - weights[of_light[partner]]))
                if left < least:
                    least, out, back = left, p, partner
    if out < 0:
        return 0.0
    larger, smaller = of_heavy[out], of_light[back]
    while out + 1 < of_heavy.size and weights[of_heavy[out + 1]] > weights[smaller]:
        of_heavy[out] = of_heavy[out + 1]
        out += 1
    of_heavy[out] = smaller
    while back > 0 and weights[of_light[back - 1]] < weights[larger]:
        of_light[back] = of_light[back - 1]
        back -= 1
    of_light[back] = larger
    return float(weights[larger] - weights[smaller])
