"""DistTrain's two reorderings: the paper's example, Alg. 3 against a slow twin, and what they gain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import Microbatch, StepPlan, Topology
from headrace.schedule import one_f_one_b
from reorder_service.planning import plan
from reorder_service.planning.microbatch_order import fill_intervals as fill_intervals_kernel
from reorder_service.planning.simulator import BACKWARD_FACTOR, Work, timeline


def fill_intervals(forward: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return fill_intervals_kernel(forward, sizes, BACKWARD_FACTOR)


def slow_fill(forward: np.ndarray, sizes: np.ndarray) -> list[int]:
    """Alg. 3 as its text says, with every interval read off a full replay of the microbatches placed so far."""
    count, p = forward.shape
    waiting = sorted(range(count), key=lambda m: (sizes[m], m))
    order = [waiting.pop(0)]
    rear, waiting = waiting[: p - 1], sorted(waiting[p - 1 :])
    interval_index = 0
    while waiting:
        takes = min(p - 1, len(waiting)) if interval_index == 0 and p > 1 else 1
        left = interval(forward, order, interval_index)
        for taken in range(takes):
            # of p - 1 forwards that are to fill the first interval, each aims at an equal share of what is left of it
            target = left / (p - 1 - taken) if interval_index == 0 and p > 1 else left
            chosen = min(waiting, key=lambda m: (abs(forward[m, 0] - target), m))
            left -= forward[chosen, 0]
            waiting.remove(chosen)
            order.append(chosen)
        interval_index += 1
    return order + rear[::-1]


def interval(forward: np.ndarray, order: list[int], index: int) -> float:
    """From the backward before (at first: from the first forward) until the next backward has come back to stage 0."""
    if forward.shape[1] == 1:
        return 0.0
    actions = timeline(Work(forward_s=forward[order][None], occupied=np.ones((1, len(order)), np.bool_)), one_f_one_b)

    def end(stage: int, kind: int, microbatch: int) -> float:
        here = (actions.stage == stage) & (actions.kind == kind) & (actions.microbatch == microbatch)
        return float(actions.end_s[here][0])

    opened = end(0, 0, 0) if index == 0 else end(0, 1, index - 1)
    return end(1, 1, index) - opened


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.integers(0, 14), st.integers(1, 5), st.integers(0, 2**32), st.sampled_from([3, 40]))
def test_the_incremental_order_equals_the_one_from_full_replays(count: int, stages: int, seed: int, top: int) -> None:
    # Whole numbers, so that sums are exact and ties are ties in both.
    rng = np.random.default_rng(seed)
    forward = rng.integers(0, top, (count, stages)).astype(np.float64)
    sizes = rng.integers(0, top, count).astype(np.float64)
    expected = slow_fill(forward, sizes) if count else []
    assert fill_intervals(forward, sizes).tolist() == expected


def test_the_smallest_goes_first_and_the_smallest_of_the_rest_go_last() -> None:
    sizes = np.array([5.0, 9.0, 1.0, 7.0, 3.0, 8.0, 2.0, 6.0])
    forward = np.repeat(sizes[:, None], 3, axis=1)
    order = fill_intervals(forward, sizes).tolist()
    assert sizes[order[0]] == 1
    assert sizes[order[-2:]].tolist() == [3, 2]


def test_every_interval_gets_the_forward_that_fills_it_best() -> None:
    # Two stages. Microbatch 0 is the smallest and opens: its way through stage 1 and back, 2 + 4, is the first interval,
    # which the forward of 6 fills. Its backward runs at 7-9, stage 1 returns the next one at 10: an interval of 1, to which 3
    # is nearer than 9. The 2 is the rear.
    forward = np.array([[1.0, 2.0], [6.0, 1.0], [2.0, 1.0], [9.0, 1.0], [3.0, 1.0]])
    assert fill_intervals(forward, forward[:, 0].copy()).tolist() == [0, 1, 4, 3, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7])
def test_with_few_microbatches_each_still_runs_once(count: int) -> None:
    sizes = np.arange(count, 0, -1).astype(np.float64)
    assert sorted(fill_intervals(np.repeat(sizes[:, None], 4, axis=1), sizes).tolist()) == list(range(count))


def test_figure_11() -> None:
    # Figure 6: the first DP group holds the two large samples, the second the two small ones. Figure 11: [1, 3, 2, 4].
    costs = {"encoder": np.array([3.0, 3.0, 1.0, 1.0]), "llm": np.ones(4)}
    topology = Topology(replicas=2, microbatches=1, stages={"encoder": 1, "llm": 1})
    planned = plan("disttrain", np.array([1, 2, 3, 4]), costs, topology, seed=0)
    assert [i for replica in planned.replicas for i in replica[0].sample_ids] == [1, 3, 2, 4]


def test_microbatches_of_a_replica_differ_by_at_most_one_sample() -> None:
    rng = np.random.default_rng(1)
    costs = {unit: rng.lognormal(0, 1, 101) for unit in ("encoder", "llm")}
    planned = plan("disttrain", np.arange(101), costs, Topology(replicas=3, microbatches=5, stages={"encoder": 1, "llm": 2}), 0)
    for replica in planned.replicas:
        sizes = [len(microbatch.sample_ids) for microbatch in replica]
        assert max(sizes) - min(sizes) <= 1


def test_the_generator_counts_for_the_size_of_a_microbatch() -> None:
    ids, ones = np.arange(4), np.ones(4)
    costs = {"encoder": ones, "llm": ones, "generator": np.array([5.0, 2.0, 9.0, 4.0])}
    topology = Topology(replicas=1, microbatches=4, stages={"encoder": 1, "llm": 1, "generator": 1})
    order = [microbatch.sample_ids[0] for microbatch in plan("disttrain", ids, costs, topology, 0).replicas[0]]
    assert order == [1, 2, 0, 3]  # smallest first; the two smallest of the rest last, in falling order


def test_one_huge_sample_shares_its_replica_only_where_it_must() -> None:
    costs = {"encoder": np.array([1.0, 1, 1000, 1, 1, 1]), "llm": np.array([1.0, 1, 1000, 1, 1, 1])}
    planned = plan("disttrain", np.arange(6), costs, Topology(replicas=2, microbatches=2, stages={"encoder": 1, "llm": 1}), 0)
    empty = Microbatch(units={"encoder": (), "llm": ()})
    assert planned.replicas[0] == (Microbatch(units={"encoder": (2,), "llm": (2,)}), empty)


def heavy_tailed(seed: int) -> tuple[StepPlan, StepPlan]:
    rng = np.random.default_rng(seed)
    ids = rng.permutation(512)
    costs = {"encoder": 0.14 * rng.lognormal(0, 0.8, ids.size), "llm": 0.21 * rng.lognormal(0, 0.75, ids.size)}
    topology = Topology(replicas=4, microbatches=16, stages={"encoder": 3, "llm": 5})
    arrival, planned = (plan(strategy, ids, costs, topology, seed) for strategy in ("random", "disttrain"))
    return arrival, planned


def test_on_heavy_tailed_batches_it_is_clearly_faster_than_arrival_order() -> None:
    pairs = [heavy_tailed(seed) for seed in range(30)]
    before, after = np.array([[p.predicted.iteration_s for p in pair if p.predicted] for pair in pairs]).T
    assert (before / after).mean() > 1.1
    assert (after < before).mean() > 0.9
