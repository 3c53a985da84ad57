"""A memory limit makes another plan: samples move until every stage keeps within it, wherever any plan does."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Topology
from headrace.reorder_service.planning.batch import Batch, Slots, make_batch, slots_of
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search import lightening
from headrace.reorder_service.planning.search.lightening import lighten
from headrace.reorder_service.planning.simulation.eager_depth import planned_work
from headrace.reorder_service.planning.simulation.memory_limit import check_memory, excess_memory
from headrace.reorder_service.planning.simulation.simulator import peak_memory, simulate
from headrace.reorder_service.planning.strategies import CANDIDATES, STRATEGIES, plan_of, run_strategy
from tests.examples import with_examples
from tests.unit.reorder_service.planning.simulator_world import plans

STAGES = {"encoder": 3, "llm": 5}
GIB = 2.0**30


def batch_of(n: int, replicas: int, microbatches: int, seed: int = 0, spread: float = 0.6, **execution) -> Batch:
    rng = np.random.default_rng(seed)
    costs = {unit: rng.lognormal(0, spread, n) for unit in STAGES}
    memory = {unit: column * rng.uniform(0.5, 1.5, n) for unit, column in costs.items()}
    topology = Topology(replicas=replicas, microbatches=microbatches, stages=STAGES)
    return make_batch(np.arange(n), costs, topology, seed, execution=Execution(**execution), memory=memory)


def limited(batch: Batch, limit: float) -> Batch:
    return replace(batch, execution=replace(batch.execution, memory_limit=limit))


def peak(batch: Batch, slots: Slots) -> float:
    return float(peak_memory(planned_work(batch, slots)).max())


def seconds(batch: Batch, slots: Slots) -> float:
    return simulate(planned_work(batch, slots)).iteration_s


def least_peak(batch: Batch) -> float:
    """The least that the fullest stage can hold, of all plans in which nothing is deferred and no replica is idle."""
    least = math.inf
    for slot in itertools.product(range(batch.num_slots), repeat=batch.sample_ids.size):
        slots = np.broadcast_to(np.array(slot), batch.costs.shape)
        occupied = batch.occupied(slots)
        if occupied[:, 0].all() and not (occupied[:, 1:] > occupied[:, :-1]).any():
            least = min(least, peak(batch, slots))
    return least


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager", "zero-bubble"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 2)])
def test_every_strategy_fits_wherever_any_plan_fits(schedule: str, shape: tuple[int, int]) -> None:
    batch = batch_of(4, *shape, seed=len(schedule), schedule=schedule, in_flight=1 if schedule == "eager" else None)
    tight = limited(batch, least_peak(batch) * (1 + 1e-6))
    for strategy in STRATEGIES:
        _, slots = run_strategy(strategy, tight)
        assert excess_memory(tight, slots) == 0, strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_comes_within_five_per_cent_of_what_equal_microbatches_hold(strategy: str) -> None:
    batch = batch_of(200, 2, 8)
    equal = max(batch.memory.sum(axis=1) / np.array(list(STAGES.values())) / 16 * (8, 5))  # at most 8 and 5 at a time
    tight = limited(batch, 1.05 * float(equal))
    plan = plan_of(strategy, tight)
    plan.check()
    assert excess_memory(tight, slots_of(plan, tight.sample_ids)) == 0


@with_examples(40)
@given(plans(), st.floats(0.3, 1.1))
def test_a_lighter_plan_is_a_plan_of_the_same_samples_and_never_heavier(plan: tuple[Batch, Slots], share: float) -> None:
    lightening.ACTION_BUDGET, budget = 20_000, lightening.ACTION_BUDGET  # many of these limits cannot be kept
    try:
        _check_lighter(*plan, share)
    finally:
        lightening.ACTION_BUDGET = budget


def _check_lighter(batch: Batch, slots: Slots, share: float) -> None:
    held = peak(batch, slots)
    tight = limited(batch, max(share * held, 1e-9))
    lighter = lighten(tight, slots)
    if peak(tight, slots) <= tight.execution.memory_limit:
        assert lighter is slots
    assert excess_memory(tight, lighter) <= excess_memory(tight, slots)
    assert lighter.shape == slots.shape
    occupied = tight.occupied(lighter)
    assert not (occupied[:, 1:] > occupied[:, :-1]).any() or lighter is slots, "empty microbatches come last"
    assert (lighten(tight, slots) == lighter).all()


def test_taper_grades_its_microbatches_less_where_memory_is_short() -> None:
    batch = batch_of(512, 2, 16, spread=0.3)
    graded, equal = (CANDIDATES[name](batch) for name in ("taper", "joint"))
    assert peak(batch, graded) > 1.05 * peak(batch, equal)
    tight = limited(batch, 0.5 * (peak(batch, graded) + peak(batch, equal)))
    flatter = lighten(tight, CANDIDATES["taper"](tight))
    assert excess_memory(tight, flatter) == 0
    assert seconds(batch, graded) < seconds(batch, flatter) < seconds(batch, equal)


def test_auto_takes_the_fastest_plan_that_fits() -> None:
    free = batch_of(120, 2, 8)
    peaks = sorted(peak(free, CANDIDATES[name](free)) for name in CANDIDATES)
    for limit in (1.01 * peaks[0], 0.5 * (peaks[0] + peaks[-1]), peaks[-1]):
        tight = limited(free, limit)
        slots = {strategy: run_strategy(strategy, tight)[1] for strategy in STRATEGIES}
        fitting = [strategy for strategy in STRATEGIES if excess_memory(tight, slots[strategy]) == 0]
        assert "auto" in fitting
        may_run = [name for name in fitting if not tight.crosses_replicas(slots[name])]
        assert seconds(tight, slots["auto"]) == min(seconds(tight, slots[name]) for name in may_run)


def planned_slots(batch: Batch) -> Slots:
    return run_strategy("auto", batch)[1]


def test_a_sample_that_does_not_fit_by_itself_is_named_with_what_it_takes() -> None:
    batch = batch_of(8, 2, 2)
    memory = np.full((2, 8), GIB)
    memory[1, 5] = 15 * GIB  # 3 GiB on each of five stages
    batch = limited(replace(batch, memory=memory), 2.5 * GIB)
    with pytest.raises(ValueError, match=r"sample charts/5 alone take 3 GiB .* 'llm', 0\.5 GiB more than .* 2\.5 GiB"):
        check_memory(batch, planned_slots(batch), "charts/{}".format)


def test_where_no_plan_fits_the_excess_and_the_microbatch_are_named() -> None:
    batch = batch_of(8, 1, 2)
    batch = limited(
        replace(batch, memory=np.full((2, 8), 3 * GIB)), 6 * GIB
    )  # on an encoder's stage 1 GiB a sample, and 8 in flight
    with pytest.raises(ValueError, match=r"within 6 GiB: .* stage 0 \('encoder'\) of replica 0 exceeds that by 2 GiB"):
        check_memory(batch, planned_slots(batch), str)
    roomy = limited(batch, 8 * GIB)
    check_memory(roomy, planned_slots(roomy), str)
