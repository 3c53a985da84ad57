"""Strategy `orchmllm`: every unit balanced for itself, sound for pipelines, and one all-to-all of what encoders computed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import StepPlan, Topology
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.post_balancing_options import FORMS, PostBalancing
from headrace.reorder_service.planning.search.post_balancing import post_balance
from headrace.reorder_service.planning.strategies.orchmllm import heaviest_between_nodes, plan_slots, sent_to_llm
from tests.examples import with_examples

COSTS = Path(__file__).parents[4] / "data" / "costs"
SHAPES = {
    "random": lambda rng, n: rng.random(n),
    "heavy": lambda rng, n: rng.pareto(1.2, n),
    "constant": lambda rng, n: np.full(n, 2.0),
    "zero": lambda rng, n: np.zeros(n),
    "one huge": lambda rng, n: np.where(np.arange(n) == rng.integers(n), 1e9, rng.random(n)),
    "ties": lambda rng, n: rng.integers(0, 3, n).astype(np.float64),
    "mostly absent": lambda rng, n: rng.random(n) * (rng.random(n) < 0.2),
}
UNITS = ("vision", "audio", "video", "llm", "generator")


def batch_of(costs: dict[str, np.ndarray], replicas: int, microbatches: int, **more) -> Batch:
    topology = Topology(replicas=replicas, microbatches=microbatches, stages=dict.fromkeys(costs, 1))
    return make_batch(np.arange(next(iter(costs.values())).size), costs, topology, seed=0, **more)


@st.composite
def batches(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, 60))
    units = [unit for unit in UNITS if unit == "llm" or draw(st.booleans())]
    costs = {unit: SHAPES[draw(st.sampled_from(sorted(SHAPES)))](rng, n) for unit in units}
    return batch_of(costs, draw(st.integers(1, 7)), draw(st.integers(1, 7)))


@st.composite
def options_for(draw, batch: Batch):
    return {
        "forms": {unit: draw(st.sampled_from(FORMS)) for unit in batch.units if draw(st.booleans())},
        "quadratic": draw(st.sampled_from([0.0, 0.01, 3.0])),
        "tolerance": draw(st.sampled_from([0.001, 0.1])),
        "ranks_per_node": draw(st.integers(0, 4)),
    }


def optioned(batch: Batch, **options) -> Batch:
    return replace(batch, execution=Execution(post_balancing=PostBalancing(**options)))


def plan_with(batch: Batch, **options) -> np.ndarray:
    return plan_slots(optioned(batch, **options))


def heaviest_replicas(batch: Batch, slots: np.ndarray) -> np.ndarray:
    """(U,) load of the heaviest replica over the mean."""
    of_replica = batch.loads(slots).sum(axis=1)
    return of_replica.max(axis=0) / of_replica.mean(axis=0)


@with_examples(150)
@given(st.data(), batches())
def test_every_plan_is_sound(data, batch: Batch) -> None:
    batch = optioned(batch, **data.draw(options_for(batch)))
    slots = plan_slots(batch)

    assert slots.shape == batch.costs.shape
    assert slots.dtype == np.int64
    assert slots.min() >= 0
    assert slots.max() < batch.num_slots
    StepPlan(strategy="orchmllm", seed=0, topology=batch.topology, replicas=batch.replicas(slots)).check()
    assert (slots % batch.topology.microbatches == slots[0] % batch.topology.microbatches).all(), "nothing is deferred"
    occupied = batch.occupied(slots)
    assert (occupied[:, :-1] >= occupied[:, 1:]).all(), "empty microbatches come last"
    if slots.shape[1] >= batch.topology.replicas:
        assert occupied[:, 0].all(), "no replica stays idle while there are samples enough"
    assert (slots == plan_slots(batch)).all()


@with_examples(60)
@given(batches())
def test_one_batch_per_rank_has_the_loads_of_the_form(batch: Batch) -> None:
    single = batch_of(dict(zip(batch.units, batch.costs, strict=True)), batch.topology.replicas, 1)
    if single.sample_ids.size < single.topology.replicas:
        return
    for form in FORMS:
        slots = plan_with(single, forms=dict.fromkeys(single.units, form))
        for slot, costs in zip(slots, single.costs, strict=True):
            bins = post_balance(form, costs, single.topology.replicas)
            loads, expected = (np.bincount(of, weights=costs, minlength=single.topology.replicas) for of in (slot, bins))
            assert sorted(loads) == sorted(expected)


def heavy_tailed(replicas: int, microbatches: int, n: int, seed: int = 0, **more) -> Batch:
    rng = np.random.default_rng(seed)
    costs = {
        "vision": rng.lognormal(0, 1, n),
        "audio": rng.lognormal(0, 1, n) * (rng.random(n) < 0.5),
        "llm": rng.lognormal(0, 0.7, n),
    }
    return batch_of(costs, replicas, microbatches, **more)


@pytest.mark.parametrize(
    ("replicas", "microbatches", "n", "limit"), [(8, 1, 512, 1.002), (4, 16, 512, 1.05), (16, 8, 2000, 1.08)]
)
@pytest.mark.parametrize("seed", range(3))
def test_replicas_are_balanced_in_every_unit(replicas: int, microbatches: int, n: int, limit: float, seed: int) -> None:
    batch = heavy_tailed(replicas, microbatches, n, seed)
    assert heaviest_replicas(batch, plan_slots(batch)).max() < limit
    one_for_all = np.tile(plan_slots(batch)[-1], (3, 1))
    assert heaviest_replicas(batch, one_for_all).max() > 1.1, "which the same replica in all units does not give"


def test_a_sample_that_outweighs_a_replica_has_it_almost_alone() -> None:
    batch = heavy_tailed(8, 4, 400)
    huge = batch.costs[0].sum()  # eight times the mean of a replica
    batch.costs[0, 123] = huge
    slots = plan_slots(batch)
    alone = slots[0] // 4 == slots[0, 123] // 4
    assert batch.costs[0, alone].sum() < 1.001 * huge


def test_microbatches_of_a_replica_are_balanced_in_the_llm() -> None:
    batch = heavy_tailed(4, 8, 512)
    load = batch.loads(plan_slots(batch))[:, :, -1]
    assert load.max() < 1.05 * load.mean()


def test_the_form_is_chosen_per_unit() -> None:
    batch = heavy_tailed(8, 1, 400)
    slots = plan_with(batch, forms={"audio": "padded"})
    plain = plan_slots(batch)
    assert (slots[[0, 2]] == plain[[0, 2]]).all()

    def padded(slot: np.ndarray) -> float:
        return max((slot == r).sum() * batch.costs[1, slot == r].max() for r in range(8))

    assert padded(slots[1]) < 0.5 * padded(plain[1])


def heaviest_sent(batch: Batch, slots: np.ndarray, unit: int, ranks_per_node: int) -> float:
    """The most that one rank sends to the LLM's ranks on other nodes, sample by sample."""
    replica = slots // batch.topology.microbatches
    sent = np.zeros(batch.topology.replicas)
    for cost, sender, receiver in zip(batch.costs[unit], replica[unit], replica[batch.units.index("llm")], strict=True):
        sent[sender] += cost if sender // ranks_per_node != receiver // ranks_per_node else 0.0
    return float(sent.max())


