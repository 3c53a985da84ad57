"""Node-wise rearrangement (OrchMLLM, section 5.2.2): choose which rank takes which of the balanced batches.

Ranks of one node exchange data much faster than ranks of different nodes. Balanced batches may be permuted over the ranks
at will; the permutation sought minimises the largest volume that any one rank sends to other nodes. Permuted here are the batches
that ranks receive; for those that they send, see `node_assignment`. Only the node of a batch
matters. With d ranks and c ranks per node, node j has the ranks j c .. j c + c - 1 (the last node has fewer if c does not
divide d).

`solve` is the paper's integer program (Alg. 3), for some dozens of ranks. `permute_heuristically` is for thousands of ranks:

1. Draw: repeatedly, the rank that sends most to other nodes draws for its node the batch to which it sends most, among
   those that no node has yet, as long as there is room.
2. Swap: repeatedly, the node of the rank that sends most swaps one of its batches for one from another node, so that no rank
   of the two nodes then sends as much. This ends when no swap helps.
3. Kick: a random swap for that rank, followed by step 2; both are undone if the heaviest rank then sends more.

`node_bound` bounds how far from the best a permutation of thousands of ranks can be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.jit import kernel
from headrace.reorder_service.planning.batch import Floats, Ints

# (first, rank or batch, volume): the edges of i are first[i] .. first[i + 1] - 1, ordered by their other ends.
Edges = tuple[Ints, Ints, Floats]

# State of the search: (d,) node of every batch; (d,) batches by node, those of node j from place j c on; (d,) volume that every
# rank sends to other nodes; (d,) scratch.
State = tuple[Ints, Ints, Floats, Floats]

LEAST_GAIN = 1e-9  # share of the heaviest volume by which a swap must lower it; less may be rounding
RANDOM_MODULUS, RANDOM_FACTOR = 2**31 - 1, 48271  # MINSTD (Park and Miller, 1993): fits into int64, state never 0
NUM_KICKS = 400  # more did not get nearer to the optimum on 16 to 64 ranks; they take 20 ms on 2,560


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """An all-to-all of d ranks as m sparse triples, one per pair that exchanges data, ordered by sender and then receiver."""

    num_ranks: int
    sender: Ints
    """(m,) rank that sends."""
    receiver: Ints
    """(m,) rank that receives, or equally the balanced batch that does: before a permutation, batch b is on rank b."""
    volume: Floats
    """(m,) amount of data sent, in any unit."""

    @classmethod
    def of_samples(cls, sender: Ints, receiver: Ints, volume: Floats, num_ranks: int) -> Traffic:
        """Build the traffic in which sample i moves `volume[i]` from rank `sender[i]` to rank `receiver[i]`; all are (n,)."""
        some = volume > 0
        pairs, pair_of_sample = np.unique((sender * num_ranks + receiver)[some], return_inverse=True)
        total = np.zeros(pairs.size)
        np.add.at(total, pair_of_sample, volume[some])
        return cls(num_ranks=num_ranks, sender=pairs // num_ranks, receiver=pairs % num_ranks, volume=total)

    def leaving(self, node_of_batch: Ints, ranks_per_node: int) -> Floats:
        """Return the (d,) volume that each rank sends to other nodes if batch b is on node `node_of_batch[b]`."""
        leaves = self.sender // ranks_per_node != node_of_batch[self.receiver]
        volume = np.zeros(self.num_ranks)
        np.add.at(volume, self.sender[leaves], self.volume[leaves])
        return volume


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Permutation:
    """A permutation of the d balanced batches over the ranks."""

    rank_of_batch: Ints
    """(d,) rank that takes each batch; a batch that stays on its node stays on its rank."""
    heaviest_outgoing: float
    """Largest volume that any one rank sends to other nodes."""
    lower_bound: float = 0.0
    """Bound below which no permutation can bring `heaviest_outgoing`, as proved by `solve`; 0 if not known."""


def permute_heuristically(traffic: Traffic, ranks_per_node: int, seed: int = 0, num_kicks: int = NUM_KICKS) -> Permutation:
    """Find a good permutation for any number of ranks by a heuristic (see the module docstring); never worse than the identity.

    The same seed gives the same permutation. Raises ValueError unless there is at least one rank per node.
    """
    node_of_rank = _node_of_rank(traffic, ranks_per_node)
    outgoing = (_starts(traffic.sender, traffic.num_ranks), traffic.receiver, traffic.volume)
    first_of_receiver = _starts(traffic.receiver, traffic.num_ranks)
    by_receiver = counting_order(traffic.receiver, first_of_receiver)
    incoming = (first_of_receiver, traffic.sender[by_receiver], traffic.volume[by_receiver])
    drawn = draw(outgoing, incoming, ranks_per_node)
    start = min(node_of_rank, drawn, key=lambda nodes: float(traffic.leaving(nodes, ranks_per_node).max()))
    nodes = swap(outgoing, incoming, start, ranks_per_node, num_kicks, seed % (RANDOM_MODULUS - 1) + 1)
    return _permutation(traffic, nodes, ranks_per_node)


def solve(traffic: Traffic, ranks_per_node: int, time_limit_s: float) -> Permutation:
    """Find the best permutation with the HiGHS solver, or the best one it knows when the time is up.

    x[b, j] says that batch b is on node j: d d / c binary variables. Every batch is on one node, node j has as many batches
    as ranks, and what rank i sends to batches that are not on its node is at most t, which is minimised. What is found in
    limited time depends on the machine, so plans do not use this function.

    Raises ValueError unless there is at least one rank per node, and TimeoutError if no permutation was found in time.
    """
    node_of_rank = _node_of_rank(traffic, ranks_per_node)
    num_ranks, capacity = traffic.num_ranks, np.bincount(node_of_rank)
    variables = np.arange(num_ranks * capacity.size).reshape(num_ranks, capacity.size)
    batch, node = (index.ravel() for index in np.indices(variables.shape))
    choices = (np.concatenate([batch, num_ranks + node]), np.tile(variables.ravel(), 2))
    totals = np.concatenate([np.ones(num_ranks), capacity])
    kept = variables[traffic.receiver, node_of_rank[traffic.sender]]
    x, bound = _minimise_heaviest(traffic.sender, kept, traffic.volume, choices, totals, totals, time_limit_s)
    if x is None:
        raise TimeoutError(f"no permutation of {num_ranks} ranks in {time_limit_s} s")
    best = _permutation(traffic, x.reshape(variables.shape).argmax(axis=1), ranks_per_node)
    return Permutation(
        rank_of_batch=best.rank_of_batch, heaviest_outgoing=best.heaviest_outgoing, lower_bound=min(bound, best.heaviest_outgoing)
    )


def node_bound(traffic: Traffic, ranks_per_node: int, node: int, time_limit_s: float) -> float:
    """Return a lower bound of `Permutation.heaviest_outgoing`: what one node could reach if it had first choice of all batches.

    It comes from an integer program of the few hundred batches to which the node's ranks send. For the node of the heaviest
    rank of a good permutation, the bound is often that rank's volume, which proves the permutation optimal.
    """
    of_node = traffic.sender // ranks_per_node == node
    if not of_node.any():
        return 0.0
    batches, variable = np.unique(traffic.receiver[of_node], return_inverse=True)
    choices = (np.zeros(batches.size, np.int64), np.arange(batches.size))
    places = np.array([np.count_nonzero(_node_of_rank(traffic, ranks_per_node) == node)])
    rank = traffic.sender[of_node] - node * ranks_per_node
    volume = traffic.volume[of_node]
    _, bound = _minimise_heaviest(rank, variable, volume, choices, np.zeros(1), places, time_limit_s)
    return bound


def _minimise_heaviest(
    rank: Ints,
    variable: Ints,
    volume: Floats,
    choices: tuple[Ints, Ints],
    least: NDArray[np.generic],
    most: NDArray[np.generic],
    time_limit_s: float,
) -> tuple[Floats | None, float]:
    """Minimise what the heaviest rank sends, where rank[e] sends volume[e] to other nodes unless the binary variable[e] is 1.

    choices: (sum, variable) pairs; the variables of sum s add up to least[s] .. most[s]. Returns the variables, None if none
    were found in time, and a proved lower bound.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # not at the top, so that planning need not load scipy
    from scipy.sparse import csr_array

    total = np.bincount(rank, weights=volume)
    scale = max(float(total.max(initial=0.0)), np.finfo(np.float64).tiny)  # the solver's tolerances are absolute
    num_variables = int(choices[1].max()) + 1
    ranks = np.arange(total.size)
    edges = (np.concatenate([rank, ranks]), np.concatenate([variable, np.full(total.size, num_variables)]))
    kept = csr_array((np.concatenate([volume / scale, np.ones(total.size)]), edges), shape=(total.size, num_variables + 1))
    counted = csr_array((np.ones(choices[0].size), choices), shape=(least.size, num_variables + 1))
    result = milp(
        c=np.append(np.zeros(num_variables), 1.0),
        constraints=[LinearConstraint(kept, total / scale, np.inf), LinearConstraint(counted, least, most)],
        integrality=np.append(np.ones(num_variables), 0),
        bounds=Bounds(0, np.append(np.ones(num_variables), np.inf)),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    return None if result.x is None else result.x[:-1], max(0.0, (result.mip_dual_bound or 0.0) * scale)


def _node_of_rank(traffic: Traffic, ranks_per_node: int) -> Ints:
    if ranks_per_node < 1:
        raise ValueError(f"a node has at least one rank, got {ranks_per_node}")
    return np.arange(traffic.num_ranks) // ranks_per_node


def on_their_nodes(node_of_batch: Ints, ranks_per_node: int) -> Ints:
    """Return the (d,) rank of each batch from its node: its own rank if it stays on its node, else one whose batch leaves."""
    rank_of_batch = np.arange(node_of_batch.size)
    moving = np.flatnonzero(node_of_batch != rank_of_batch // ranks_per_node)
    rank_of_batch[moving[np.argsort(node_of_batch[moving], kind="stable")]] = moving
    return rank_of_batch


def _permutation(traffic: Traffic, node_of_batch: Ints, ranks_per_node: int) -> Permutation:
    return Permutation(
        rank_of_batch=on_their_nodes(node_of_batch, ranks_per_node),
        heaviest_outgoing=float(traffic.leaving(node_of_batch, ranks_per_node).max()),
    )


def _starts(values: Ints, count: int) -> Ints:
    """Return (count + 1,) where the run of each number 0 .. count - 1 starts in the sorted values, and where the last ends."""
    return np.concatenate([[0], np.cumsum(np.bincount(values, minlength=count))])


@kernel
def counting_order(values: Ints, first: Ints) -> Ints:
    """Sort (m,) values stably by counting, and return the (m,) positions in rising order; first: `_starts` of the values."""
    free = first.copy()
    order = np.empty(values.size, np.int64)
    for i in range(values.size):
        order[free[values[i]]] = i
        free[values[i]] += 1
    return order


@kernel
def draw(outgoing: Edges, incoming: Edges, ranks_per_node: int) -> Ints:
    """Draw the batches for the nodes greedily (step 1 of the module docstring): (d,) node of every batch."""
    first_sent, receiver, sent = outgoing
    first_got, sender, got = incoming
    num_ranks = first_sent.size - 1
    num_nodes = (num_ranks + ranks_per_node - 1) // ranks_per_node
    room = np.full(num_nodes, ranks_per_node)
    room[-1] = num_ranks - (num_nodes - 1) * ranks_per_node
    outside = np.zeros(num_ranks)
    heaviest = np.zeros(num_nodes)  # maximum of `outside` by node, so that a turn looks at the nodes and at the ranks of only one
    for rank in range(num_ranks):
        for e in range(first_sent[rank], first_sent[rank + 1]):
            outside[rank] += sent[e]
        heaviest[rank // ranks_per_node] = max(heaviest[rank // ranks_per_node], outside[rank])
    node_of_batch = np.full(num_ranks, -1, np.int64)
    for _ in range(2 * num_ranks):  # every turn places a batch or retires a rank
        node = int(np.argmax(heaviest))
        ranks = outside[node * ranks_per_node : (node + 1) * ranks_per_node]
        rank = node * ranks_per_node + int(np.argmax(ranks))
        best = -1
        if room[node] > 0:
            for e in range(first_sent[rank], first_sent[rank + 1]):
                if node_of_batch[receiver[e]] < 0 and (best < 0 or sent[e] > sent[best]):
                    best = e
        if best < 0:
            outside[rank] = -np.inf
        else:
            batch = receiver[best]
            node_of_batch[batch] = node
            room[node] -= 1
            for e in range(first_got[batch], first_got[batch + 1]):
                if sender[e] // ranks_per_node == node:
                    outside[sender[e]] -= got[e]
        heaviest[node] = ranks.max()
    node = 0
    for batch in range(num_ranks):
        if node_of_batch[batch] < 0:
            while room[node] == 0:
                node += 1
            node_of_batch[batch] = node
            room[node] -= 1
    return node_of_batch


@kernel
def swap(outgoing: Edges, incoming: Edges, start: Ints, ranks_per_node: int, num_kicks: int, seed: int) -> Ints:
    """Improve the nodes `start` by swaps and kicks (steps 2 and 3 of the module docstring): (d,) node of every batch."""
    first_sent, receiver, sent = outgoing
    num_ranks = first_sent.size - 1
    node_of_batch = start.copy()
    batches = np.argsort(start, kind="mergesort")
    outside = np.zeros(num_ranks)
    for rank in range(num_ranks):
        for e in range(first_sent[rank], first_sent[rank + 1]):
            if node_of_batch[receiver[e]] != rank // ranks_per_node:
                outside[rank] += sent[e]
    state = (node_of_batch, batches, outside, np.zeros(num_ranks))
    _descend(outgoing, incoming, state, ranks_per_node)
    random = seed
    for _ in range(num_kicks):
        random = random * RANDOM_FACTOR % RANDOM_MODULUS
        node_of_batch, batches, outside, change = state
        rank = int(np.argmax(outside))
        node = rank // ranks_per_node
        first, count = first_sent[rank], first_sent[rank + 1] - first_sent[rank]
        if count == 0:
            break
        batch_in = receiver[first + random % count]
        if node_of_batch[batch_in] == node:
            continue
        num_places = min(ranks_per_node, num_ranks - node * ranks_per_node)
        place = node * ranks_per_node + random // count % num_places
        kicked = (node_of_batch.copy(), batches.copy(), outside.copy(), change)
        _apply(incoming, batch_in, place, kicked, ranks_per_node)
        _descend(outgoing, incoming, kicked, ranks_per_node)
        if kicked[2].max() <= outside.max():
            state = kicked
    return state[0]


@kernel
def _descend(outgoing: Edges, incoming: Edges, state: State, ranks_per_node: int) -> None:
    """Swap batches between nodes, in place, until no swap helps the rank that sends most.

    Of all swaps that help, the one is made after which the heaviest rank of the two nodes sends least; of equal ones, the first.
    """
    first_sent, receiver, sent = outgoing
    node_of_batch, batches, outside, change = state
    num_ranks = outside.size
    for _ in range(100 * num_ranks):
        rank = int(np.argmax(outside))
        node = rank // ranks_per_node
        best, best_in, best_place = outside[rank] * (1.0 - LEAST_GAIN), -1, -1
        for e in range(first_sent[rank], first_sent[rank + 1]):
            batch_in = receiver[e]
            other = node_of_batch[batch_in]
            if other == node or outside[rank] - sent[e] >= best:
                continue
            for place in range(node * ranks_per_node, min((node + 1) * ranks_per_node, num_ranks)):
                _exchange(incoming, batch_in, batches[place], node, other, ranks_per_node, change)
                heaviest = max(
                    _heaviest_after(outside, change, node, ranks_per_node),
                    _heaviest_after(outside, change, other, ranks_per_node),
                )
                if heaviest < best:
                    best, best_in, best_place = heaviest, batch_in, place
        if best_in < 0:
            break
        _apply(incoming, best_in, best_place, state, ranks_per_node)


@kernel
def _apply(incoming: Edges, batch_in: int, place: int, state: State, ranks_per_node: int) -> None:
    """Swap batch_in with the batch at `place` of the state's batches, and update the state in place."""
    node_of_batch, batches, outside, change = state
    batch_out = batches[place]
    node, other = node_of_batch[batch_out], node_of_batch[batch_in]
    _exchange(incoming, batch_in, batch_out, node, other, ranks_per_node, change)
    for touched in (node, other):
        for rank in range(touched * ranks_per_node, min((touched + 1) * ranks_per_node, outside.size)):
            outside[rank] += change[rank]
    node_of_batch[batch_in], node_of_batch[batch_out] = node, other
    from_place = other * ranks_per_node
    while batches[from_place] != batch_in:
        from_place += 1
    batches[place], batches[from_place] = batch_in, batch_out


@kernel
def _exchange(incoming: Edges, batch_in: int, batch_out: int, node: int, other: int, ranks_per_node: int, change: Floats) -> None:
    """Compute how much more each rank of two nodes sends to other nodes after an exchange, into `change`.

    The exchange moves batch_in from `other` to `node`, and batch_out the opposite way.
    """
    first_got, sender, got = incoming
    for touched in (node, other):
        first, end = touched * ranks_per_node, min((touched + 1) * ranks_per_node, change.size)
        for rank in range(first, end):
            change[rank] = 0.0
        for batch in (batch_in, batch_out):
            sign = -1.0 if (batch == batch_in) == (touched == node) else 1.0
            e = first_got[batch] + np.searchsorted(sender[first_got[batch] : first_got[batch + 1]], first)
            while e < first_got[batch + 1] and sender[e] < end:
                change[sender[e]] += sign * got[e]
                e += 1


@kernel
def _heaviest_after(outside: Floats, change: Floats, node: int, ranks_per_node: int) -> float:
    heaviest = 0.0
    for rank in range(node * ranks_per_node, min((node + 1) * ranks_per_node, outside.size)):
        heaviest = max(heaviest, outside[rank] + change[rank])
    return heaviest
