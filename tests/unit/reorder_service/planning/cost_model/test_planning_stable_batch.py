"""b_min: when batches divide the stages alike, and what the user of a smaller batch is told."""

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.cost_model.stable_batch import (
    NUM_TRIALS,
    distance_to_edge,
    divide_stages,
    failure_bound,
    num_trials,
    seen_divisions,
    small_batch_warning,
    smallest_stable_batch,
)
from headrace.reorder_service.planning.execution import Execution

COSTS = Path(__file__).parents[4] / "data" / "costs"


def test_95_percent_confidence_in_5_percent_errors_take_59_trials() -> None:
    assert NUM_TRIALS == 59


@pytest.mark.parametrize(
    ("seconds", "num_stages", "expected"),
    [
        ([1.0, 1.0], 2, (1, 1)),
        ([1.0, 1.12], 2, (1, 1)),  # the paper's example of fluctuations that round to the same division
        ([1.27, 1.0], 16, (9, 7)),
        ([5.0, 3.0], 16, (10, 6)),
        ([1.0, 99.0], 8, (1, 7)),
        ([0.0, 0.0, 9.0], 4, (1, 1, 2)),
        ([0.0, 0.0], 3, (2, 1)),
        ([2.4, 2.4, 3.2], 8, (3, 2, 3)),
    ],
)
def test_stages_are_divided_in_proportion_to_the_work(seconds: list[float], num_stages: int, expected: tuple[int, ...]) -> None:
    assert divide_stages(np.array(seconds), num_stages) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.integers(0, 40))
def test_every_unit_has_a_stage_and_none_is_left_over(seconds: list[float], extra: int) -> None:
    num_stages = len(seconds) + extra
    divided = divide_stages(np.array(seconds), num_stages)
    assert sum(divided) == num_stages
    assert min(divided) >= 1
    quotas = num_stages * np.array(seconds) / (sum(seconds) or 1.0)
    if quotas.min() >= 1:
        assert (np.abs(np.array(divided) - quotas) < 1 + 1e-9).all()


def test_fewer_stages_than_units_are_refused() -> None:
    with pytest.raises(ValueError, match="2 units need at least one stage each, got 1"):
        divide_stages(np.ones(2), 1)


def test_samples_that_are_all_alike_need_no_more_than_one() -> None:
    assert smallest_stable_batch(np.ones((2, 5)), 8) == 1


def test_the_less_samples_differ_the_smaller_a_batch_may_be() -> None:
    rng = np.random.default_rng(0)
    sizes = []
    for width in (0.1, 0.5, 1.5):
        encoder = rng.lognormal(0, width, 4096)
        sizes.append(smallest_stable_batch(np.stack([encoder / encoder.mean(), np.ones(4096)]), 8) or 0)
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_larger_batch_than_b_min_is_stable_too() -> None:
    seconds = np.stack([np.random.default_rng(1).lognormal(0, 1, 2048), np.full(2048, 1.6)])
    stable = smallest_stable_batch(seconds, 8)
    assert stable is not None
    assert stable > 1
    rng = np.random.default_rng(2)
    for size in (stable, 2 * stable, 4 * stable):
        drawn = [divide_stages(seconds[:, rng.integers(2048, size=size)].sum(axis=1), 8) for _ in range(400)]
        most_often = max(drawn.count(division) for division in set(drawn))
        assert most_often >= 0.95 * len(drawn)


def test_a_mean_on_the_edge_between_two_divisions_has_no_b_min() -> None:
    # 8 stages of 9 : 7 are 4.5 and 3.5: batches fall to either side, however large they are.
    seconds = np.array([[18.0, 0.0], [0.0, 14.0]])
    assert smallest_stable_batch(seconds, 8, most=4096) is None


@given(st.integers(0, 2**63 - 1))
def test_the_same_seed_gives_the_same_size(seed: int) -> None:
    seconds = np.array([[3.0, 1.0, 0.0], [1.0, 1.0, 2.0]])
    assert smallest_stable_batch(seconds, 4, seed, most=64) == smallest_stable_batch(seconds, 4, seed, most=64)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        smallest_stable_batch(np.ones((2, 0)), 4)


@pytest.mark.parametrize(("alpha", "error", "trials"), [(0.05, 0.05, 59), (0.01, 0.05, 90), (0.05, 0.01, 299)])
def test_trials_for_a_confidence(alpha: float, error: float, trials: int) -> None:
    assert num_trials(alpha, error) == trials
    assert (1 - error) ** trials <= alpha < (1 - error) ** (trials - 1)
    with pytest.raises(ValueError, match="alpha must be between 0 and 1"):
        num_trials(1.0, error)


