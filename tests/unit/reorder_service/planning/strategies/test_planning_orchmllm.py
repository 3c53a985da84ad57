"""Strategy `orchmllm`: every unit balanced for itself, sound for pipelines, and one all-to-all of what encoders computed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import StepPlan, Topology
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.search.node_permutation import Traffic
from headrace.reorder_service.planning.search.post_balancing import FORMS, post_balance
from headrace.reorder_service.planning.strategies.orchmllm import PostBalancing, arrival_ranks, compose, plan_slots

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
    return PostBalancing(
        forms={unit: draw(st.sampled_from(FORMS)) for unit in batch.units if draw(st.booleans())},
        tolerance=draw(st.sampled_from([0.001, 0.1])),
        ranks_per_node=draw(st.integers(0, 4)),
        arrival=draw(st.sampled_from(["round_robin", "contiguous"])),
    )


def heaviest_replicas(batch: Batch, slots: np.ndarray) -> np.ndarray:
    """(U,) load of the heaviest replica over the mean."""
    of_replica = batch.loads(slots).sum(axis=1)
    return of_replica.max(axis=0) / of_replica.mean(axis=0)


@settings(max_examples=150)
@given(st.data(), batches())
def test_every_plan_is_sound(data, batch: Batch) -> None:
    options = data.draw(options_for(batch))
    slots = plan_slots(batch, options)

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
    assert (slots == plan_slots(batch, options)).all()


@settings(max_examples=60)
@given(batches())
def test_one_batch_per_rank_has_the_loads_of_the_form(batch: Batch) -> None:
    single = batch_of(dict(zip(batch.units, batch.costs, strict=True)), batch.topology.replicas, 1)
    if single.sample_ids.size < single.topology.replicas:
        return
    for form in FORMS:
        slots = plan_slots(single, PostBalancing(forms=dict.fromkeys(single.units, form)))
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
    slots = plan_slots(batch, PostBalancing(forms={"audio": "padded"}))
    plain = plan_slots(batch)
    assert (slots[[0, 2]] == plain[[0, 2]]).all()

    def padded(slot: np.ndarray) -> float:
        return max((slot == r).sum() * batch.costs[1, slot == r].max() for r in range(8))

    assert padded(slots[1]) < 0.5 * padded(plain[1])


@pytest.mark.parametrize("arrival", ["round_robin", "contiguous"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_permuted_replicas_send_less_to_other_nodes_and_weigh_the_same(arrival, microbatches: int) -> None:
    batch = heavy_tailed(16, microbatches, 640)
    origin = arrival_ranks(640, 16, arrival)
    plain, permuted = plan_slots(batch), plan_slots(batch, PostBalancing(ranks_per_node=4, arrival=arrival))
    assert (plain[2] % microbatches == permuted[2] % microbatches).all()
    for u in range(3):
        before, after = (
            Traffic.of_samples(origin, slots[u] // microbatches, batch.costs[u], 16).leaving(np.arange(16) // 4, 4).max()
            for slots in (plain, permuted)
        )
        assert after < 0.95 * before
    assert heaviest_replicas(batch, permuted) == pytest.approx(heaviest_replicas(batch, plain), rel=0.02)


def test_samples_arrive_round_robin_or_contiguous() -> None:
    assert arrival_ranks(7, 3, "round_robin").tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert arrival_ranks(7, 3, "contiguous").tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert arrival_ranks(2, 3, "contiguous").tolist() == [0, 1]


@settings(max_examples=80)
@given(batches(), st.sampled_from(["round_robin", "contiguous"]))
def test_one_all_to_all_does_what_going_back_and_forth_does(batch: Batch, arrival) -> None:
    count = batch.topology.replicas
    slots = plan_slots(batch)
    replica = slots // batch.topology.microbatches
    origin = arrival_ranks(slots.shape[1], count, arrival)
    for u, unit in enumerate(batch.units):
        composed = compose(batch, slots, unit, arrival)
        matrix, moved, reset = np.zeros((count, count)), 0.0, 0.0
        for cost, encoder, sampled, llm in zip(
            batch.costs[u], replica[u], origin, replica[batch.units.index("llm")], strict=True
        ):
            matrix[encoder, llm] += cost
            moved += cost if encoder != llm else 0.0
            reset += (cost if encoder != sampled else 0.0) + (cost if sampled != llm else 0.0)
        found = np.zeros((count, count))
        found[composed.traffic.sender, composed.traffic.receiver] = composed.traffic.volume
        np.testing.assert_allclose(found, matrix, rtol=1e-12)
        assert composed.moved == pytest.approx(moved)
        assert composed.extra_if_reset == pytest.approx(reset - moved, abs=1e-6 * max(1.0, reset))
        assert composed.extra_if_reset >= -1e-9 * reset


def test_volumes_are_bytes_where_they_are_known() -> None:
    n = 12
    passed_on = {"vision": np.full(n, 100.0), "audio": np.zeros(n), "llm": np.zeros(n)}
    batch = heavy_tailed(3, 1, n, transfer_bytes=passed_on)
    slots = plan_slots(batch)
    moving = slots[0] != slots[2]
    assert compose(batch, slots, "vision").moved == 100 * moving.sum() > 0
    assert compose(batch, slots, "audio").moved == pytest.approx(batch.costs[1, slots[1] != slots[2]].sum())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"forms": {"llm": "fifth"}}, "forms are no_padding, padded, third, fourth, got {'llm': 'fifth'}"),
        ({"tolerance": 0.0}, "tolerance must be positive and ranks_per_node not negative, got 0.0 and 0"),
        ({"ranks_per_node": -1}, "got 0.01 and -1"),
        ({"arrival": "shuffled"}, "round_robin or contiguous, got 'shuffled'"),
    ],
)
def test_wrong_options_are_refused(wrong, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PostBalancing(**wrong)


def test_a_form_for_a_unit_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="units are vision, audio, llm, got forms for video"):
        plan_slots(heavy_tailed(2, 2, 10), PostBalancing(forms={"video": "padded"}))
