"""Headrace's own strategies: `joint`, `taper` and `auto`."""

import numpy as np
import pytest

from headrace.plan import Topology
from headrace.reorder_service.planning import STRATEGIES, plan
from headrace.reorder_service.planning.batch import Batch, make_batch
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.simulator import peak_memory, simulate
from headrace.reorder_service.planning.simulation.work import Work
from headrace.reorder_service.planning.strategies import CANDIDATES, taper
from headrace.reorder_service.planning.strategies.auto import fastest
from headrace.reorder_service.planning.strategies.joint import defer, plan_slots

STAGES = {"encoder": 3, "llm": 5}


def batch_of(n: int = 512, spread: float = 0.5, replicas: int = 4, microbatches: int = 16, **execution) -> Batch:
    rng = np.random.default_rng(11)
    drawn = {unit: rng.lognormal(0, spread, n) for unit in STAGES}
    costs = {unit: column * (STAGES[unit] / column.sum()) for unit, column in drawn.items()}  # stages have equal work
    topology = Topology(replicas=replicas, microbatches=microbatches, stages=STAGES)
    return make_batch(np.arange(n), costs, topology, 0, execution=Execution(**execution))


def seconds(batch: Batch, slots: np.ndarray) -> float:
    return simulate(Work.of(batch, slots)).iteration_s


def test_joint_comes_within_five_per_cent_of_equal_microbatches() -> None:
    batch = batch_of()
    predicted = simulate(Work.of(batch, plan_slots(batch)))
    assert predicted.iteration_s <= 1.05 * (1 + (8 - 1) / 16) * predicted.lower_bound_s


def test_taper_takes_away_a_third_of_the_idle_time_of_equal_microbatches() -> None:
    batch = batch_of(microbatches=32)
    equal, tapered = (simulate(Work.of(batch, strategy(batch))) for strategy in (plan_slots, taper.plan_slots))
    assert tapered.iteration_s - tapered.lower_bound_s < 0.7 * (equal.iteration_s - equal.lower_bound_s)
    loads = batch.loads(taper.plan_slots(batch)).sum(axis=2)
    assert (loads[:, 0] < 0.7 * loads.mean(axis=1)).all(), "the first microbatch is light"
    assert (loads[:, -1] < 0.9 * loads.mean(axis=1)).all(), "and so is the last"


def test_llm_work_is_deferred_to_a_lighter_next_microbatch() -> None:
    costs = np.array([1.0, 3.0, 1.0, 0.5, 0.0])
    slot = np.array([0, 0, 1, 2, 0])
    moved = defer(costs, slot, np.array([3, 0]), 3)
    # 4 | 1 | 0.5: the sample of 1 moves on; then 3 | 2 | 0.5, and the second microbatch's sample of 1 moves on
    assert moved.tolist() == [1, 0, 2, 2, 0]


def test_joint_defers_where_that_shortens_the_step() -> None:
    topology = Topology(replicas=1, microbatches=3, stages={"encoder": 1, "llm": 1})
    costs = {"encoder": np.array([8.0, 7, 7, 7, 1]), "llm": np.array([7.0, 8, 3, 2, 1])}
    batch = make_batch(np.arange(5), costs, topology, 0)
    slots = plan_slots(batch)
    assert (slots[1] > slots[0]).any()
    assert seconds(batch, slots) < seconds(batch, np.broadcast_to(slots[0], slots.shape))


def test_joint_does_not_defer_what_the_schedule_cannot_hold_back() -> None:
    rng = np.random.default_rng(0)
    topology = Topology(replicas=2, microbatches=8, stages={"encoder": 2, "llm": 2})
    costs = {unit: rng.lognormal(0, 1, 40) for unit in topology.stages}
    execution = Execution(schedule="eager", in_flight=1, split_backward=False)
    batch = make_batch(np.arange(40), costs, topology, 0, execution=execution)
    assert seconds(batch, plan_slots(batch)) > 0
    assert plan("auto", batch.sample_ids, costs, topology, 0, execution=execution).predicted is not None


def test_slow_transfers_are_answered_with_fewer_microbatches() -> None:
    fast, slow = batch_of(n=64, replicas=1), batch_of(n=64, replicas=1, latency_s=0.5)
    assert len(set(plan_slots(fast)[0])) == 16
    used = len(set(plan_slots(slow)[0]))
    assert 1 <= used < 16
    assert seconds(slow, plan_slots(slow)) < seconds(slow, plan_slots(fast))


def test_the_memory_limit_keeps_microbatches_small_in_spite_of_slow_transfers() -> None:
    free = batch_of(n=64, replicas=1, latency_s=0.5)
    limit = 0.8 * float(peak_memory(Work.of(free, plan_slots(free))).max())
    capped = batch_of(n=64, replicas=1, latency_s=0.5, memory_limit=limit)
    assert len(set(plan_slots(capped)[0])) > len(set(plan_slots(free)[0]))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager", "zero-bubble"])
@pytest.mark.parametrize(("n", "spread"), [(5, 1.0), (64, 0.0), (200, 1.5)])
def test_auto_is_never_slower_than_any_other_and_says_what_it_took(schedule: str, n: int, spread: float) -> None:
    batch = batch_of(n, spread, replicas=2, microbatches=6, schedule=schedule)
    costs = dict(zip(batch.units, batch.costs, strict=True))
    plans = {
        strategy: plan(strategy, batch.sample_ids, costs, batch.topology, 0, execution=batch.execution) for strategy in STRATEGIES
    }
    times = {strategy: planned.predicted.iteration_s for strategy, planned in plans.items() if planned.predicted}
    assert times["auto"] == min(times.values()) == times[plans["auto"].chosen]
    assert plans["auto"].replicas == plans[plans["auto"].chosen].replicas
    assert plans["auto"].to_json()["chosen"] == plans["auto"].chosen
    assert "chosen" not in plans["random"].to_json()


def test_auto_prefers_a_slower_plan_that_fits_into_memory() -> None:
    free = batch_of()
    name, slots = fastest(free, CANDIDATES)
    peaks = {other: float(peak_memory(Work.of(free, CANDIDATES[other](free))).max()) for other in CANDIDATES}
    assert peaks[name] > min(peaks.values())
    limit = 0.5 * (peaks[name] + min(peaks.values()))
    capped = batch_of(memory_limit=limit)
    _, other_slots = fastest(capped, CANDIDATES)
    assert float(peak_memory(Work.of(capped, other_slots)).max()) <= limit < peaks[name]
    assert seconds(capped, other_slots) >= seconds(capped, slots)


def test_auto_leaves_out_plans_that_the_schedule_cannot_run() -> None:
    batch = batch_of(n=64, replicas=1)

    def later(batch: Batch) -> np.ndarray:
        """Everything's llm work in the last microbatch: more than 1F1B can hold back without split backward."""
        slots = np.zeros((2, 64), np.int64)
        slots[0] = np.arange(64) % 16
        slots[1] = 15
        return slots

    whole = batch_of(n=64, replicas=1, split_backward=False)
    with pytest.raises(ValueError, match="wait"):
        fastest(whole, {"later": later})
    assert fastest(whole, {"later": later, "joint": plan_slots})[0] == "joint"
    assert fastest(batch, {"later": later})[0] == "later"

    def refuses(batch: Batch) -> np.ndarray:
        raise ValueError("waits for itself")

    assert fastest(batch, {"refuses": refuses, "joint": plan_slots})[0] == "joint"
