"""DistTrain's Alg. 3: the paper's intervals, examples by hand, and the kernel against a slow twin that replays everything."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.search.microbatch_order import microbatch_positions, order_microbatches
from headrace.schedule import Kind, build
from tests.examples import with_examples

exactly = with_examples(80)


def twice(stages: int) -> np.ndarray:
    return np.full(stages, 2.0)


def replay(forward: np.ndarray, backward: np.ndarray, pieces: list[int]) -> dict[tuple[int, str, int], float]:
    """When each action of 1F1B ends, (stage, "F" or "B", piece): piece i is microbatch pieces[i], all of it."""
    p, n = forward.shape[1], len(pieces)
    queues = []
    for s in range(p):
        ahead = min(p - 1 - s, n)
        steady = [action for i in range(n - ahead) for action in (("F", i + ahead), ("B", i))]
        queues.append([("F", i) for i in range(ahead)] + steady + [("B", i) for i in range(n - ahead, n)])
    end: dict[tuple[int, str, int], float] = {}
    free = [0.0] * p
    while any(queues):
        for s, queue in enumerate(queues):
            while queue:
                kind, i = queue[0]
                needs = ((s - 1, "F", i) if s > 0 else None) if kind == "F" else (s + 1, "B", i) if s + 1 < p else (s, "F", i)
                if needs is not None and needs not in end:
                    break
                queue.pop(0)
                takes = forward[pieces[i], s] * (1.0 if kind == "F" else backward[s])
                free[s] = max(free[s], end[needs] if needs else 0.0) + takes
                end[s, kind, i] = free[s]
    return end


def interval(forward: np.ndarray, backward: np.ndarray, pieces: list[int], index: int) -> float:
    """From the backward before (at first: from the first forward) until the next backward has come back to stage 0."""
    if forward.shape[1] == 1:
        return 0.0
    end = replay(forward, backward, pieces)
    return end[1, "B", index] - (end[0, "F", 0] if index == 0 else end[0, "B", index - 1])


def slow_fill(forward: np.ndarray, sizes: np.ndarray, backward: np.ndarray, chunks: int) -> list[int]:
    """Alg. 3 as its text says, with every interval read off a full replay of what is placed so far."""
    count, p = forward.shape
    by_size = sorted(range(count), key=lambda m: (sizes[m], m))
    order, rear, waiting = by_size[:1], by_size[1:p], sorted(by_size[p:])

    def closest(target: float) -> int:
        return min(waiting, key=lambda m: (abs(forward[m, 0] - target), m))

    while waiting:
        pieces = [m for m in order for _ in range(chunks)]
        still_open = p - len(pieces)  # of the p - 1 forwards in the first interval
        if still_open > 0:
            volume = interval(forward, backward, pieces[:1], 0) - sum(forward[m, 0] for m in pieces[1:])
            target = volume / still_open
        else:
            stand_in = closest(interval(forward, backward, pieces, len(pieces) - p + 1))
            volumes = [interval(forward, backward, pieces + [stand_in] * c, len(pieces) + c - p + 1) for c in range(chunks)]
            target = sum(volumes) / chunks
        order.append(closest(target))
        waiting.remove(order[-1])
    return order + rear[::-1]


# Whole numbers, so that sums are exact and ties are ties in the kernel and in its twin.
def whole_numbers(seed: int, count: int, stages: int, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    forward, sizes = rng.integers(0, top, (count, stages)), rng.integers(0, top, count)
    return forward.astype(np.float64), sizes.astype(np.float64), rng.integers(0, 3, stages).astype(np.float64)


@exactly
@given(st.integers(0, 14), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32), st.sampled_from([1, 3, 40]))
def test_the_incremental_order_equals_the_one_from_full_replays(
    count: int, stages: int, chunks: int, seed: int, top: int
) -> None:
    forward, sizes, backward = whole_numbers(seed, count, stages, top)
    assert order_microbatches(forward, sizes, backward, chunks).tolist() == slow_fill(forward, sizes, backward, chunks)


@exactly
@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 5), st.integers(0, 2**32))
def test_every_order_is_a_permutation_that_starts_and_ends_with_the_smallest(
    count: int, stages: int, chunks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    forward, sizes = rng.lognormal(0, 1.5, (count, stages)), rng.lognormal(0, 1.5, count)
    order = order_microbatches(forward, sizes, twice(stages), chunks)
    assert sorted(order.tolist()) == list(range(count))
    ends = [*order[:1], *order[1:][::-1][: stages - 1]]  # the first, then the rear from its end
    assert sizes[ends].tolist() == sorted(sizes)[:stages]


def test_figure_12_interval_1_holds_forwards_2_to_p_and_the_last_p_minus_1_intervals_hold_none() -> None:
    # p = 4 stages, l = 6 microbatches: what Alg. 3 takes an interval to be is what stage 0 of the schedule does.
    intervals: list[list[int]] = [[]]
    first, *later = build("1f1b", {"encoder": 1, "llm": 3}, range(1, 7))[0]
    for action in later:
        if action.kind == Kind.FORWARD:
            intervals[-1].append(action.microbatch)
        else:
            intervals.append([])
    assert first.microbatch == 1
    assert intervals[:-1] == [[2, 3, 4], [5], [6], [], [], []]


def test_figure_12_the_smallest_opens_two_fill_interval_1_and_the_three_next_smallest_close() -> None:
    # The way of the smallest through stages 2-4 and back is 3 * (1 + 2) = 9, in three forwards of 3: 4 is nearest to that.
    # It leaves 5 in two forwards, and of the others 5 is nearer to 2.5 than 9 is. The rest are the rear.
    first_stage = np.array([1.2, 4.0, 1.0, 1.5, 5.0, 1.1])
    assert first_stage[fill_behind_ones(first_stage)].tolist() == [1, 4, 5, 1.5, 1.2, 1.1]
    # With a seventh, a 9, interval 1 gets its p - 1 forwards.
    first_stage = np.append(first_stage, 9.0)
    assert first_stage[fill_behind_ones(first_stage)].tolist() == [1, 4, 5, 9, 1.5, 1.2, 1.1]


def fill_behind_ones(first_stage: np.ndarray) -> np.ndarray:
    forward = np.hstack([first_stage[:, None], np.ones((first_stage.size, 3))])
    return order_microbatches(forward, first_stage, twice(4))


def test_the_smallest_goes_first_and_the_smallest_of_the_rest_go_last() -> None:
    sizes = np.array([5.0, 9.0, 1.0, 7.0, 3.0, 8.0, 2.0, 6.0])
    order = order_microbatches(np.repeat(sizes[:, None], 3, axis=1), sizes, twice(3)).tolist()
    assert sizes[order[0]] == 1
    assert sizes[order[-2:]].tolist() == [3, 2]


TWO_STAGES = np.array([[1.0, 2.0], [6.0, 1.0], [2.0, 1.0], [9.0, 1.0], [3.0, 1.0]])


def test_every_interval_gets_the_forward_that_fills_it_best() -> None:
    # Two stages. Microbatch 0 is the smallest and opens: its way through stage 1 and back, 2 + 4, is the first interval,
    # which the forward of 6 fills. Its backward runs at 7-9, stage 1 returns the next one at 10: an interval of 1, to which 3
    # is nearer than 9. The 2 is the rear.
    assert order_microbatches(TWO_STAGES, TWO_STAGES[:, 0].copy(), twice(2)).tolist() == [0, 1, 4, 3, 2]


def test_with_two_chunks_a_microbatch_is_chosen_for_the_mean_of_its_two_intervals() -> None:
    # On a clock twice as fast. The second piece of microbatch 0 takes the first interval. Its first backward runs at 7-9, the
    # second comes back at 13: 4. The 3 is nearest; standing in, its first piece runs at 9-12, stage 1 returns it at 16, after
    # the backward of 13-15: 1. The mean of 4 and 1 is 2.5, so it is the 3. Then the intervals are short: the 6, the 9.
    assert order_microbatches(TWO_STAGES, TWO_STAGES[:, 0].copy(), twice(2), 2).tolist() == [0, 4, 1, 3, 2]


@exactly
@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 2**32))
def test_one_chunk_is_plain_1f1b(count: int, stages: int, seed: int) -> None:
    forward, sizes, backward = whole_numbers(seed, count, stages, 40)
    assert order_microbatches(forward, sizes, backward, 1).tolist() == order_microbatches(forward, sizes, backward).tolist()


def test_a_frozen_stage_shortens_the_intervals() -> None:
    # Stage 1 has no backward: the first interval is 2, and the 3 is nearer to it than the 6.
    order = order_microbatches(TWO_STAGES, TWO_STAGES[:, 0].copy(), np.array([2.0, 0.0])).tolist()
    assert order[:2] == [0, 4]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_with_few_microbatches_each_still_runs_once(count: int, chunks: int) -> None:
    sizes = np.arange(count, 0, -1).astype(np.float64)
    order = order_microbatches(np.repeat(sizes[:, None], 4, axis=1), sizes, twice(4), chunks)
    assert sorted(order.tolist()) == list(range(count))


def test_on_one_stage_there_is_nothing_to_fill_and_the_forwards_rise() -> None:
    sizes = np.array([3.0, 1.0, 2.0])
    assert order_microbatches(sizes[:, None].copy(), sizes, twice(1)).tolist() == [1, 2, 0]


def test_many_microbatches_of_equal_time_keep_their_order_but_for_the_rear() -> None:
    order = order_microbatches(np.ones((512, 8)), np.ones(512), twice(8)).tolist()
    assert order == [0, *range(8, 512), *range(7, 0, -1)]


@exactly
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**32))
def test_replicas_are_ordered_each_for_itself_and_empty_microbatches_come_last(
    replicas: int, count: int, chunks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    forward, sizes = rng.lognormal(0, 1, (replicas, count, 3)), rng.lognormal(0, 1, (replicas, count))
    occupied = rng.random((replicas, count)) < 0.7
    position = microbatch_positions(forward, sizes, occupied, twice(3), chunks)
    for r in range(replicas):
        filled, empty = np.flatnonzero(occupied[r]), np.flatnonzero(~occupied[r])
        order = filled[order_microbatches(forward[r][filled], sizes[r][filled], twice(3), chunks)]
        assert np.argsort(position[r]).tolist() == [*order.tolist(), *empty.tolist()]


def test_where_only_the_first_stages_vary_it_beats_a_random_order() -> None:
    # DistTrain's setting: sequences of a fixed length in the LLM (5 stages), images of all sizes in the encoder (3 stages).
    gains = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sizes = rng.lognormal(0, 0.8, 32)
        forward = np.hstack([np.repeat(sizes[:, None], 3, axis=1), np.full((32, 5), sizes.mean())])
        ours = replay(forward, twice(8), order_microbatches(forward, sizes, twice(8)).tolist())
        arbitrary = replay(forward, twice(8), rng.permutation(32).tolist())
        gains.append(max(arbitrary.values()) / max(ours.values()))
    assert np.mean(gains) > 1.05
