"""Entrain's hierarchical assignment: what every plan keeps, the stratified assignment against a slow twin, and what it gains."""

import itertools
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import LLM, StepPlan, Topology
from headrace.reorder_service.planning.batch import Batch, Slots, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.simulation.work import Work
from headrace.reorder_service.planning.strategies import disttrain
from headrace.reorder_service.planning.strategies.entrain import (
    effective_counts,
    effective_microbatches,
    plan_slots,
    stratify,
)
from headrace.reorder_service.planning.stratification_options import Stratification
from tests.examples import with_examples

COSTS = Path(__file__).parents[4] / "data" / "costs"
briefly = with_examples(50)
seeds = st.integers(0, 2**32)

UNITS = [
    ("llm",),
    ("encoder", "llm"),
    ("llm", "generator"),
    ("vision", "audio", "llm"),
    ("encoder", "llm", "generator"),
    ("vision", "audio", "depth", "llm", "generator"),
]
KINDS = {
    "uniform": lambda rng, n: rng.random(n),
    "heavy-tailed": lambda rng, n: rng.pareto(1.2, n) + 0.01,
    "constant": lambda rng, n: np.full(n, 0.1),
    "single huge": lambda rng, n: np.where(np.arange(n) == n // 2, 1e6, 1.0),
    "all zero": lambda rng, n: np.zeros(n),
    "mostly zero": lambda rng, n: rng.random(n) * (rng.random(n) < 0.2),
    "ties": lambda rng, n: rng.integers(0, 4, n).astype(np.float64),
}


def batch_of(costs: dict[str, np.ndarray], replicas: int, microbatches: int, **options: object) -> Batch:
    topology = Topology(replicas=replicas, microbatches=microbatches, stages=dict.fromkeys(costs, 1))
    execution = Execution(stratification=Stratification(**options))
    return make_batch(np.arange(len(costs[LLM])) * 7 + 3, costs, topology, seed=0, execution=execution)


def two_units(encoder: list[float], llm: list[float], replicas: int, microbatches: int) -> Batch:
    return batch_of({"encoder": np.array(encoder, np.float64), "llm": np.array(llm, np.float64)}, replicas, microbatches)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rng = np.random.default_rng(draw(seeds))
    n = draw(st.one_of(st.integers(1, 12), st.integers(13, 120)))
    costs = {unit: KINDS[draw(st.sampled_from(sorted(KINDS)))](rng, n) for unit in draw(st.sampled_from(UNITS))}
    options = {"common_count": draw(st.booleans()), "coarse_quantile": draw(st.sampled_from([0.0, 0.5, 1.0]))}
    return batch_of(costs, draw(st.integers(1, 6)), draw(st.integers(1, 9)), **options)


def check_order_and_completeness(batch: Batch, slots: Slots) -> None:
    plan = StepPlan(strategy="entrain", seed=0, topology=batch.topology, replicas=batch.replicas(slots))
    plan.check()
    assert plan.sample_ids() == batch.sample_ids.tolist()


@with_examples(300)
@given(batches())
def test_every_plan_keeps_the_rules(batch: Batch) -> None:
    slots = plan_slots(batch)
    check_order_and_completeness(batch, slots)
    count, llm_row = batch.topology.microbatches, batch.units.index(LLM)
    encoder, llm = slots[0], slots[llm_row]
    assert (slots[:llm_row] == encoder).all()
    assert (slots[llm_row:] == llm).all()
    assert (encoder // count == llm // count).all()  # deferral stays inside the replica
    assert np.isin(llm - encoder, [0, 1]).all()  # and goes to the next microbatch only
    occupied = batch.occupied(slots)
    assert (np.diff(occupied.astype(int), axis=1) <= 0).all()  # empty microbatches come last
    assert occupied.any(axis=1).sum() == min(batch.topology.replicas, batch.sample_ids.size)


@briefly
@given(batches())
def test_the_same_batch_gives_the_same_slots(batch: Batch) -> None:
    assert np.array_equal(plan_slots(batch), plan_slots(batch))


@briefly
@given(batches())
def test_a_generator_changes_nothing_and_encoders_count_as_their_sum(batch: Batch) -> None:
    llm_row = batch.units.index(LLM)
    merged = batch_of(
        {"encoder": batch.costs[:llm_row].sum(axis=0), "llm": batch.costs[llm_row]},
        batch.topology.replicas,
        batch.topology.microbatches,
        coarse_quantile=batch.execution.stratification.coarse_quantile,
        common_count=batch.execution.stratification.common_count,
    )
    slots = plan_slots(batch)
    if llm_row > 0:
        assert np.array_equal(slots[0], plan_slots(merged)[0])
    assert np.array_equal(slots[llm_row], plan_slots(merged)[1])


def test_replicas_take_samples_by_encoder_cost_where_least_llm_work_is() -> None:
    # In this order: LLM 9 to replica 0, 2 and 3 and 5 to replica 1 (then 10), 4 to replica 0.
    batch = two_units([5, 4, 3, 2, 1], [9, 2, 3, 5, 4], replicas=2, microbatches=1)
    assert plan_slots(batch)[0].tolist() == [0, 1, 1, 1, 0]


def test_samples_with_equal_encoder_cost_go_by_falling_llm_cost() -> None:
    batch = two_units([1, 1, 1, 1], [1, 2, 3, 9], replicas=2, microbatches=1)
    assert plan_slots(batch)[0].tolist() == [1, 1, 1, 0]


def test_samples_without_encoder_cost_are_balanced_by_llm_cost() -> None:
    batch = two_units([0] * 7, [5, 5, 4, 4, 3, 3, 3], replicas=1, microbatches=3)
    slots = plan_slots(batch)
    assert np.bincount(slots[0], weights=batch.costs[1]).max() <= 11  # LPT on Graham's instance; 9 is the optimum
    assert batch.occupied(slots).all()


@pytest.mark.parametrize(
    ("encoder", "num_microbatches", "expected"),
    [
        ([3, 3, 3, 3], 6, 4),
        ([3, 3, 3, 3], 2, 2),
        ([4, 1, 1, 1], 4, 1),
        ([4, 2, 1, 1], 4, 2),
        ([0.1] * 6, 8, 6),  # 0.6 / 0.1 is a rounding error below 6
        ([0.7, 0.1, 0.1, 0.1, 0.4], 5, 2),
        ([0, 0, 0], 8, 3),
        ([0, 0, 0], 2, 2),
        ([0, 5, 0, 0, 0], 3, 1),
        ([7], 4, 1),
    ],
)
def test_k_eff(encoder: list[float], num_microbatches: int, expected: int) -> None:
    assert effective_microbatches(np.array(encoder, np.float64), num_microbatches) == expected


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 12))
def test_k_eff_is_the_formula(encoder: list[int], num_microbatches: int) -> None:
    fills = Fraction(sum(encoder), max(encoder)) if max(encoder) else len(encoder)
    expected = max(1, min(num_microbatches, int(fills)))
    assert effective_microbatches(np.array(encoder, np.float64), num_microbatches) == expected


