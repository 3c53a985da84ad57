"""Vector balancing: the greedy start and the local search against slow twins, and what they are for."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.search.balance import balance_units, exchange, fill
from headrace.reorder_service.planning.seeding import xorshift_state
from tests.examples import with_examples


def loads_of(costs: np.ndarray, slots: np.ndarray, num_slots: int) -> np.ndarray:
    """(num_slots, U)"""
    return np.stack([np.bincount(slots, weights=row, minlength=num_slots) for row in costs], axis=1)


def objective(weights: np.ndarray, slots: np.ndarray, targets: np.ndarray, num_replicas: int) -> float:
    """What the module's docstring says, written down once more."""
    count = targets.size
    loads = loads_of(weights.T, slots, num_replicas * count).reshape(num_replicas, count, -1)
    of_microbatches = (targets[:, None] * (loads / targets[:, None]) ** 4).sum()
    return float(of_microbatches + 4 * count * ((loads.sum(axis=1) / count) ** 4).sum())


@st.composite
def problems(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, units = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    weights = np.where(rng.random((n, units)) < 0.2, 0.0, rng.lognormal(0, 1, (n, units)))
    replicas, count = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    targets = rng.uniform(0.2, 2.0, count) if draw(st.booleans()) else np.ones(count)
    return weights, replicas, targets


@with_examples(60)
@given(problem=problems())
def test_fill_puts_each_sample_where_its_heaviest_unit_is_least(problem) -> None:
    weights, replicas, targets = problem
    count = targets.size
    order = np.argsort(-weights.max(axis=1), kind="stable")
    replica = np.arange(len(weights)) % replicas
    slots = fill(weights, order, replica, targets, replicas)

    loads, samples = np.zeros((replicas * count, weights.shape[1])), np.zeros(replicas * count, int)
    for i in order:
        mine = range(replica[i] * count, (replica[i] + 1) * count)
        best = min(mine, key=lambda slot: (((loads[slot] + weights[i]) / targets[slot % count]).max(), samples[slot], slot))
        assert slots[i] == best
        loads[best] += weights[i]
        samples[best] += 1


@with_examples(60)
@given(problem=problems(), seed=st.integers(0, 2**40))
def test_the_search_empties_no_replica_and_ends_alike_for_the_same_seed(problem, seed: int) -> None:
    weights, replicas, targets = problem
    start = np.arange(len(weights)) % (replicas * targets.size)
    slots = start.copy()
    exchange(weights, slots, targets, replicas, 2000, xorshift_state(seed))
    assert set(start // targets.size) <= set(slots // targets.size)

    again = start.copy()
    exchange(weights, again, targets, replicas, 2000, xorshift_state(seed))
    assert (again == slots).all()


def test_no_single_move_or_swap_is_left_that_would_help() -> None:
    rng = np.random.default_rng(3)
    weights, targets = rng.lognormal(0, 0.6, (24, 2)), np.ones(4)
    slots = np.arange(24) % 8
    exchange(weights, slots, targets, 2, 50_000, xorshift_state(0))
    reached = objective(weights, slots, targets, 2)
    for i, slot in itertools.product(range(24), range(8)):
        moved = slots.copy()
        moved[i] = slot
        assert objective(weights, moved, targets, 2) >= reached - 1e-9
    for i, j in itertools.combinations(range(24), 2):
        swapped = slots.copy()
        swapped[[i, j]] = slots[[j, i]]
        assert objective(weights, swapped, targets, 2) >= reached - 1e-9


def test_no_replica_is_left_without_a_sample_however_heavy_single_ones_are() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        replicas, count = int(rng.integers(2, 7)), int(rng.integers(1, 5))
        n = replicas + int(rng.integers(0, 4))
        costs = np.where(rng.random((2, n)) < 0.3, 0.0, rng.pareto(0.6, (2, n)))
        slots = balance_units(costs, np.linspace(0.2, 1.0, count), replicas, seed=1)
        assert len(set(slots // count)) == replicas


def test_costs_too_small_to_have_a_mean_count_as_none() -> None:
    costs = np.array([[5e-324] * 7, [1.0] * 7])
    loads = loads_of(costs[1:], balance_units(costs, np.ones(5), 3, seed=0), 15)
    assert loads.max() == 1.0


def test_two_units_are_balanced_at_once_where_sorting_by_one_leaves_the_other() -> None:
    rng = np.random.default_rng(0)
    costs = rng.lognormal(0, 0.5, (2, 512))
    loads = loads_of(costs, balance_units(costs, np.ones(16), 4, seed=0), 64)
    spread = loads.std(axis=0) / loads.mean(axis=0)
    assert (spread < 0.005).all()


def test_targets_are_followed_in_every_unit() -> None:
    rng = np.random.default_rng(1)
    costs, targets = rng.lognormal(0, 0.5, (3, 600)), np.array([0.25, 0.5, 1.0, 1.0, 0.5])
    loads = loads_of(costs, balance_units(costs, targets, 2, seed=0), 10).reshape(2, 5, 3)
    shares = loads / loads.sum(axis=(0, 1)) * 2
    assert shares == pytest.approx(np.broadcast_to((targets / targets.sum())[None, :, None], shares.shape), rel=0.02)


@pytest.mark.parametrize("units", [1, 2])
def test_small_instances_come_close_to_the_optimum(units: int) -> None:
    rng = np.random.default_rng(7)
    for _ in range(5):
        costs = rng.lognormal(0, 0.8, (units, 8))
        every = (np.array(slots) for slots in itertools.product(range(3), repeat=8))
        means = costs.sum(axis=1) / 3
        optimum = min((loads_of(costs, slots, 3) / means).max() for slots in every)
        reached = (loads_of(costs, balance_units(costs, np.ones(3), 1, seed=0), 3) / means).max()
        assert reached <= 1.1 * optimum