def test_sizes_grow_by_the_factor_of_the_tables() -> None:
    seconds = np.stack([np.random.default_rng(1).lognormal(0, 1, 2048), np.full(2048, 1.6)])
    doubled, by_four = (smallest_stable_batch(seconds, 8, growth=growth) for growth in (2, 4))
    assert doubled is not None
    assert by_four in (4**power for power in range(8))
    assert by_four >= doubled / 2


def test_the_mean_of_ratios_is_another_proportion() -> None:
    """Work of sums is 9 : 3, the mean of the samples' ratios 0.45 : 0.55 (eq. C.1)."""
    seconds = np.array([[9.0, 0.0], [1.0, 2.0]])
    assert max(seen_divisions(seconds, 8, 4096)) == (6, 2)
    assert max(seen_divisions(seconds, 8, 4096, mean_of_ratios=True)) == (4, 4)


def test_all_divisions_of_a_size_are_shown_the_most_frequent_first() -> None:
    seconds = np.array([[3.0, 1.0, 0.0], [1.0, 1.0, 2.0]])
    seen = seen_divisions(seconds, 4, 1)
    assert set(seen) == {(3, 1), (2, 2), (1, 3)}
    assert sum(seen.values()) == NUM_TRIALS + 1
    assert list(seen.values()) == sorted(seen.values(), reverse=True)
    assert list(seen_divisions(np.ones((2, 5)), 8, 4)) == [(4, 4)]


@given(st.integers(0, 58))
def test_so_few_failures_are_as_unlikely_as_the_bound_says(failures: int) -> None:
    bound = failure_bound(failures, 59)
    seen = sum(math.comb(59, i) * bound**i * (1 - bound) ** (59 - i) for i in range(failures + 1))
    assert seen == pytest.approx(0.05, rel=1e-6)


def test_no_failure_in_59_trials_bounds_the_error_by_5_percent() -> None:
    assert 0.049 < failure_bound(0, 59) < 0.05
    assert failure_bound(59, 59) == 1.0


def test_how_far_the_next_division_is() -> None:
    """8 stages: halves change at 4.5 of them, which is where 9 : 7 lies already."""
    assert distance_to_edge(np.ones((2, 3)), 8) == pytest.approx(0.5 / 8, abs=2e-3 / 8)
    assert distance_to_edge(np.array([[9.0], [7.0]]), 8) < 2e-3 / 8
    assert distance_to_edge(np.ones((1, 3)), 8) == 1.0


def batch_of(stages: dict[str, int], seconds: dict[str, np.ndarray], **execution: object) -> Batch:
    topology = Topology(replicas=2, microbatches=4, stages=stages)
    return make_batch(np.arange(len(seconds["llm"])), seconds, topology, 0, execution=Execution(**execution))


def test_a_job_below_b_min_is_warned_with_the_number() -> None:
    table = pq.read_table(COSTS / "synthchart_512.parquet")
    batch = batch_of({"encoder": 3, "llm": 5}, {unit: table[f"cost_{unit}"].to_numpy() for unit in ("encoder", "llm")})
    stable = smallest_stable_batch(3 * batch.costs, 8)
    assert stable is not None
    assert small_batch_warning(batch, stable) == small_batch_warning(batch, 4 * stable) == ""
    warning = small_batch_warning(batch, stable - 1)
    assert warning.startswith(
        f"global_batch is {stable - 1}, below {stable}, the smallest that divides the 8 stages of a replica"
    )
    assert warning.endswith(f"set global_batch to {stable} or more")


def test_a_frozen_unit_counts_without_its_backward() -> None:
    # Both samples divide 8 stages into 6 and 2, but with a frozen encoder one into 3 and 5 and the other into 4 and 4.
    stages, seconds = {"encoder": 4, "llm": 4}, {"encoder": np.array([2.25, 2.6]), "llm": np.array([1.0, 1.0])}
    assert small_batch_warning(batch_of(stages, seconds), 1) == ""
    assert small_batch_warning(batch_of(stages, seconds, backward_factors={"encoder": 0.0}), 1) != ""


def test_where_the_work_lies_between_two_divisions_no_number_is_promised() -> None:
    seconds = {"encoder": np.array([18.0, 0.0]), "llm": np.array([0.0, 14.0])}
    assert small_batch_warning(batch_of({"encoder": 4, "llm": 4}, seconds), 512).startswith("no global_batch of up to 65536")