@given(batches())
def test_replicas_use_equally_many_microbatches_unless_they_lack_samples(batch: Batch) -> None:
    common, own = (
        replace(batch, execution=Execution(stratification=Stratification(common_count=common))) for common in (True, False)
    )
    used, used_alone = (of.occupied(plan_slots(of)).sum(axis=1) for of in (common, own))
    samples = np.bincount(plan_slots(common)[0] // batch.topology.microbatches, minlength=batch.topology.replicas)
    assert used.tolist() == np.minimum(used_alone.max(), samples).tolist()


def test_replicas_may_use_their_own_number_of_microbatches() -> None:
    # Replica 0 takes the encoder costs 10, 1 and 1, and replica 1 three times 9, so that their K_eff are 1 and 3.
    encoder, llm = [10, 9, 9, 9, 1, 1], [10, 4, 4, 4, 1, 1]
    for common, expected in ((True, [3, 3]), (False, [1, 3])):
        costs = {"encoder": np.array(encoder, np.float64), "llm": np.array(llm, np.float64)}
        batch = batch_of(costs, 2, 3, common_count=common)
        assert batch.occupied(plan_slots(batch)).sum(axis=1).tolist() == expected


def slow_stratify(encoder: list[float], llm: list[float], count: int, quantile: float) -> list[int]:
    if not encoder:
        return []
    threshold = np.quantile(llm, quantile, method="lower")
    in_order = [t for t in range(len(llm)) if llm[t] > threshold] + [t for t in range(len(llm)) if llm[t] <= threshold]
    bins: list[list[int]] = [[] for _ in range(count)]
    weights = encoder if any(encoder) else llm
    for t in in_order:
        min(bins, key=lambda members: (sum(weights[m] for m in members), len(members))).append(t)
    return [next(k for k, members in enumerate(bins) if t in members) for t in range(len(llm))]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 7), seeds, st.sampled_from([0, 0.5, 1]))
def test_the_stratified_assignment_equals_its_slow_twin(sizes: list[int], count: int, seed: int, quantile: float) -> None:
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    encoder, llm = rng.integers(0, 9, (2, sum(sizes))).astype(np.float64)
    encoder[: sizes[0]] *= rng.integers(0, 2)
    used = np.minimum(effective_counts(encoder, starts, count) + rng.integers(0, 3, len(sizes)), sizes)
    microbatch = stratify(encoder, llm, starts, used, float(quantile))
    for r in range(len(sizes)):
        mine = slice(starts[r], starts[r + 1])
        expected = slow_stratify(encoder[mine].tolist(), llm[mine].tolist(), int(used[r]), quantile)
        assert microbatch[mine].tolist() == expected


@briefly
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3), seeds)
def test_encoder_loads_keep_the_bound_of_list_scheduling(encoder: list[int], count: int, seed: int) -> None:
    llm = np.random.default_rng(seed).random(len(encoder))
    batch = two_units([float(cost) for cost in encoder], llm.tolist(), replicas=1, microbatches=count)
    used = effective_microbatches(batch.costs[0], count)

    def longest(slots: tuple[int, ...] | np.ndarray) -> float:
        return float(np.bincount(slots, weights=encoder).max())

    optimum = min(longest(slots) for slots in itertools.product(range(used), repeat=len(encoder)))
    assert longest(plan_slots(batch)[0]) <= (2 - 1 / used) * optimum + 1e-9


