"""Batches placed on the nodes that they send to: the least heaviest rank, against brute force, and room on every node."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.search.node_assignment import assign, assign_senders
from headrace.reorder_service.planning.search.node_permutation import Traffic
from tests.examples import with_examples


@st.composite
def matrices(draw, most_ranks: int = 6):
    """(d, d) whole volumes from batches to ranks, so that sums are exact and ties are ties; some pairs exchange nothing."""
    num_ranks = draw(st.integers(1, most_ranks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    matrix = rng.integers(0, draw(st.sampled_from([2, 30])), (num_ranks, num_ranks)) * (rng.random((num_ranks, num_ranks)) < 0.7)
    return matrix.astype(np.float64)


def sparse(matrix: np.ndarray) -> Traffic:
    sender, receiver = (index.ravel() for index in np.indices(matrix.shape))
    return Traffic.of_samples(sender, receiver, matrix.ravel(), len(matrix))


def sent_from(matrix: np.ndarray, batch: int, node: int, ranks_per_node: int) -> float:
    own = range(node * ranks_per_node, (node + 1) * ranks_per_node)
    return sum(volume for rank, volume in enumerate(matrix[batch].tolist()) if rank not in own)


def heaviest(matrix: np.ndarray, rank_of_batch, ranks_per_node: int) -> float:
    return max(sent_from(matrix, batch, rank // ranks_per_node, ranks_per_node) for batch, rank in enumerate(rank_of_batch))


def least(matrix: np.ndarray, ranks_per_node: int) -> float:
    return min(heaviest(matrix, ranks, ranks_per_node) for ranks in itertools.permutations(range(len(matrix))))


@with_examples(80)
@given(matrices(), st.integers(1, 4))
def test_no_permutation_has_a_lighter_heaviest_rank(matrix: np.ndarray, ranks_per_node: int) -> None:
    found = assign_senders(sparse(matrix), ranks_per_node)
    assert sorted(found.rank_of_batch) == list(range(len(matrix)))
    assert found.heaviest_outgoing == found.lower_bound == heaviest(matrix, found.rank_of_batch, ranks_per_node)
    assert found.heaviest_outgoing == least(matrix, ranks_per_node)
    if found.heaviest_outgoing == heaviest(matrix, range(len(matrix)), ranks_per_node):
        assert found.rank_of_batch.tolist() == list(range(len(matrix))), "nothing moves unless it helps"
    for batch, rank in enumerate(found.rank_of_batch):
        assert rank == batch or rank // ranks_per_node != batch // ranks_per_node, "a batch that keeps its node keeps its rank"


@with_examples(80)
@given(matrices(), st.integers(1, 4), st.integers(0, 60))
def test_a_limit_is_met_exactly_where_some_placement_meets_it(matrix: np.ndarray, ranks_per_node: int, limit: int) -> None:
    num_ranks = len(matrix)
    num_nodes = -(-num_ranks // ranks_per_node)
    whole = matrix.sum(axis=1)
    table = [[(sent_from(matrix, b, j, ranks_per_node), j) for j in range(num_nodes)] for b in range(num_ranks)]
    sent = [sorted(edge for edge in row if edge[0] < volume) for row, volume in zip(table, whole, strict=True)]
    first = np.cumsum([0, *map(len, sent)])
    node = np.array([j for row in sent for _, j in row], dtype=np.int64)
    volume = np.array([left for row in sent for left, _ in row], dtype=np.float64)
    nodes = assign((first, node, volume), whole, np.argsort(-whole, kind="stable"), ranks_per_node, float(limit))
    if least(matrix, ranks_per_node) > limit:
        assert (nodes == -1).all()
        return
    assert all(sent_from(matrix, b, j, ranks_per_node) <= limit for b, j in enumerate(nodes.tolist()))
    ranks_of_node = np.bincount(np.arange(num_ranks) // ranks_per_node)
    assert np.bincount(nodes, minlength=num_nodes).tolist() == ranks_of_node.tolist()


def test_what_each_batch_sends_to_one_node_stays_there() -> None:
    matrix = np.kron(np.eye(4)[[2, 0, 3, 1]], np.ones((2, 2)))  # the batches of node 0 send to node 2 only, and so on
    found = assign_senders(sparse(matrix), 2)
    assert (found.rank_of_batch // 2).tolist() == [2, 2, 0, 0, 3, 3, 1, 1]
    assert found.heaviest_outgoing == 0


def test_a_node_has_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        assign_senders(sparse(np.ones((2, 2))), 0)
