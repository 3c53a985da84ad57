"""Pairwise deferral: the dissertation's worked example, every kernel against a slow twin, the threshold against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.reorder_service.planning.search.deferral import (
    CELLS,
    MOST_ITEMS,
    bottleneck_match,
    closest_subset,
    defer_all,
    interleave,
    reachable_sums,
)
from tests.examples import with_examples

briefly = with_examples(50)
seeds = st.integers(0, 2**32)


def choose(weights: list[float] | np.ndarray, span: float, target: float) -> tuple[list[int], float]:
    """Positions and sum of the samples to defer."""
    array, table = np.asarray(weights, np.float64), np.empty((MOST_ITEMS + 1, CELLS), np.bool_)
    span, target = float(span), float(target)  # kernels are compiled for each type
    taken, total = closest_subset(array, span, reachable_sums(array, span, table), table, target)
    assert total == pytest.approx(array[taken].sum())
    return np.flatnonzero(taken).tolist(), float(total)


def slow_choose(weights: np.ndarray, span: float, target: float) -> list[int]:
    """The same with sets: per cell the first subset that hit it, then the flips."""
    if target <= 0:
        return []
    subset_of: dict[int, frozenset[int]] = {0: frozenset()}
    entered = 0
    for item, weight in enumerate(weights):
        cell = int(weight / span * (CELLS - 1) + 0.5) if weight < span else 0
        if cell == 0 or entered == MOST_ITEMS:
            continue
        entered += 1
        for base, subset in sorted(subset_of.items()):
            if base + cell < CELLS:
                subset_of = {**{base + cell: subset | {item}}, **subset_of}
    aim = target / span * (CELLS - 1)
    subset = subset_of[min(subset_of, key=lambda cell: (abs(aim - cell), cell))]
    for item in range(len(weights)):
        subset = min(subset, subset ^ {item}, key=lambda s: abs(target - sum(weights[i] for i in s)))
    return sorted(subset) if abs(target - sum(weights[i] for i in subset)) < target else []


def slow_nearest(weights: list[float] | np.ndarray, target: float) -> float:
    """Least distance of any subset's sum to the target."""
    sums = {0.0}
    for weight in weights:
        sums |= {total + weight for total in sums}
    return min(abs(target - total) for total in sums)


def slow_threshold(values: np.ndarray, alone: np.ndarray) -> float:
    """The best over all pairings, in each of which every pair may defer or not."""
    pairings = itertools.permutations(range(len(alone)))
    return min(max(min(alone[i], values[i, j]) for i, j in enumerate(pairing)) for pairing in pairings)


# Figures 4.8 and 4.10: (encoder, LLM) units per sample. The figure's boxes are not in the text; these agree with all it says.
WORKED_EXAMPLE = {
    "MB1": [(3, 2)],
    "MB2": [(3, 3)],
    "MB3": [(2, 3), (1, 6)],
    "MB4": [(2, 6), (1, 1)],
    "MB5": [(3, 5)],
    "MB6": [(2, 4), (1, 6)],
}


def test_the_worked_examples_table_of_deferrals() -> None:
    # Table 4.10b has the loads (7, 6) and (9, 6) where we have (6, 7) and (6, 9): no loads give all nine pairs as printed.
    # MB6 can be left with 6 (first column). If it could be left with 7 as well, that would be nearer to even beside MB5
    # (7 and 8) than the printed 9 and 6. With the two loads exchanged all nine agree, and eq. 4.3 sees only the greater one.
    expected = {
        "MB3": {"MB1": (6, 5), "MB2": (6, 6), "MB5": (6, 8)},
        "MB4": {"MB1": (6, 3), "MB2": (6, 4), "MB5": (6, 6)},
        "MB6": {"MB1": (6, 6), "MB2": (6, 7), "MB5": (6, 9)},
    }
    load = {name: sum(llm for _, llm in samples) for name, samples in WORKED_EXAMPLE.items()}
    for heavy, row in expected.items():
        weights = [float(llm) for _, llm in WORKED_EXAMPLE[heavy]]
        for light, loads in row.items():
            _, moved = choose(weights, load[heavy] - min(load.values()), (load[heavy] - load[light]) / 2)
            assert (load[heavy] - moved, load[light] + moved) == loads


def test_the_worked_examples_matching() -> None:
    values = np.array([[6.0, 6.0, 8.0], [6.0, 6.0, 6.0], [6.0, 7.0, 9.0]])  # MB3, MB4, MB6 by MB1, MB2, MB5
    threshold, partner = bottleneck_match(values, np.array([9.0, 7.0, 10.0]))
    assert threshold == 6
    assert partner.tolist() == [1, 2, 0]


