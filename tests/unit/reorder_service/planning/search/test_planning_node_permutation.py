"""Node-wise rearrangement: sparse traffic, the solver against brute force, the heuristic against its twin and the solver."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.search.node_permutation import (
    LEAST_GAIN,
    Traffic,
    counting_order,
    draw,
    node_bound,
    permute_heuristically,
    solve,
    swap,
)
from headrace.reorder_service.planning.search.number_partition import descending, lpt
from tests.examples import with_examples


def dense(traffic: Traffic) -> np.ndarray:
    matrix = np.zeros((traffic.num_ranks, traffic.num_ranks))
    for sender, receiver, volume in zip(traffic.sender, traffic.receiver, traffic.volume, strict=True):
        assert matrix[sender, receiver] == 0, "no pair twice"
        matrix[sender, receiver] = volume
    return matrix


def heaviest(matrix: np.ndarray, rank_of_batch, ranks_per_node: int) -> float:
    """The objective of section 5.2.2, word for word."""
    num_ranks = len(matrix)
    return max(
        sum(
            matrix[i, batch]
            for batch in range(num_ranks)
            if rank_of_batch[batch] not in range(i // ranks_per_node * ranks_per_node, (i // ranks_per_node + 1) * ranks_per_node)
        )
        for i in range(num_ranks)
    )


def sparse(matrix: np.ndarray) -> Traffic:
    sender, receiver = (index.ravel() for index in np.indices(matrix.shape))
    some = matrix.ravel() > 0
    return Traffic.of_samples(sender[some], receiver[some], matrix.ravel()[some], len(matrix))


def balanced(num_ranks: int, samples_per_rank: int, seed: int) -> Traffic:
    """Samples of lognormal length, sampled round and round and balanced by LPT."""
    length = np.random.default_rng(seed).lognormal(0, 1, num_ranks * samples_per_rank)
    return Traffic.of_samples(np.arange(length.size) % num_ranks, lpt(length, descending(length), num_ranks), length, num_ranks)


@st.composite
def matrices(draw, most_ranks: int = 9):
    """Whole volumes, so that sums are exact and ties are ties; some pairs exchange nothing."""
    num_ranks = draw(st.integers(1, most_ranks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    matrix = rng.integers(0, draw(st.sampled_from([2, 30])), (num_ranks, num_ranks)) * (rng.random((num_ranks, num_ranks)) < 0.7)
    return matrix.astype(np.float64)


@with_examples(60)
@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 2**32))
def test_traffic_adds_up_the_samples_of_a_pair(num_ranks: int, num_samples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sender, receiver = rng.integers(0, num_ranks, (2, num_samples))
    volume = rng.integers(1, 9, num_samples).astype(np.float64)
    expected = np.zeros((num_ranks, num_ranks))
    np.add.at(expected, (sender, receiver), volume)
    traffic = Traffic.of_samples(sender, receiver, volume, num_ranks)
    assert (dense(traffic) == expected).all()
    assert list(zip(traffic.sender, traffic.receiver, strict=True)) == sorted(
        set(zip(sender.tolist(), receiver.tolist(), strict=True))
    )


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(6, 2), (6, 3), (5, 2), (7, 3), (4, 4), (4, 1), (1, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_the_solver_finds_what_brute_force_finds(num_ranks: int, ranks_per_node: int, seed: int) -> None:
    matrix = np.random.default_rng(seed).lognormal(0, 1, (num_ranks, num_ranks))
    best = min(heaviest(matrix, permutation, ranks_per_node) for permutation in itertools.permutations(range(num_ranks)))
    found = solve(sparse(matrix), ranks_per_node, 20.0)
    assert found.heaviest_outgoing == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert found.lower_bound == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert found.lower_bound <= found.heaviest_outgoing


def test_the_solver_says_that_time_is_up() -> None:
    with pytest.raises(TimeoutError, match=r"no permutation of 40 ranks in 0\.0 s"):
        solve(balanced(40, 10, 0), 8, 0.0)


@pytest.mark.parametrize("find", [lambda traffic, c: solve(traffic, c, 5.0), permute_heuristically])
@with_examples(25)
@given(matrix=matrices(), ranks_per_node=st.integers(1, 4))
def test_both_give_a_permutation_that_is_as_good_as_they_say(find, matrix: np.ndarray, ranks_per_node: int) -> None:
    found = find(sparse(matrix), ranks_per_node)
    assert sorted(found.rank_of_batch) == list(range(len(matrix)))
    assert (
        found.heaviest_outgoing
        == heaviest(matrix, found.rank_of_batch, ranks_per_node)
        <= heaviest(matrix, range(len(matrix)), ranks_per_node)
    )
    for batch, rank in enumerate(found.rank_of_batch):
        assert rank == batch or rank // ranks_per_node != batch // ranks_per_node, "a batch that keeps its node keeps its rank"


@pytest.mark.parametrize("find", [lambda traffic, c: solve(traffic, c, 5.0), permute_heuristically])
def test_a_node_has_at_least_one_rank(find) -> None:
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        find(sparse(np.ones((2, 2))), 0)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(8, 4), (16, 4), (16, 8), (24, 8)])
@pytest.mark.parametrize("samples_per_rank", [4, 12])
def test_the_heuristic_is_within_ten_percent_of_the_solver(num_ranks: int, ranks_per_node: int, samples_per_rank: int) -> None:
    gaps = []
    for seed in range(3):
        traffic = balanced(num_ranks, samples_per_rank, seed)
        best = solve(traffic, ranks_per_node, 20.0).heaviest_outgoing
        gaps.append(permute_heuristically(traffic, ranks_per_node).heaviest_outgoing / best - 1)
    assert min(gaps) >= -1e-6
    assert max(gaps) <= 0.1
    assert np.mean(gaps) <= 0.03


def test_on_hundreds_of_ranks_the_bound_of_the_heaviest_node_proves_it_near_the_best() -> None:
    traffic = balanced(640, 20, 0)
    found = permute_heuristically(traffic, 8)
    volume = traffic.leaving(found.rank_of_batch // 8, 8)
    bound = node_bound(traffic, 8, int(volume.argmax()) // 8, 20.0)
    assert found.heaviest_outgoing == volume.max()
    assert bound <= found.heaviest_outgoing * (1 + 1e-6)
    assert found.heaviest_outgoing <= 1.02 * bound
    assert found.heaviest_outgoing < 0.8 * traffic.leaving(np.arange(640) // 8, 8).max()


@pytest.mark.parametrize("seed", range(4))
def test_no_permutation_beats_the_bound_of_any_node(seed: int) -> None:
    matrix = np.random.default_rng(seed).lognormal(0, 1, (5, 5))
    matrix[4] = 0
    best = min(heaviest(matrix, permutation, 2) for permutation in itertools.permutations(range(5)))
    bounds = [node_bound(sparse(matrix), 2, node, 5.0) for node in range(3)]
    assert max(bounds) <= best * (1 + 1e-6)
    assert bounds[2] == 0
    assert min(bounds[:2]) > 0


@with_examples(60)
@given(st.lists(st.integers(0, 5), max_size=30))
def test_counting_equals_a_stable_sort(values: list[int]) -> None:
    first = np.array([sum(value < i for value in values) for i in range(7)])
    expected = sorted(range(len(values)), key=lambda i: values[i])
    assert counting_order(np.array(values, dtype=np.int64), first).tolist() == expected


def edges(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of a matrix as `Edges`."""
    sent = [np.flatnonzero(row) for row in matrix]
    first = np.cumsum([0, *map(len, sent)])
    return first, np.concatenate(sent), np.concatenate([row[at] for row, at in zip(matrix, sent, strict=True)])