@pytest.mark.parametrize(("quantile", "expected"), [(0.5, [0, 1, 0, 1]), (1.0, [0, 1, 1, 0])])
def test_samples_with_much_llm_work_are_spread_first(quantile: float, expected: list[int]) -> None:
    # By encoder cost alone the two LLM costs of 9 meet in one microbatch; spread first, each opens its own.
    encoder, llm = np.array([4.0, 3.0, 3.0, 2.0]), np.array([9.0, 1.0, 1.0, 9.0])
    microbatch = stratify(encoder, llm, np.array([0, 4]), np.array([2]), quantile)
    assert microbatch.tolist() == expected


@pytest.mark.parametrize("quantile", [-0.1, 1.1, float("nan")])
def test_a_quantile_outside_0_and_1_is_refused(quantile: float) -> None:
    with pytest.raises(ValueError, match="coarse_quantile must be between 0 and 1"):
        Stratification(coarse_quantile=quantile)


def test_the_threshold_of_the_execution_decides_what_is_spread_first() -> None:
    costs = {"encoder": np.array([4.0, 3.0, 3.0, 2.0]), "llm": np.array([9.0, 1.0, 1.0, 9.0])}
    median, none = (plan_slots(batch_of(costs, 1, 2, coarse_quantile=quantile))[0] for quantile in (0.5, 1.0))
    assert median[0] != median[3]
    assert none[0] == none[3]


def test_figure_4_8() -> None:
    # The samples of the worked example in test_planning_deferral.py, without the microbatches that they end in.
    encoder = [3, 3, 3, 2, 2, 2, 1, 1, 1]
    llm = [5, 3, 2, 6, 4, 3, 6, 6, 1]
    batch = two_units(encoder, llm, replicas=1, microbatches=6)
    slots = plan_slots(batch)
    loads = batch.loads(slots)[0]
    assert loads[:, 0].tolist() == [3] * 6
    assert loads[:, 1].tolist() == [6] * 6
    before = batch.loads(np.stack([slots[0], slots[0]]))[0, :, 1]
    assert sorted(before.tolist()) == [2, 3, 5, 7, 9, 10]  # MB1, MB2, MB5, MB4, MB3, MB6
    assert {tuple(pair) for pair in before.reshape(3, 2).tolist()} == {(9, 3), (7, 5), (10, 2)}


FAMILIES = ["chartqa", "cocoqa", "llava", "synthchart"]


def variation(batch: Batch, slots: Slots) -> np.ndarray:
    """(U,) standard deviation over mean of the loads of all microbatches that K_eff leaves in use."""
    loads = batch.loads(slots)[batch.occupied(slots)]
    return loads.std(axis=0) / loads.mean(axis=0)


@pytest.mark.parametrize("microbatches", [16, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_units_vary_less_than_under_disttrain(family: str, microbatches: int) -> None:
    table = pq.read_table(COSTS / f"{family}_512.parquet")
    batch = batch_of({unit: table[f"cost_{unit}"].to_numpy() for unit in ("encoder", "llm")}, 4, microbatches)
    ratio = variation(batch, disttrain.plan_slots(batch)) / variation(batch, plan_slots(batch))
    assert (ratio > 1).all()
    assert ratio.max() > 1.5


def test_a_common_number_of_microbatches_levels_synthchart_without_loss_of_time() -> None:
    # Table 4.3 has absolute standard deviations: with K_eff below K, microbatches are heavier and so are their differences.
    table = pq.read_table(COSTS / "synthchart_512.parquet")
    costs = {unit: table[f"cost_{unit}"].to_numpy() for unit in ("encoder", "llm")}
    spread, seconds = {}, {}
    for name, plan in (("disttrain", disttrain.plan_slots), ("common", plan_slots), ("own", plan_slots)):
        batch = batch_of(costs, 4, 32, common_count=name == "common")
        slots = plan(batch)
        spread[name] = batch.loads(slots)[batch.occupied(slots)].std(axis=0)
        seconds[name] = simulate(Work.of(batch, slots)).iteration_s
    assert (spread["disttrain"] / spread["common"] > [3.0, 1.3]).all()
    assert (spread["disttrain"] / spread["own"] < [1.5, 1.0]).all()
    assert seconds["common"] < 1.01 * seconds["own"]


def test_on_average_over_many_batches_deferral_makes_llm_loads_more_even() -> None:
    gains = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        batch = batch_of({"encoder": rng.lognormal(0, 0.4, 256), "llm": rng.lognormal(0, 0.8, 256)}, 2, 16)
        slots = plan_slots(batch)
        undeferred = np.stack([slots[0], slots[0]])
        gains.append(variation(batch, undeferred)[1] / variation(batch, slots)[1])
        assert variation(batch, undeferred)[0] == variation(batch, slots)[0]
    assert min(gains) > 1
    assert np.mean(gains) > 2