def test_the_worked_example_ends_with_equal_loads_and_every_pair_side_by_side() -> None:
    llm = np.array([llm for samples in WORKED_EXAMPLE.values() for _, llm in samples], np.float64)
    microbatch = np.repeat(np.arange(6), [len(samples) for samples in WORKED_EXAMPLE.values()])
    encoded, computed = defer_all(llm, np.array([0, llm.size]), microbatch, np.array([6]))
    assert np.bincount(computed, weights=llm).tolist() == [6] * 6
    place = {f"MB{m + 1}": int(encoded[microbatch == m][0]) for m in range(6)}
    for heavy, light in (("MB3", "MB2"), ("MB4", "MB5"), ("MB6", "MB1")):
        assert place[heavy] % 2 == 0
        assert place[light] == place[heavy] + 1
    deferred = [
        (float(cost), int(m) + 1) for cost, m in zip(llm[computed > encoded], microbatch[computed > encoded], strict=True)
    ]
    assert deferred == [(3.0, 3), (1.0, 4), (4.0, 6)]


@given(st.lists(st.integers(0, 60), max_size=14), st.integers(1, 120), st.floats(0, 1))
def test_the_chosen_subset_equals_its_slow_twin(weights: list[int], span: int, share: float) -> None:
    array = np.array(weights, np.float64)
    target = round(share * span) / 2
    assert choose(array, float(span), target)[0] == slow_choose(array, float(span), target)


@given(st.integers(0, 12), seeds, st.floats(0.01, 1))
def test_the_subset_is_nearest_up_to_rounding_and_better_than_none(count: int, seed: int, share: float) -> None:
    weights = np.random.default_rng(seed).lognormal(0, 1, count)
    span = float(share * weights.sum()) if count else 1.0
    target = span / 2 * 0.9
    taken, total = choose(weights, span, target)
    # Each of the sums compared is wrong by half a cell per sample at most.
    assert abs(target - total) <= slow_nearest(weights, target) + count * span / (CELLS - 1)
    assert taken == [] or 0 < total < 2 * target


@pytest.mark.parametrize("count", [MOST_ITEMS, MOST_ITEMS + 1, 700, 20_000])
def test_very_many_alike_samples_still_meet_the_target(count: int) -> None:
    # 20,000 samples are each less than half a cell: the flips alone do it.
    weights = np.full(count, 1.0 / count)
    _, total = choose(weights, 0.2, 0.08)
    assert abs(total - 0.08) <= 0.5 / count + 1e-12


def test_nothing_is_deferred_between_equal_loads_and_no_sample_without_cost() -> None:
    assert choose([3.0, 1.0], 2.0, 0.0) == ([], 0.0)
    assert choose([0.0, 0.0, 4.0, 1.0], 4.0, 1.0) == ([3], 1.0)
    assert choose([5.0], 5.0, 2.5) == ([], 0.0)  # moving all of it only swaps the loads
    assert choose([200.4], 1023.0, 100.2) == ([], 0.0)  # the same, and rounding makes it look the better choice


@given(st.integers(1, 6), seeds, st.sampled_from([4, 100]))
def test_the_threshold_equals_brute_force_over_all_pairings(size: int, seed: int, top: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, top, (size, size)).astype(np.float64)
    alone = rng.integers(0, top, size).astype(np.float64)
    threshold, partner = bottleneck_match(values, alone)
    assert threshold == slow_threshold(values, alone)
    assert sorted(partner.tolist()) == list(range(size))
    assert all(alone[i] <= threshold or values[i, j] <= threshold for i, j in enumerate(partner))


def test_a_matching_that_needs_long_alternating_paths() -> None:
    # Row i may take columns i and i + 1, the last row only column 0: every earlier choice has to move on by one.
    size = 40
    values = np.full((size, size), 9.0)
    for i in range(size - 1):
        values[i, i] = values[i, i + 1] = 1.0
    values[size - 1, 0] = 1.0
    threshold, partner = bottleneck_match(values, np.full(size, 5.0))
    assert threshold == 1
    assert partner.tolist() == [*range(1, size), 0]


def test_who_needs_no_partner_gets_one_that_is_left() -> None:
    values = np.array([[3.0, 9.0], [9.0, 9.0]])
    threshold, partner = bottleneck_match(values, np.array([8.0, 3.0]))
    assert threshold == 3
    assert partner.tolist() == [0, 1]