def slow_draw(matrix: np.ndarray, ranks_per_node: int) -> list[int]:
    num_ranks = len(matrix)
    node = [rank // ranks_per_node for rank in range(num_ranks)]
    chosen: dict[int, int] = {}
    drawing = set(range(num_ranks))
    while drawing:

        def outside(rank: int) -> float:
            return sum(matrix[rank, batch] for batch in range(num_ranks) if chosen.get(batch) != node[rank])

        rank = max(drawing, key=lambda rank: (outside(rank), -rank))
        free = [batch for batch in range(num_ranks) if batch not in chosen and matrix[rank, batch] > 0]
        if not free or list(chosen.values()).count(node[rank]) == node.count(node[rank]):
            drawing.remove(rank)
        else:
            chosen[max(free, key=lambda batch: (matrix[rank, batch], -batch))] = node[rank]
    places = sorted(set(range(num_ranks)) - chosen.keys())
    left = [n for n in sorted(set(node)) for _ in range(node.count(n) - list(chosen.values()).count(n))]
    return [(chosen | dict(zip(places, left, strict=True)))[batch] for batch in range(num_ranks)]


class SlowSwaps:
    """Every swap tried on the whole matrix."""

    def __init__(self, matrix: np.ndarray, start: list[int], ranks_per_node: int) -> None:
        self.matrix, self.node = matrix, [rank // ranks_per_node for rank in range(len(matrix))]
        self.order = sorted(range(len(matrix)), key=lambda batch: start[batch])  # order[p] is the batch at place p

    def outside(self, order: list[int]) -> list[float]:
        on_node = {batch: self.node[place] for place, batch in enumerate(order)}
        return [
            sum(volume for batch, volume in enumerate(row) if on_node[batch] != node)
            for row, node in zip(self.matrix.tolist(), self.node, strict=True)
        ]

    def swapped(self, batch: int, place: int) -> list[int]:
        order = list(self.order)
        order[order.index(batch)], order[place] = order[place], batch
        return order

    def descend(self) -> None:
        while True:
            outside = self.outside(self.order)
            rank = outside.index(max(outside))
            tries = []
            for batch in np.flatnonzero(self.matrix[rank]).tolist():
                other = self.node[self.order.index(batch)]
                if other != self.node[rank]:
                    for place in (place for place, node in enumerate(self.node) if node == self.node[rank]):
                        order = self.swapped(batch, place)
                        of_both = [
                            sent
                            for sent, node in zip(self.outside(order), self.node, strict=True)
                            if node in (other, self.node[rank])
                        ]
                        tries.append((max(of_both), len(tries), order))
            if not tries or min(tries)[0] >= max(outside) * (1 - LEAST_GAIN):
                return
            self.order = min(tries)[2]

    def kick(self, random: int) -> None:
        outside = self.outside(self.order)
        rank = outside.index(max(outside))
        sent = np.flatnonzero(self.matrix[rank]).tolist()
        if not sent:
            return
        places = [place for place, node in enumerate(self.node) if node == self.node[rank]]
        batch, place = sent[random % len(sent)], places[random // len(sent) % len(places)]
        if self.node[self.order.index(batch)] != self.node[rank]:
            before = self.order
            self.order = self.swapped(batch, place)
            self.descend()
            if max(self.outside(self.order)) > max(outside):
                self.order = before


@with_examples(80)
@given(matrices(), st.integers(1, 4))
def test_drawing_equals_its_twin(matrix: np.ndarray, ranks_per_node: int) -> None:
    assert draw(edges(matrix), edges(matrix.T.copy()), ranks_per_node).tolist() == slow_draw(matrix, ranks_per_node)


@with_examples(60)
@given(matrices(), st.integers(1, 4), st.integers(1, 2**31 - 2))
def test_swapping_equals_its_twin(matrix: np.ndarray, ranks_per_node: int, seed: int) -> None:
    start = slow_draw(matrix, ranks_per_node)
    slow = SlowSwaps(matrix, start, ranks_per_node)
    slow.descend()
    random = seed
    for _ in range(12):
        random = random * 48271 % (2**31 - 1)
        slow.kick(random)
    nodes = swap(edges(matrix), edges(matrix.T.copy()), np.array(start), ranks_per_node, 12, seed)
    assert nodes.tolist() == [slow.node[slow.order.index(batch)] for batch in range(len(matrix))]


def test_the_seed_decides_alone() -> None:
    traffic = balanced(16, 12, 3)
    for seed in (0, 1, 2**80):
        first, again = permute_heuristically(traffic, 8, seed), permute_heuristically(traffic, 8, seed)
        assert first.rank_of_batch.tolist() == again.rank_of_batch.tolist()