@pytest.mark.parametrize("microbatches", [1, 4])
def test_permuted_replicas_send_less_to_other_nodes_and_weigh_the_same(microbatches: int) -> None:
    batch = heavy_tailed(16, microbatches, 640)
    plain, permuted = plan_slots(batch), plan_with(batch, ranks_per_node=4)
    assert (plain % microbatches == permuted % microbatches).all(), "no sample changes its microbatch"
    for u in range(2):
        assert heaviest_sent(batch, permuted, u, 4) < 0.9 * heaviest_sent(batch, plain, u, 4)
    for before, after in zip(batch.loads(plain).sum(axis=1).T, batch.loads(permuted).sum(axis=1).T, strict=True):
        assert sorted(after) == pytest.approx(sorted(before))


@with_examples(100)
@given(batches(), st.integers(1, 4))
def test_a_permutation_never_makes_a_rank_send_more_to_other_nodes(batch: Batch, ranks_per_node: int) -> None:
    plain, permuted = plan_slots(batch), plan_with(batch, ranks_per_node=ranks_per_node)
    for u in range(len(batch.units) - 1 if batch.units[-1] == "llm" else len(batch.units)):
        assert heaviest_sent(batch, permuted, u, ranks_per_node) <= heaviest_sent(batch, plain, u, ranks_per_node) * (1 + 1e-12)