def test_who_can_do_alone_what_another_must_do_defers_nothing() -> None:
    # The 12 cannot be split, so nobody gains from a deferral out of 6 + 1 + 1.
    llm, microbatch = np.array([12.0, 6.0, 1.0, 1.0, 2.0, 2.0]), np.array([0, 1, 1, 1, 2, 3])
    encoded, computed = defer_all(llm, np.array([0, 6]), microbatch, np.array([4]))
    assert encoded.tolist() == computed.tolist()


def microbatches_of(count: int, num_samples: int, rng: np.random.Generator) -> np.ndarray:
    """(n,) microbatch of each sample, none of them empty."""
    return rng.permutation(np.concatenate([np.arange(count), rng.integers(0, count, num_samples - count)]))


@briefly
@given(st.integers(1, 7), st.integers(0, 18), seeds)
def test_the_slowest_microbatch_equals_brute_force_over_pairings_and_deferral_sets(count: int, more: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    microbatch = microbatches_of(count, count + more, rng)
    llm = rng.integers(0, 30, count + more).astype(np.float64)
    loads = np.bincount(microbatch, weights=llm)
    by_load = sorted(range(count), key=lambda m: -loads[m])
    half = count // 2
    heavy, light = by_load[:half], by_load[count - half :]
    values = np.empty((half, half))
    for i, j in np.ndindex(half, half):
        items = llm[microbatch == heavy[i]]
        target = (loads[heavy[i]] - loads[light[j]]) / 2
        moved = sum(items[t] for t in slow_choose(items, loads[heavy[i]] - loads[by_load[-1]], target))
        values[i, j] = max(loads[heavy[i]] - moved, loads[light[j]] + moved)
    expected = slow_threshold(values, loads[heavy]) if half else 0.0
    middle = loads[by_load[half]] if count % 2 else 0.0

    _, computed = defer_all(llm, np.array([0, llm.size]), microbatch, np.array([count]))
    assert np.bincount(computed, weights=llm, minlength=count).max() == max(expected, middle)


@briefly
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), seeds)
def test_deferred_samples_leave_the_overloaded_one_of_a_pair_for_its_partner(counts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    used = np.array(counts)
    sizes = np.where(used > 0, used + rng.integers(0, 20, used.size), 0)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    microbatch = np.concatenate([microbatches_of(k, n, rng) if k else np.empty(0, int) for k, n in zip(used, sizes, strict=True)])
    microbatch = microbatch.astype(np.int64)
    llm = rng.lognormal(0, 1, microbatch.size)
    encoded, computed = defer_all(llm, starts, microbatch, used)
    for r, count in enumerate(used):
        mine = slice(starts[r], starts[r + 1])
        place_of = dict(zip(microbatch[mine].tolist(), encoded[mine].tolist(), strict=True))
        assert sorted(place_of.values()) == list(range(count))  # a microbatch stays whole, and none is lost
        assert (encoded[mine] == [place_of[m] for m in microbatch[mine].tolist()]).all()
        assert np.isin(computed[mine] - encoded[mine], [0, 1]).all()
        before = np.bincount(encoded[mine], weights=llm[mine], minlength=count)
        after = np.bincount(computed[mine], weights=llm[mine], minlength=count)
        givers = np.unique(encoded[mine][computed[mine] > encoded[mine]])
        assert not np.isin(givers + 1, givers).any()  # who receives does not give
        for giver in givers:
            assert before[giver] > before[giver + 1]
            assert after[giver : giver + 2].max() < before[giver]


def slow_interleave(loads: list[float], follower: list[int]) -> list[int]:
    pairs = [[k] if f == k else [k, f] for k, f in enumerate(follower) if k not in [x for j, x in enumerate(follower) if x != j]]
    pairs.sort(key=lambda pair: loads[pair[0]] + loads[pair[-1]])
    order = [k for pair in pairs[::2] + pairs[1::2][::-1] for k in pair]
    return [order.index(k) for k in range(len(loads))]


@given(st.integers(0, 9), seeds)
def test_pairs_stand_in_a_hill_by_load(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads = rng.integers(0, 20, count).astype(np.float64)
    shuffled, follower = rng.permutation(count), np.arange(count)
    half = count // 2
    follower[shuffled[:half]] = shuffled[count - half :]
    assert interleave(loads, follower).tolist() == slow_interleave(loads.tolist(), follower.tolist())


def test_the_lightest_pairs_come_first_and_last_and_the_middle_one_counts_double() -> None:
    loads = np.array([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0])
    place = interleave(loads, np.array([4, 6, 5, 3, 4, 5, 6]))
    # pair loads: 0+4 12, 1+6 9, 2+5 9, 3 alone 10; rising: 1, 2, 3, 0
    assert np.argsort(place).tolist() == [1, 6, 3, 0, 4, 2, 5]
