"""DistTrain's data reordering as a strategy: the paper's figure, a slow twin, the units, and what any batch must come out as."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import GENERATOR, LLM, Topology
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search.microbatch_order import order_microbatches
from headrace.reorder_service.planning.strategies.disttrain import plan_slots
from tests.examples import with_examples

PIPELINES = [
    {"llm": 4},
    {"encoder": 2, "llm": 4},
    {"encoder": 1, "llm": 2, "generator": 1},
    {"vision": 2, "audio": 1, "llm": 4},
    {"vision": 4, "audio": 1, "video": 2, "llm": 4, "generator": 2},
]
FAMILIES = ["random", "heavy-tailed", "constant", "single huge", "zero"]


def costs_of(family: str, num_units: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """(U, n) whole numbers, so that sums are exact in any order."""
    if family == "random":
        return rng.integers(0, 30, (num_units, n)).astype(np.float64)
    if family == "heavy-tailed":
        return np.floor(50 * rng.lognormal(0, 1.5, (num_units, n)))
    costs = np.full((num_units, n), 0.0 if family == "zero" else 7.0)
    if family == "single huge":
        costs[:, rng.integers(n)] = 1e6
    return costs


def batch_of(costs: np.ndarray, stages: dict[str, int], replicas: int, microbatches: int, **execution: object) -> Batch:
    topology = Topology(replicas=replicas, microbatches=microbatches, stages=stages)
    columns = dict(zip(stages, costs, strict=True))
    return make_batch(np.arange(costs.shape[1]), columns, topology, 0, execution=Execution(**execution))  # type: ignore[arg-type]


def slow_reorder(batch: Batch) -> list[int]:
    """Alg. 2, the dealing and the chain of units sample by sample; Alg. 3 itself has a twin in its own tests."""
    replicas, microbatches, stages = batch.topology.replicas, batch.topology.microbatches, batch.topology.stages
    factor = [batch.execution.backward_factor(unit) for unit in stages]
    size = [sum((1 + f) * c for f, c in zip(factor, column, strict=True)) for column in batch.costs.T]
    groups: list[list[int]] = [[] for _ in range(replicas)]
    for i in sorted(range(len(size)), key=lambda i: -size[i]):
        min(groups, key=lambda group: (sum(size[j] for j in group), len(group))).append(i)

    names = list(stages)
    encoders = [name for name in names if name not in (LLM, GENERATOR)]
    longest = sorted(encoders, key=lambda name: -(1 + factor[names.index(name)]) * batch.costs[names.index(name)].sum())[:1]
    path = [name for name in names if name in (*longest, LLM, GENERATOR)]
    slots = [-1] * len(size)
    for r, group in enumerate(groups):
        members = [group[k::microbatches] for k in range(min(microbatches, len(group)))]
        rows = [[batch.costs[names.index(name), m].sum() for name in path] for m in members]
        forward = [[x / stages[name] for name, x in zip(path, row, strict=True) for _ in range(stages[name])] for row in rows]
        sizes = [sum(x for name, x in zip(path, row, strict=True) if name != LLM or path == [LLM]) for row in rows]
        backward = [factor[names.index(name)] for name in path for _ in range(stages[name])]
        shape = (len(members), len(backward))
        order = order_microbatches(
            np.array(forward).reshape(shape), np.array(sizes, np.float64), np.array(backward), batch.execution.chunks
        )
        for place, m in enumerate(order):
            for i in members[m]:
                slots[i] = r * microbatches + place
    return slots


some_batch = given(
    st.sampled_from(FAMILIES),
    st.sampled_from(PIPELINES),
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 2**32),
)


@with_examples(150)
@some_batch
def test_it_equals_its_slow_twin(
    family: str, stages: dict[str, int], n: int, replicas: int, microbatches: int, chunks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    backward = {unit: float(rng.integers(0, 3)) for unit in stages if rng.random() < 0.5}
    costs = costs_of(family, len(stages), n, rng)
    batch = batch_of(costs, stages, replicas, microbatches, schedule="interleaved", chunks=chunks, backward_factors=backward)
    slots = plan_slots(batch)
    assert slots.tolist() == [slow_reorder(batch)] * len(stages)


@with_examples(150)
@some_batch
def test_of_every_batch(
    family: str, stages: dict[str, int], n: int, replicas: int, microbatches: int, chunks: int, seed: int
) -> None:
    batch = batch_of(
        costs_of(family, len(stages), n, np.random.default_rng(seed)),
        stages,
        replicas,
        microbatches,
        schedule="interleaved",
        chunks=chunks,
    )
    slots = plan_slots(batch)
    assert slots.shape == batch.costs.shape
    assert slots.dtype == np.int64
    assert (slots == slots[0]).all(), "nothing is deferred"
    assert slots.min() >= 0
    sizes = np.bincount(slots[0], minlength=batch.num_slots).reshape(replicas, microbatches)
    assert sizes.shape == (replicas, microbatches), "no slot beyond the last"
    for of_replica in sizes:
        assert (np.flatnonzero(of_replica) == np.arange(np.count_nonzero(of_replica))).all(), "empty ones last"
        assert of_replica.max() - of_replica.min() <= 1
    if n >= replicas:
        assert (sizes.sum(axis=1) > 0).all(), "no replica is idle while there are samples enough"
    total = batch.costs.sum(axis=0)
    heaviest = np.bincount(slots[0] // microbatches, weights=total).max()
    assert heaviest <= total.sum() / replicas + (1 - 1 / replicas) * total.max() + 1e-6, "the bound of any list scheduling"
    assert (plan_slots(batch) == slots).all(), "same input, same plan"


def test_figure_11_samples_1_2_3_4_become_1_3_2_4() -> None:
    # Figure 6: samples 1 and 2 are large and both in the first DP group, 3 and 4 are small. Figure 11: 1, 3 | 2, 4.
    batch = batch_of(np.array([[3.0, 3.0, 1.0, 1.0], np.ones(4)]), {"encoder": 1, "llm": 1}, 2, 1)
    samples = np.array([1, 2, 3, 4])
    assert samples[np.argsort(plan_slots(batch)[0], kind="stable")].tolist() == [1, 3, 2, 4]


def test_figure_11_with_a_microbatch_a_sample_has_a_large_and_a_small_one_in_each_group() -> None:
    # Two microbatches in each group, as in figure 6. Alg. 3 opens each with its smaller one.
    batch = batch_of(np.array([[3.0, 3.0, 1.0, 1.0], np.ones(4)]), {"encoder": 1, "llm": 1}, 2, 2)
    samples = np.array([1, 2, 3, 4])
    assert samples[np.argsort(plan_slots(batch)[0])].tolist() == [3, 1, 4, 2]


def order_of(batch: Batch) -> list[int]:
    """Samples by slot, where every microbatch has one."""
    return np.argsort(plan_slots(batch)[0]).tolist()


def test_the_generator_counts_for_the_size_of_a_microbatch() -> None:
    ones = np.ones(4)
    batch = batch_of(np.array([ones, ones, [5.0, 2.0, 9.0, 4.0]]), {"encoder": 1, "llm": 1, "generator": 1}, 1, 4)
    assert order_of(batch) == [1, 2, 0, 3]  # smallest first; the two smallest of the rest last, in falling order


def test_encoder_and_generator_are_added_up() -> None:
    encoder, generator = [6.0, 1.0, 3.0, 5.0, 2.0], [1.0, 8.0, 3.0, 5.0, 9.0]  # 7, 9, 6, 10, 11
    batch = batch_of(np.array([encoder, np.ones(5), generator]), {"encoder": 1, "llm": 2, "generator": 1}, 1, 5)
    assert order_of(batch) == [2, 4, 3, 1, 0]


def test_the_time_in_the_llm_is_no_part_of_the_size_where_there_is_an_encoder() -> None:
    batch = batch_of(np.array([[3.0, 2.0, 1.0], [1.0, 5.0, 9.0]]), {"encoder": 1, "llm": 2}, 1, 3)
    assert order_of(batch) == [2, 0, 1]


def test_of_an_llm_alone_the_time_is_the_size() -> None:
    assert order_of(batch_of(np.array([[3.0, 1.0, 2.0, 4.0]]), {"llm": 3}, 1, 4)) == [1, 3, 0, 2]


ENCODERS = {"vision": 2, "audio": 2, "llm": 4}


def lognormal_costs(num_units: int, n: int) -> np.ndarray:
    return np.random.default_rng(5).lognormal(0, 1, (num_units, n))


@pytest.mark.parametrize("silent", ["vision", "audio"])
def test_of_two_encoders_the_slower_one_decides_the_order(silent: str) -> None:
    costs = lognormal_costs(3, 24)
    costs[list(ENCODERS).index(silent)] *= 0.1
    without = {unit: count for unit, count in ENCODERS.items() if unit != silent}
    alone = costs[[unit != silent for unit in ENCODERS]]
    assert order_of(batch_of(costs, ENCODERS, 1, 24)) == order_of(batch_of(alone, without, 1, 24))


def test_a_frozen_encoder_takes_only_its_forward() -> None:
    costs = lognormal_costs(3, 24)
    costs[0] *= 2 * costs[1].sum() / costs[0].sum()  # 2 against 1 there, 2 against 3 there and back
    trained, frozen = (order_of(batch_of(costs, ENCODERS, 1, 24, backward_factors=b)) for b in ({}, {"vision": 0.0}))
    assert trained == order_of(batch_of(costs[[0, 2]], {"vision": 2, "llm": 4}, 1, 24))
    assert frozen == order_of(batch_of(costs[[1, 2]], {"audio": 2, "llm": 4}, 1, 24))


def test_replicas_are_balanced_by_the_time_there_and_back() -> None:
    # The encoder is frozen: 4 + 3 * 1 = 7 seconds for sample 0, 1 + 3 * 2 = 7 for each of the others.
    batch = batch_of(np.array([[4.0, 1, 1, 1], [1, 2, 2, 2]]), {"encoder": 1, "llm": 1}, 2, 2, backward_factors={"encoder": 0.0})
    assert sorted((plan_slots(batch)[0] // 2).tolist()) == [0, 0, 1, 1]


@pytest.mark.parametrize("schedule", ["gpipe", "eager", "zero-bubble"])
def test_other_schedules_get_the_order_of_1f1b(schedule: str) -> None:
    costs, stages = lognormal_costs(2, 64), {"encoder": 3, "llm": 5}
    plain = plan_slots(batch_of(costs, stages, 2, 16))
    assert (plan_slots(batch_of(costs, stages, 2, 16, schedule=schedule)) == plain).all()


def test_interleaved_with_one_chunk_is_1f1b_and_with_more_it_is_not() -> None:
    costs, stages = lognormal_costs(2, 64), {"encoder": 3, "llm": 5}
    plain = plan_slots(batch_of(costs, stages, 2, 16))
    one, four = (plan_slots(batch_of(costs, stages, 2, 16, schedule="interleaved", chunks=chunks)) for chunks in (1, 4))
    assert (one == plain).all()
    assert (four != plain).any()
    assert (four // 16 == plain // 16).all(), "the replicas do not depend on the schedule"


def test_one_huge_sample_shares_its_replica_only_where_it_must() -> None:
    costs = np.array([[1.0, 1, 1000, 1, 1, 1]] * 2)
    slots = plan_slots(batch_of(costs, {"encoder": 1, "llm": 1}, 2, 2))[0]
    assert slots[2] == 0
    assert np.bincount(slots).tolist() == [1, 0, 2, 3]