def test_what_encoders_send_to_the_llm_falls_by_a_fifth_on_the_omni_table() -> None:
    table = pq.read_table(COSTS / "omni_2048.parquet")
    batch = batch_of({unit: table[f"cost_{unit}"].to_numpy() for unit in ("vision", "audio", "llm")}, 64, 1)
    plain, permuted = plan_slots(batch), plan_with(batch, ranks_per_node=8)
    for u, before in enumerate((11.566, 0.933)):
        assert heaviest_sent(batch, plain, u, 8) == pytest.approx(before, abs=1e-3)
        assert heaviest_sent(batch, permuted, u, 8) < 0.8 * before
    with_nodes = optioned(batch, ranks_per_node=8)
    assert heaviest_between_nodes(with_nodes, permuted) == pytest.approx(
        {"vision": heaviest_sent(batch, permuted, 0, 8), "audio": heaviest_sent(batch, permuted, 1, 8)}
    )
    with pytest.raises(ValueError, match="a node has at least one rank, got 0"):
        heaviest_between_nodes(batch, plain)


@with_examples(80)
@given(batches())
def test_one_all_to_all_moves_what_a_unit_makes_of_samples_to_the_llms_replicas(batch: Batch) -> None:
    count = batch.topology.replicas
    slots = plan_slots(batch)
    replica = slots // batch.topology.microbatches
    matrix = np.zeros((count, count))
    for u in range(len(batch.units)):
        for cost, sender, receiver in zip(batch.costs[u], replica[u], replica[batch.units.index("llm")], strict=True):
            matrix[sender, receiver] += cost
    traffic = sent_to_llm(batch, slots, range(len(batch.units)))
    found = np.zeros((count, count))
    found[traffic.sender, traffic.receiver] = traffic.volume
    np.testing.assert_allclose(found, matrix, rtol=1e-12)


def test_volumes_are_bytes_where_they_are_known() -> None:
    n = 12
    passed_on = {"vision": np.full(n, 100.0), "audio": np.zeros(n), "llm": np.zeros(n)}
    batch = heavy_tailed(3, 1, n, transfer_bytes=passed_on)
    slots = plan_slots(batch)
    assert sent_to_llm(batch, slots, [0]).volume.sum() == 100 * n
    assert sent_to_llm(batch, slots, [1]).volume.sum() == pytest.approx(batch.costs[1].sum())


def padded_attention(batch: Batch, slots: np.ndarray, unit: int, quadratic: float) -> float:
    """The heaviest replica's load in the fourth form, in samples of mean cost."""
    lengths = batch.costs[unit] / batch.costs[unit][batch.costs[unit] > 0].mean()
    of_replica = (lengths[slots[unit] == r] for r in range(batch.num_slots))
    return max(own.sum() + quadratic * own.size * own.max() ** 2 for own in of_replica)


def test_lambda_decides_between_the_algorithms_of_a_form() -> None:
    batch = heavy_tailed(8, 1, 400)
    forms = {"audio": "fourth", "vision": "third"}
    by_lambda = {quadratic: plan_with(batch, forms=forms, quadratic=quadratic) for quadratic in (0.0, 1e-4, 10.0)}
    lpt, listings = plan_slots(batch), by_lambda[0.0]
    for quadratic, worse in ((1e-4, listings), (10.0, lpt)):  # short padding costs less than unequal sums, long padding more
        reached = padded_attention(batch, by_lambda[quadratic], 1, quadratic)
        assert reached < 0.9 * padded_attention(batch, worse, 1, quadratic)

    vision = batch.costs[0] / batch.costs[0].mean()
    squares = vision + 10.0 * vision**2

    def heaviest(slots: np.ndarray) -> float:
        return float(np.bincount(slots[0], weights=squares).max())

    assert heaviest(by_lambda[10.0]) < min(heaviest(listings), heaviest(lpt))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"forms": {"llm": "fifth"}}, "forms are no_padding, padded, third, fourth, got {'llm': 'fifth'}"),
        ({"tolerance": 0.0}, "tolerance must be finite and positive, got 0.0"),
        ({"quadratic": -1.0}, "lambda must be finite and not negative, got -1.0"),
        ({"quadratic": float("nan")}, "lambda must be finite and not negative, got nan"),
        ({"ranks_per_node": -1}, "ranks per node must not be negative, got -1; 0 permutes nothing"),
    ],
)
def test_wrong_options_are_refused(wrong, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PostBalancing(**wrong)


def test_a_form_for_a_unit_that_is_not_there_is_refused() -> None:
    execution = Execution(post_balancing=PostBalancing(forms={"video": "padded"}))
    with pytest.raises(ValueError, match=r"post-balancing forms name no unit of \['vision', 'audio', 'llm'\]: \['video'\]"):
        heavy_tailed(2, 2, 10, execution=execution)
