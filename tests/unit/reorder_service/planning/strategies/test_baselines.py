"""Baselines: what Megatron-LM, a division by proportions, DIP, FSDP and balancing by the LLM alone would make of a batch."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.plan import BASELINE_STRATEGIES, GENERATOR, LLM, Topology
from headrace.reorder_service.planning import STRATEGIES, plan
from headrace.reorder_service.planning.batch import Batch, Floats, Ints, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.chained_step import (
    chained_step_s,
    encoders_first_actions,
    interleaved_actions,
)
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.simulation.work import Work
from headrace.reorder_service.planning.strategies import arrival, llm_only
from headrace.reorder_service.planning.strategies.baselines import BASELINES
from headrace.schedule import Kind
from headrace.spec import parse_spec
from tests.examples import with_examples


def batch_of(
    costs: dict[str, Floats],
    stages: dict[str, int],
    *,
    replicas: int = 2,
    microbatches: int = 4,
    execution: Execution | None = None,
) -> Batch:
    size = len(next(iter(costs.values())))
    topology = Topology(replicas=replicas, microbatches=microbatches, stages=stages)
    return make_batch(np.arange(size), costs, topology, 0, execution=execution)


def equal_batch(encoder: float, llm: float, *, samples: int = 8, stages: dict[str, int] | None = None) -> Batch:
    """One sample in each of 2 x 4 microbatches, all alike."""
    return batch_of({"encoder": np.full(samples, encoder), LLM: np.full(samples, llm)}, stages or {"encoder": 2, LLM: 2})


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    size = draw(st.integers(1, 24))
    numbers = st.lists(st.integers(0, 20).map(float), min_size=size, max_size=size)
    costs = {"encoder": np.array(draw(numbers)), LLM: np.array(draw(numbers))}
    stages = {"encoder": draw(st.integers(1, 3)), LLM: draw(st.integers(1, 3))}
    return batch_of(costs, stages, replicas=draw(st.integers(1, 3)), microbatches=draw(st.integers(1, 5)))


def slow_step_s(seconds: Floats, actions: Ints) -> float:
    """The twin of `chained_step_s`: the longest path to the last action, found by following what each waits for."""
    _, _, _, stages, chunks = seconds.shape
    before = {}
    for s in range(stages):
        for earlier, later in itertools.pairwise([None, *map(tuple, actions[s].tolist())]):
            before[s, later] = earlier

    @functools.cache
    def end(r: int, s: int, action: tuple[int, int, int]) -> float:
        kind, c, m = action
        if kind == Kind.FORWARD:
            needed = [(s - 1, (kind, c, m))] if s else [(stages - 1, (kind, c - 1, m))] if c else []
        elif s < stages - 1:
            needed = [(s + 1, (kind, c, m))]
        else:
            needed = [(0, (kind, c + 1, m))] if c < chunks - 1 else [(s, (int(Kind.FORWARD), c, m))]
        if before[s, action] is not None:
            needed.append((s, before[s, action]))
        return max((end(r, *one) for one in needed), default=0.0) + float(seconds[kind, r, m, s, c])

    return max(end(r, s, tuple(actions[s, -1].tolist())) for r in range(seconds.shape[1]) for s in range(stages))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.integers(0, 2**16))
def test_the_kernel_takes_the_longest_path(replicas: int, count: int, chunks: int, stages: int, seed: int) -> None:
    seconds = np.random.default_rng(seed).uniform(0.0, 1.0, (2, replicas, count, stages, chunks))
    orders = [interleaved_actions(stages, count, chunks)]
    if chunks == 2:
        orders.append(encoders_first_actions(stages, count))
    for actions in orders:
        assert chained_step_s(seconds, actions) == pytest.approx(slow_step_s(seconds, actions))


@given(batches(), st.integers(1, 2))
def test_a_pipeline_of_one_unit_is_the_simulators(batch: Batch, chunks: int) -> None:
    stages = batch.topology.num_stages
    execution = Execution(schedule="interleaved", chunks=chunks) if chunks > 1 else Execution()
    one = batch_of(
        {LLM: batch.costs.sum(axis=0)},
        {LLM: stages},
        replicas=batch.topology.replicas,
        microbatches=batch.topology.microbatches,
        execution=execution,
    )
    assume(one.sample_ids.size >= one.num_slots)  # the simulator leaves empty microbatches out of its order
    slots = arrival.plan_slots(one)
    loads = one.loads(slots)[:, :, 0] / (stages * chunks)
    seconds = np.stack([loads, 2.0 * loads])[:, :, :, None, None] * np.ones((stages, chunks))
    actions = interleaved_actions(stages, one.topology.microbatches, chunks)
    assert chained_step_s(seconds, actions) == pytest.approx(simulate(Work.of(one, slots)).iteration_s)


@with_examples(40)
@given(batches())
def test_no_baseline_beats_the_even_share_of_all_gpus(batch: Batch) -> None:
    gpus = batch.topology.replicas * batch.topology.num_stages
    even = float((batch.costs * batch.step_factors[:, None]).sum()) / gpus
    again = float(batch.costs[0].sum() * batch.step_factors[0]) * (batch.topology.num_stages - 1) / gpus
    for name, baseline in BASELINES.items():
        step = baseline(batch)
        work = even + again * (name == "encoders-replicated")
        assert step.iteration_s >= work * (1 - 1e-9), name
        assert 0 <= step.bubble < 1 or step.iteration_s == 0, name
        assert step.iteration_s * (1 - step.bubble) == pytest.approx(work, rel=1e-6, abs=1e-9), name


def test_megatron_has_one_stage_of_the_encoder() -> None:
    """Of 4 stages the encoder's takes 8 x 3, and the LLM's three 2 x 3 each: they are done whenever the encoder is."""
    batch = equal_batch(8.0, 6.0)
    assert BASELINES["megatron"](batch).iteration_s == pytest.approx(4 * 24)


def test_ratio_divides_stages_by_work() -> None:
    """The encoder has three quarters of the work, and so three of four stages, each as long as the LLM's one."""
    batch = equal_batch(6.0, 2.0)
    assert BASELINES["ratio"](batch).iteration_s == pytest.approx((4 + 3) * 2.0 * 3)


