"""Placing balanced batches on nodes by where they send to: an exact bottleneck assignment.

`node_permutation` permutes the receivers of an all-to-all. Here the senders move, and each of them is one batch: what a batch
sends to other nodes depends on nothing but the node that it is on. So the least that the heaviest rank can send is the least
limit under which every batch finds a node from which it sends no more, with room for as many batches as the node has ranks.
A batch whose whole volume is within the limit may be on any node, and only the others need to be matched.

The limit is found by bisection over the volumes that occur, each tried with augmenting paths (Kuhn 1955). Batches are placed
from the heaviest to the lightest, each on the node where it keeps most, which keeps the total volume low as well.
"""

from __future__ import annotations

import numpy as np

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints
from headrace.reorder_service.planning.search.node_permutation import Permutation, Traffic, on_their_nodes

# (first, node, volume): on node[e], batch b sends volume[e] to other nodes, for the edges e = first[b] .. first[b + 1] - 1, which
# are in rising order of volume. On any other node it sends its whole volume.
Choices = tuple[Ints, Ints, Floats]


def assign_senders(traffic: Traffic, ranks_per_node: int) -> Permutation:
    """Find the permutation of the senders after which the heaviest rank sends least to other nodes.

    traffic: `sender` is a batch, which is on the rank of its number before the permutation, and `receiver` a rank that stays. The
    permutation is the identity if none is better. Raises ValueError unless there is at least one rank per node.
    """
    if ranks_per_node < 1:
        raise ValueError(f"a node has at least one rank, got {ranks_per_node}")
    batches = np.arange(traffic.num_ranks)
    before = _heaviest(traffic, batches, ranks_per_node)
    choices, whole = _choices(traffic, ranks_per_node)
    limits = np.unique(np.concatenate([choices[2], whole]))
    order = np.argsort(-whole, kind="stable")
    low, high = 0, int(np.searchsorted(limits, whole.max()))  # with all of their volume, batches may be anywhere
    while low < high:
        middle = (low + high) // 2
        if assign(choices, whole, order, ranks_per_node, limits[middle])[0] >= 0:
            high = middle
        else:
            low = middle + 1
    rank_of_batch = on_their_nodes(assign(choices, whole, order, ranks_per_node, limits[high]), ranks_per_node)
    after = _heaviest(traffic, rank_of_batch, ranks_per_node)
    if after < before:
        return Permutation(rank_of_batch=rank_of_batch, heaviest_outgoing=after, lower_bound=after)
    return Permutation(rank_of_batch=batches, heaviest_outgoing=before, lower_bound=before)


def _choices(traffic: Traffic, ranks_per_node: int) -> tuple[Choices, Floats]:
    """Return from which nodes each batch sends less than its whole volume to others, and the (d,) whole volumes."""
    kept = Traffic.of_samples(traffic.sender, traffic.receiver // ranks_per_node, traffic.volume, traffic.num_ranks)
    whole = np.zeros(traffic.num_ranks)
    np.add.at(whole, kept.sender, kept.volume)
    left = whole[kept.sender] - kept.volume
    order = np.lexsort((kept.receiver, left, kept.sender))
    first = np.concatenate([[0], np.cumsum(np.bincount(kept.sender, minlength=traffic.num_ranks))])
    return (first, kept.receiver[order], left[order]), whole


def _heaviest(traffic: Traffic, rank_of_batch: Ints, ranks_per_node: int) -> float:
    moved = Traffic(
        num_ranks=traffic.num_ranks, sender=rank_of_batch[traffic.sender], receiver=traffic.receiver, volume=traffic.volume
    )
    return float(moved.leaving(np.arange(traffic.num_ranks) // ranks_per_node, ranks_per_node).max())


@kernel
def assign(choices: Choices, whole: Floats, order: Ints, ranks_per_node: int, limit: float) -> Ints:
    """Place every batch on a node from which it sends at most `limit` to others: (d,) nodes, all -1 if that is impossible.

    order: the batches by falling whole volume.
    """
    first, node, volume = choices
    num_ranks = whole.size
    num_nodes = (num_ranks + ranks_per_node - 1) // ranks_per_node
    node_of_batch = np.full(num_ranks, -1, np.int64)
    place_of_batch, batches = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)  # those of node j from place j c on
    taken, tried_for, reached_by = np.zeros(num_nodes, np.int64), np.full(num_nodes, -1), np.empty(num_nodes, np.int64)
    queue = np.empty(num_ranks + 1, np.int64)
    for batch in order:
        if whole[batch] <= limit:
            continue
        queue[0] = batch
        head, tail, free = 0, 1, -1
        while head < tail and free < 0:  # breadth first, over batches that could leave their nodes
            for e in range(first[queue[head]], first[queue[head] + 1]):
                j = node[e]
                if volume[e] > limit:
                    break
                if tried_for[j] == batch:
                    continue
                tried_for[j], reached_by[j] = batch, queue[head]
                start, end = j * ranks_per_node, min((j + 1) * ranks_per_node, num_ranks)
                if taken[j] < end - start:
                    free = j
                    break
                queue[tail : tail + end - start] = batches[start:end]
                tail += end - start
            head += 1
        if free < 0:
            node_of_batch[:] = -1
            return node_of_batch
        place = free * ranks_per_node + taken[free]
        taken[free] += 1
        j = free
        while j >= 0:  # back along the path: every batch takes the place that opened behind it
            moving = reached_by[j]
            former, former_place = node_of_batch[moving], place_of_batch[moving]
            node_of_batch[moving], place_of_batch[moving], batches[place] = j, place, moving
            j, place = former, former_place
    _place_the_rest(choices, order, ranks_per_node, node_of_batch, taken)
    return node_of_batch


@kernel
def _place_the_rest(choices: Choices, order: Ints, ranks_per_node: int, node_of_batch: Ints, taken: Ints) -> None:
    """Place the batches that may be anywhere, in place: each where it keeps most, else on its own node, else where room is."""
    first, node, _ = choices
    num_ranks = node_of_batch.size
    for batch in order:
        if node_of_batch[batch] >= 0:
            continue
        for e in range(first[batch], first[batch + 1] + 1):
            j = node[e] if e < first[batch + 1] else batch // ranks_per_node
            if taken[j] < min(ranks_per_node, num_ranks - j * ranks_per_node):
                node_of_batch[batch] = j
                taken[j] += 1
                break
    j = 0
    for batch in range(num_ranks):
        if node_of_batch[batch] < 0:
            while taken[j] == min(ranks_per_node, num_ranks - j * ranks_per_node):
                j += 1
            node_of_batch[batch] = j
            taken[j] += 1
