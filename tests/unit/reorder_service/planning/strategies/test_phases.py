"""Plans for ranks that meet after every phase: each phase as short as it can be, and little that crosses nodes."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import StepPlan, Topology
from headrace.reorder_service.planning import plan, warm_up
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.post_balancing_options import FORMS, PostBalancing
from headrace.reorder_service.planning.simulation.phase_step import phase_loads, predict_phases
from headrace.reorder_service.planning.strategies import arrival, llm_only, orchmllm
from headrace.reorder_service.planning.strategies.orchmllm import heaviest_between_nodes
from headrace.reorder_service.planning.strategies.phases import plan_slots
from tests.examples import with_examples

UNITS = ("vision", "audio", "llm", "generator")
SHAPES = {
    "random": lambda rng, n: rng.random(n),
    "heavy": lambda rng, n: rng.pareto(1.2, n),
    "zero": lambda rng, n: np.zeros(n),
    "one huge": lambda rng, n: np.where(np.arange(n) == rng.integers(n), 1e6, rng.random(n)),
    "ties": lambda rng, n: rng.integers(0, 3, n).astype(np.float64),
    "mostly absent": lambda rng, n: rng.random(n) * (rng.random(n) < 0.2),
}


def batch_of(
    costs: dict[str, np.ndarray], ranks: int, microbatches: int = 1, *, max_tokens: int | None = None, **options
) -> Batch:
    topology = Topology(replicas=ranks, microbatches=microbatches, stages=dict.fromkeys(costs, 1))
    execution = Execution(colocated="phases", max_tokens=max_tokens, post_balancing=PostBalancing(**options))
    tokens = np.ceil(costs["llm"]).astype(np.int64)
    return make_batch(np.arange(tokens.size), costs, topology, 0, execution=execution, tokens=tokens)


def omni(ranks: int, per_rank: int, microbatches: int = 1, seed: int = 0, **options) -> Batch:
    """Pictures, recordings and texts, each with an LLM that sees all of them."""
    rng = np.random.default_rng(seed)
    n = ranks * microbatches * per_rank
    kind = rng.choice(3, n, p=[0.5, 0.3, 0.2])
    vision = np.where(kind == 0, rng.uniform(256, 1024, n), 0.0)
    audio = np.where(kind == 1, rng.uniform(50, 1500, n), 0.0)
    llm = vision + audio / 2 + rng.lognormal(5, 0.7, n)
    return batch_of({"vision": vision, "audio": audio, "llm": llm}, ranks, microbatches, **options)


@st.composite
def batches(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, 50))
    units = [unit for unit in UNITS if unit == "llm" or draw(st.booleans())]
    costs = {unit: SHAPES[draw(st.sampled_from(sorted(SHAPES)))](rng, n) for unit in units}
    return batch_of(
        costs,
        draw(st.integers(1, 7)),
        draw(st.integers(1, 4)),
        forms={unit: draw(st.sampled_from(FORMS)) for unit in units if draw(st.booleans())},
        quadratic=draw(st.sampled_from([0.0, 0.5])),
        ranks_per_node=draw(st.integers(0, 4)),
    )


@with_examples(70)
@given(batches())
def test_every_plan_is_sound(batch: Batch) -> None:
    slots = plan_slots(batch)
    count = batch.topology.microbatches
    assert slots.shape == batch.costs.shape
    assert ((slots >= 0) & (slots < batch.num_slots)).all()
    assert (slots % count == slots[0] % count).all(), "a sample has one microbatch"
    StepPlan(strategy="orchmllm", seed=0, topology=batch.topology, replicas=batch.replicas(slots)).check()
    occupied = batch.occupied(slots)
    assert (occupied[:, :-1] >= occupied[:, 1:]).all(), "empty microbatches come last"
    of_llm = slots[batch.units.index("llm")]
    for slot, costs in zip(slots, batch.costs, strict=True):
        assert (slot == of_llm)[costs == 0].all(), "a sample of which a unit has nothing to do stays where it is"
    assert (slots == plan_slots(batch)).all()
    predicted = predict_phases(batch, slots)
    assert 0 <= predicted.lower_bound_s <= predicted.iteration_s
    assert 0 <= predicted.bubble <= 1


@with_examples(40)
@given(batches())
def test_the_step_is_the_sum_over_phases_of_the_slowest_rank(batch: Batch) -> None:
    slots, options = plan_slots(batch), batch.execution.post_balancing
    step = 0.0
    for u, unit in enumerate(batch.units):
        form, factor, costs = options.forms.get(unit, "no_padding"), batch.step_factors[u], batch.costs[u]
        mean = costs[costs > 0].mean() if costs.any() and options.quadratic else 1.0
        quadratic = options.quadratic if form in ("third", "fourth") else 0.0
        alone = (costs / mean + quadratic * (costs / mean) ** 2).sum()
        for k in range(batch.topology.microbatches):
            took = [0.0]
            for r in range(batch.topology.replicas):
                lengths = costs[(slots[u] == r * batch.topology.microbatches + k) & (costs > 0)] / mean
                if lengths.size:
                    longest = lengths.max()
                    took.append(
                        {
                            "no_padding": lengths.sum(),
                            "padded": lengths.size * longest,
                            "third": lengths.sum() + quadratic * (lengths**2).sum(),
                            "fourth": lengths.sum() + quadratic * lengths.size * longest**2,
                        }[form]
                    )
            step += factor * max(took) * (costs.sum() / alone if alone else 0.0)
    assert predict_phases(batch, slots).iteration_s == pytest.approx(step, rel=1e-9, abs=1e-12)


@with_examples(40)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([(2, 0), (3, 0), (3, 2), (2, 2)]))
def test_beside_the_best_of_all_plans(seed: int, n: int, shape: tuple[int, int]) -> None:
    """Phases are apart, so that the best of all plans has the best of all places in every unit."""
    ranks, ranks_per_node = shape
    rng = np.random.default_rng(seed)
    costs = {unit: np.ceil(20 * rng.random(n)) * (rng.random(n) < 0.8) for unit in ("vision", "audio")}
    batch = batch_of(costs | {"llm": np.ceil(20 * rng.random(n))}, ranks, ranks_per_node=ranks_per_node)
    every = np.array(list(itertools.product(range(ranks), repeat=n)))
    best = 0.0
    for of_unit in batch.costs:
        loads = np.stack([((every == r) * of_unit).sum(axis=1) for r in range(ranks)])
        best += 3.0 * float(loads.max(axis=0).min())
    assert predict_phases(batch, plan_slots(batch)).iteration_s <= best * (7 / 6 + 2e-3)


@pytest.mark.parametrize("ranks_per_node", [0, 8])
@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), [(128, 60, 1), (64, 25, 1), (16, 30, 3)])
def test_no_phase_waits_a_hundredth(ranks: int, per_rank: int, microbatches: int, ranks_per_node: int) -> None:
    for seed in range(2):
        batch = omni(ranks, per_rank, microbatches, seed, ranks_per_node=ranks_per_node)
        predicted = predict_phases(batch, plan_slots(batch))
        assert predicted.iteration_s <= 1.01 * predicted.lower_bound_s
        for other in (arrival.plan_slots, llm_only.plan_slots):
            assert predicted.iteration_s < predict_phases(batch, other(batch)).iteration_s


def test_a_padded_unit_has_samples_of_like_length_together() -> None:
    batch = omni(64, 40, forms={"audio": "padded"}, ranks_per_node=8)
    padded = phase_loads(batch, plan_slots(batch))[:, 0, 1]
    work = batch.costs[1].sum() * batch.step_factors[1]
    assert work < padded.sum(), "padding costs something"
    assert padded.max() <= 1.15 * work / 64, "but not much"
    arrived = phase_loads(batch, arrival.plan_slots(batch))[:, 0, 1]
    assert arrived.max() >= 2 * padded.max()


@pytest.mark.parametrize("forms", [{}, {"audio": "padded"}, {"audio": "padded", "vision": "padded"}])
def test_little_crosses_nodes(forms) -> None:
    """Beside batches that are balanced without regard to nodes. Of two padded units, the LLM can be near one."""
    batch = omni(64, 60, forms=forms, ranks_per_node=8)
    as_pipeline = Execution(post_balancing=PostBalancing(forms=forms))
    costs = dict(zip(batch.units, batch.costs, strict=True))
    anywhere = orchmllm.plan_slots(make_batch(batch.sample_ids, costs, batch.topology, 0, execution=as_pipeline))
    before, after = heaviest_between_nodes(batch, anywhere), heaviest_between_nodes(batch, plan_slots(batch))
    shares = sorted(after[unit] / before[unit] for unit in before)
    assert shares[0] <= 0.15
    assert shares[1] <= (0.95 if len(forms) == 2 else 0.25)


def test_samples_stay_on_their_rank_where_nodes_are_unknown() -> None:
    batch = omni(16, 40)
    slots = plan_slots(batch)
    moved = (slots != slots[2]) & (batch.costs > 0)
    assert (moved * batch.costs).sum() <= 0.5 * batch.costs[:2].sum(), "where nearly all would move"


def test_no_microbatch_of_the_llm_has_too_many_tokens() -> None:
    batch = omni(16, 20, 2)
    assert batch.tokens is not None
    limit = int(batch.tokens.sum() * 1.05 / 32)
    costs = dict(zip(batch.units, batch.costs, strict=True))
    limited = batch_of(costs, 16, 2, max_tokens=limit, forms={"audio": "padded"}, ranks_per_node=4)
    assert np.bincount(plan_slots(limited)[2], weights=batch.tokens).max() <= limit
    with pytest.raises(ValueError, match="raise max_tokens"):
        plan_slots(batch_of(costs, 16, 2, max_tokens=int(batch.tokens.max()) - 1))


def test_auto_is_this_for_such_ranks_and_the_fastest_of_all() -> None:
    batch = omni(8, 20, 2)
    costs = dict(zip(batch.units, batch.costs, strict=True))
    made = {
        name: plan(name, batch.sample_ids, costs, batch.topology, 0, execution=batch.execution)
        for name in ("auto", "orchmllm", "random", "llm-only", "disttrain", "entrain", "joint", "taper")
    }
    assert made["auto"].chosen == "orchmllm"
    seconds = {name: one.predicted.iteration_s for name, one in made.items() if one.predicted}
    assert seconds["auto"] == min(seconds.values())
    assert seconds["auto"] == seconds["orchmllm"]


def test_after_warm_up_planning_compiles_nothing() -> None:
    warm_up()
    modules = [value for name, value in sys.modules.items() if name.startswith("headrace.reorder_service.planning.")]
    kernels = {value for module in modules for value in vars(module).values() if hasattr(value, "signatures")}
    compiled = {kernel: list(kernel.signatures) for kernel in kernels}
    for count, ranks_per_node, form in itertools.product((1, 3), (0, 2), FORMS):
        plan_slots(omni(5, 8, count, forms={"audio": form, "vision": "padded"}, ranks_per_node=ranks_per_node))
        plan_slots(omni(5, 8, count, forms={"llm": form}, quadratic=0.5, ranks_per_node=ranks_per_node))
    assert {kernel: list(kernel.signatures) for kernel in kernels} == compiled