def test_megatron_balanced_cuts_through_units() -> None:
    """5:3 does not divide 4 stages, but 8 virtual stages of 1: a quarter of filling and draining is half of that of 1F1B."""
    batch = equal_batch(5.0, 3.0)
    assert BASELINES["megatron-balanced"](batch).iteration_s == pytest.approx((4 + 3 / 2) * 2.0 * 3)


def test_dip_runs_encoders_first_and_last() -> None:
    """Four stages with 2 and 1 of the units each: encoders fill with 3 x 2 and drain with 3 x 4, the LLM between in 1F1B."""
    batch = equal_batch(8.0, 4.0)
    dip = BASELINES["dip"](batch).iteration_s
    busy = 4 * (2.0 + 1.0) * 3
    assert busy < dip <= busy + 3 * 2.0 + 3 * 1.0 + 3 * 2.0 + 3 * 4.0


def test_replicated_encoders_are_computed_in_every_stage() -> None:
    """In 1F1B, each of four stages takes the whole encoder and a quarter of the LLM, each of two likewise and a half."""
    for stages, of_llm in (({"encoder": 2, LLM: 2}, 1.0), ({"encoder": 1, LLM: 1}, 2.0)):
        batch = equal_batch(8.0, 4.0, stages=stages)
        fills = sum(stages.values()) - 1
        assert BASELINES["encoders-replicated"](batch).iteration_s == pytest.approx((4 + fills) * (8.0 + of_llm) * 3)


def test_fsdp_waits_for_the_heaviest_rank() -> None:
    """8 GPUs, a sample each, the heaviest of which takes 2 x 3."""
    costs = {"encoder": np.zeros(8), LLM: np.array([1.0] * 7 + [2.0])}
    assert BASELINES["fsdp"](batch_of(costs, {"encoder": 2, LLM: 2})).iteration_s == pytest.approx(6.0)


def test_fsdp_with_orchmllm_waits_for_no_unit() -> None:
    """8 GPUs and 16 samples, half of which have the encoder's work and half the LLM's: each has one of either."""
    half = np.repeat([1.0, 0.0], 8)
    batch = batch_of({"encoder": half, LLM: 2.0 * half[::-1]}, {"encoder": 2, LLM: 2})
    balanced = BASELINES["fsdp-orchmllm"](batch)
    assert balanced.iteration_s == pytest.approx((1 + 2) * 3)
    assert balanced.bubble == pytest.approx(0.0, abs=1e-9)


def test_llm_only_levels_the_llm_and_not_the_encoder() -> None:
    rng = np.random.default_rng(3)
    batch = batch_of({"encoder": rng.lognormal(0, 1, 64), LLM: rng.lognormal(0, 1, 64)}, {"encoder": 1, LLM: 1})
    encoder, llm = (batch.loads(llm_only.plan_slots(batch))[:, :, u] for u in range(2))
    assert llm.std() / llm.mean() < 0.05
    assert encoder.std() / encoder.mean() > 0.2


@with_examples(40)
@given(batches())
def test_llm_only_is_a_plan_whose_empty_microbatches_are_last(batch: Batch) -> None:
    costs = dict(zip(batch.units, batch.costs, strict=True))
    made = plan("llm-only", batch.sample_ids, costs, batch.topology, 0)
    made.check()
    slots = llm_only.plan_slots(batch)
    assert (slots == slots[0]).all()
    occupied = batch.occupied(slots)
    assert not (occupied[:, 1:] > occupied[:, :-1]).any()


def test_a_job_may_name_a_baseline_strategy_and_auto_does_not_consider_it() -> None:
    assert not set(BASELINE_STRATEGIES) & set(STRATEGIES)
    for strategy in BASELINE_STRATEGIES:
        spec = parse_spec({"name": "demo", "sources": [{"path": "/data"}], "global_batch": 8, "strategy": strategy})
        assert spec.strategy == strategy
    with pytest.raises(ValueError, match=r"there are random, .*llm-only"):
        plan("no-such", np.arange(1), {LLM: np.ones(1)}, Topology(replicas=1, microbatches=1, stages={LLM: 1}), 0)


@pytest.mark.parametrize(
    ("name", "stages", "words"),
    [
        ("megatron-balanced", {"vision": 1, "audio": 1, LLM: 1}, "no row of layers"),
        ("dip", {"encoder": 1, LLM: 1, GENERATOR: 1}, "nothing is published"),
        ("encoders-replicated", {"encoder": 1, LLM: 1, GENERATOR: 1}, "nothing is published"),
    ],
)
def test_what_a_baseline_has_no_place_for_is_refused(name: str, stages: dict[str, int], words: str) -> None:
    batch = batch_of(dict.fromkeys(stages, np.ones(4)), stages)
    with pytest.raises(ValueError, match=words):
        BASELINES[name](batch)
